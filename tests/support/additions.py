"""What somebody would write to add a policy or a backend, and a program that uses each of them.

`docs/extending.md` says which files that takes; `newkind` has the operation kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_POLICIES = "services/scheduler/phaseloom/scheduler/core/policies"
_REGISTRY = f"{_POLICIES}/registry.py"
_BACKENDS = "services/worker/phaseloom/worker/backends"


@dataclass(frozen=True)
class Addition:
    name: str
    new: dict[str, str]
    """File → what it holds."""
    changed: dict[str, list[tuple[str, str]]]
    """File → (a place in it, what stands there afterwards)."""
    program: str
    """Prints `done`, once it has used what was added."""

    @property
    def files(self) -> set[str]:
        return {*self.new, *self.changed}

    def write(self, root: Path) -> None:
        for name, text in self.new.items():
            assert not (root / name).exists()
            (root / name).write_text(text)
        for name, changes in self.changed.items():
            text = (root / name).read_text()
            for place, written in changes:
                assert text.count(place) == 1, (name, place)
                text = text.replace(place, written)
            (root / name).write_text(text)


def _policy(kind: str, name: str, module: str, program: str) -> Addition:
    imported = f"from phaseloom.scheduler.core.policies.{kind}.{name} import {name}\n"
    table = f"\n{kind.upper()}: dict[str, {kind.capitalize()}] = {{\n"
    return Addition(
        name,
        {f"{_POLICIES}/{kind}/{name}.py": module},
        {_REGISTRY: [(table, f'\n{imported}{table}    "{name}": {name},\n')]},
        program,
    )


MULTIPLEXING = _policy(
    "multiplexing",
    "pairs",
    """
from phaseloom.scheduler.core.policies.sharing_view import Multiplexing

pairs = Multiplexing(lambda view: [1] * len(view.claims) if len(view.claims) <= 2 else None)
""",
    """
from phaseloom.scheduler.core.policies.registry import check_policies
from tests.unit.scheduler.test_shares import overlap_s, world_of

check_policies("pack", "hrrs", "pairs", 0.0)
world = world_of("pairs")
world.queue("a", "policy", 1, "forward_backward")
world.queue("b", "policy", 1, "forward_backward")
world.run()
assert overlap_s(world, "a.policy.1", "b.policy.1") > 0.4
print("done")
""",
)
ORDERING = _policy(
    "ordering",
    "lifo",
    """
from phaseloom.scheduler.core.policies.device_view import Ordering

lifo = Ordering(
    lambda view: max(view.candidates, key=lambda c: c.by_arrival),
    lambda candidate, view: "the newest first",
    weighs=False,
)
""",
    """
from tests.support.contention import Call, Contention, Loop, config_of

jobs = [Loop(name, [Call("forward_backward", 5.0)], 1, starts_s=at) for name, at in
        (("first", 0.0), ("second", 1.0), ("third", 2.0))]
assert Contention(config_of("lifo"), jobs).run().order == ["first", "third", "second"]
print("done")
""",
)
PLACEMENT = _policy(
    "placement",
    "never",
    """
from phaseloom.scheduler.core.state.cluster import Placement, Waits

never = Placement(lambda cluster, member: Waits("never: it places nothing"))
""",
    """
from tests.support.contention import Call, Contention, Loop, config_of

made = Contention(config_of("fcfs", placement="never"), [Loop("a", [Call("forward", 1.0)], 1)])
assert not made.run(until_s=5000.0).runs
print("done")
""",
)
BACKEND = Addition(
    "quick",
    {
        f"{_BACKENDS}/quick.py": """
from phaseloom.worker.backends.noop import NoopBackend


class QuickBackend(NoopBackend):
    pass
"""
    },
    {
        f"{_BACKENDS}/__init__.py": [
            (
                '    "noop": (',
                '    "quick": ("phaseloom.worker.backends.quick", "QuickBackend"),\n    "noop": (',
            )
        ],
        f"{_BACKENDS}/capabilities.py": [
            ('    "noop": ', '    "quick": Capabilities(("forward",)),\n    "noop": ')
        ],
    },
    """
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import Datum, Forward
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.wire import RankConfig
from phaseloom.worker.state.heap import Heap

spec = DeploymentSpec("policy", "train", "quick", ModelSpec({}))
factory = backend_factory("quick")
settings = RankConfig("", DeploymentKey("acme", "sums", "policy"), 1, spec, "n0", 0, "", "")
executor = Executor(settings, factory(spec, Heap(factory.plan(spec).heap_bytes)))
assert len(executor.run(Forward([Datum([1], [2])])).logprobs) == 1
print("done")
""",
)
