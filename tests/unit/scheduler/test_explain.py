"""What people are told of where they are and why they wait: never the name of a foreign job."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.events import JobSubmitted, QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.specs import JobSpec
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.planning import admission, groups
from phaseloom.scheduler.core.policies.registry import ORDERING as ORDERINGS
from phaseloom.scheduler.core.policies.registry import PLACEMENT as PLACEMENTS
from phaseloom.scheduler.core.state.cluster import Placed, Waits
from phaseloom.scheduler.core.state.step import Step
from tests.support.contention import config_of
from tests.support.world import World, spec
from tests.unit.scheduler.weave_cluster import empty, job

SECRET = "elsewhere.secret"


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_reason_of_a_placement_policy_names_a_job(name: str) -> None:
    """From the first beside it to the one that has no place any more."""
    cluster = empty(2, max_group_jobs=3)
    decision = admission.decide(cluster, job(SECRET, 100, 100, 1.5), PLACEMENTS[name])
    assert isinstance(decision, Placed)
    groups.join(cluster, job(SECRET, 100, 100, 1.5), decision)
    reasons = []
    for number in range(7):
        newcomer = job(f"here.j{number}", 90, 110, 1.4)
        decision = admission.decide(cluster, newcomer, PLACEMENTS[name])
        assert isinstance(decision, Placed | Waits)
        reasons.append(decision.reason)
        if isinstance(decision, Waits):
            break
        groups.join(cluster, newcomer, decision)
    assert isinstance(decision, Waits), "two nodes of each pool take no seven more"
    for reason in reasons:
        assert reason
        assert "secret" not in reason
        assert "elsewhere" not in reason


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("tenant", ["t", "elsewhere"])
def test_waiting_operation_is_told_the_names_of_its_own_tenant_only(
    tenant: str, ordering: str
) -> None:
    world = World(config=config_of(ordering))
    world.run()
    first, second = JobKey(tenant, "secret"), JobKey("t", "mine")
    for key in (first, second):
        job_spec = JobSpec(deployments=[spec("policy", "train", trainable=True)])
        world.feed(JobSubmitted(key, job_spec, f"submit-{key}"))
    world.run()
    operations = [OperationKey(k.tenant, k.job, "policy", "1") for k in (first, second)]
    for operation in operations:
        event = QueuedOperation(operation, f"id-{operation}", "optim_step")
        world.kinds[operation.deployment_key, 1] = event.kind
        world.payloads[str(operation)] = event
        world.feed(event)

    state = world.core.state
    mine = state.deployments["t.mine.policy"]
    step = Step(state, state.sequence, world.now_s)
    (line,) = explain.waiting_reasons(step, mine, mine.queue.operations[1])
    is_own = tenant == "t"
    assert ("secret" in line) is is_own
    assert ("another tenant" in line) is not is_own
    assert "elsewhere" not in line
