"""Where deployments go: the nodes that could take them, and the policy's choice among those."""

from __future__ import annotations

from phaseloom.common.errors import Code, ErrorInfo
from phaseloom.scheduler.core import wpgs
from phaseloom.scheduler.core.placement import legacy as placement
from phaseloom.scheduler.core.state import Deployment, Node
from phaseloom.scheduler.core.step import Step


def usable(step: Step, pool: str, num_devices: int) -> list[Node]:
    """The nodes of the pool that are up and have enough devices."""
    nodes = [node for node in step.state.nodes.values() if node.pool == pool]
    return [node for node in nodes if node.is_up and len(node.devices) >= num_devices]


def choose(step: Step, nodes: list[Node]) -> Node | None:
    """Args: nodes: at least one. Returns: None where the policy lets the job wait."""
    views = [placement.NodeView(n.node, _num_jobs(step, n)) for n in nodes]
    policy = placement.POLICIES[step.config.placement]
    chosen = policy(sorted(views, key=lambda view: view.node))
    return None if chosen is None else step.state.nodes[chosen.node]


def put(step: Step, deployment: Deployment, host: Node) -> None:
    """On the devices of the node that the fewest deployments are on."""
    by_load = sorted(range(len(host.devices)), key=lambda i: (len(host.devices[i].placed), i))
    wpgs.place(step, deployment, host.node, sorted(by_load[: deployment.spec.layout.num_ranks]))


def too_small(step: Step, pool: str, num_devices: int) -> ErrorInfo | None:
    """Why no node of the pool can ever take it, as far as they are known."""
    of_pool = [node for node in step.state.nodes.values() if node.pool == pool]
    most = max((len(node.devices) for node in of_pool), default=num_devices)
    if most >= num_devices:
        return None
    return ErrorInfo(
        Code.RESOURCE_EXHAUSTED,
        f"a deployment of it takes {num_devices} devices of one node of pool {pool!r}, "
        f"where no node has more than {most}",
        field="spec.deployments",
        remedy=f"lay it out over at most {most} ranks, or start a node with {num_devices} devices",
    )


def why_none(step: Step, pool: str) -> str:
    """Why the pool has no usable node now."""
    is_known = any(node.pool == pool for node in step.state.nodes.values())
    return "every node of it is down" if is_known else "no node has ever declared it"


def known_pools(step: Step) -> str:
    return ", ".join(sorted({node.pool for node in step.state.nodes.values()})) or "none"


def _num_jobs(step: Step, node: Node) -> int:
    names = [name for device in node.devices for name in device.placed]
    return len({step.state.deployments[name].key.job_key for name in names})
