"""Settings of services that could not work: each service refuses them when it starts."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import pytest

from phaseloom.cli.meshconfig import SCHEDULER_SETTINGS, MeshConfig
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import SchedulerConfig, SchedulerSettings
from phaseloom.common.process import machine
from phaseloom.common.process.config import description_of
from phaseloom.console.main import ConsoleConfig
from phaseloom.gateway.main import GatewayConfig
from phaseloom.router.main import RouterConfig
from phaseloom.scheduler.core.state.cluster import Limits
from phaseloom.scheduler.main import Config
from phaseloom.statemgr.main import StateManagerConfig
from phaseloom.worker.config import WorkerConfig

TEXTS = dict.fromkeys(
    (
        "node",
        "pool",
        "socket",
        "secret",
        "certificates",
        "directory",
        "state_socket",
        "state_secret",
        "runtime_directory",
    ),
    "x",
)
SOUND: dict[type, dict[str, Any]] = {
    ConsoleConfig: {"port": 8900, "operator_key": "key"},
    GatewayConfig: {"port": 8800, "keys": {"key": "demo"}, "passwords": {"demo": "word"}},
    RouterConfig: {"tenants": ["demo"]},
    Config: {},
    StateManagerConfig: {**TEXTS, "devices": [1], "host_memory_bytes": 1},
    WorkerConfig: {**TEXTS, "devices": [1], "host_memory_bytes": 1},
}
MORE = machine.memory_bytes() + 1
WRONG: list[tuple[type, dict[str, Any], str]] = [
    (ConsoleConfig, {"port": 70_000}, "console.port"),
    (ConsoleConfig, {"history": 0}, "console.history"),
    (GatewayConfig, {"port": 0}, "gateway.port"),
    (GatewayConfig, {"session_s": -1.0}, "gateway.session_s"),
    (GatewayConfig, {"passwords": {}}, "gateway.passwords"),
    (RouterConfig, {"tenants": []}, "router.tenants"),
    (RouterConfig, {"tenants": ["a", "a"]}, "router.tenants"),
    (RouterConfig, {"tenants": ["a.b"]}, "router.tenants"),
    (RouterConfig, {"ops_max_bytes": 1}, "router.ops_max_bytes"),
    (RouterConfig, {"session_ttl_s": 0.0}, "router.session_ttl_s"),
    (Config, {"duty_limit": 1.5}, "scheduler.duty_limit"),
    (Config, {"idle_grace_s": -1.0}, "scheduler.idle_grace_s"),
    (Config, {"max_reading": 0}, "scheduler.max_reading"),
    (Config, {"ordering": "lottery"}, "scheduler.ordering"),
    (StateManagerConfig, {"host_memory_bytes": 0}, "statemgr.host_memory_bytes"),
    (StateManagerConfig, {"host_memory_bytes": MORE}, "statemgr.host_memory_bytes"),
    (StateManagerConfig, {"peer_timeout_s": 0.0}, "statemgr.peer_timeout_s"),
    (WorkerConfig, {"devices": []}, "worker.devices"),
    (WorkerConfig, {"devices": [0]}, "worker.devices"),
    (WorkerConfig, {"devices": [MORE]}, "worker.devices"),
    (
        WorkerConfig,
        {"device_kind": "cuda", "devices": [1] * (len(machine.gpus()) + 1)},
        "worker.device_kind",
    ),
    (WorkerConfig, {"lease_ttl_s": 0.0}, "worker.lease_ttl_s"),
    (WorkerConfig, {"cores_per_device": 0}, "worker.cores_per_device"),
]


class Checked(Protocol):
    def check(self) -> None: ...


def settings(kind: type, changes: dict[str, Any]) -> Checked:
    given: Checked = msgspec.convert(SOUND[kind] | changes, kind)
    return given


@pytest.mark.parametrize("kind", SOUND)
def test_sound_settings_are_taken(kind: type) -> None:
    settings(kind, {}).check()


@pytest.mark.parametrize(("kind", "changes", "field"), WRONG)
def test_settings_that_could_not_work_are_refused(
    kind: type, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(CallerError) as refused:
        settings(kind, changes).check()
    assert refused.value.info.field == field
    assert refused.value.info.remedy


def test_setting_of_the_scheduler_has_one_default_everywhere() -> None:
    """A mesh without settings, a scheduler without settings and a placement policy agree."""
    scheduler, mesh, limits = Config(), MeshConfig(), Limits()
    for name in SCHEDULER_SETTINGS:
        assert getattr(mesh, name) == getattr(scheduler, name), name
    for name in {*SchedulerSettings.__struct_fields__} & {*Limits.__struct_fields__}:
        assert getattr(limits, name) == getattr(scheduler, name), name
    assert SchedulerConfig.of(Config(quantum_s=5.0)).quantum_s == 5.0


@pytest.mark.parametrize("name", SchedulerSettings.__struct_fields__)
def test_every_setting_of_the_scheduler_is_described_for_the_command_line(name: str) -> None:
    assert description_of(SchedulerSettings, name).endswith(".")
