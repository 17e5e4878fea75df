from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.child import Ended, logged_reason, pause_s
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import ChildSpec, child_specs, with_metrics
from phaseloom.cli.rundir import locked
from phaseloom.cli.supervisor import Mesh, socket_directory
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.process import config
from phaseloom.common.transport.natsserver import Credentials
from phaseloom.router.core.limits import Limits
from phaseloom.router.main import RouterConfig

CREDENTIALS = Credentials("nats://127.0.0.1:1", "mesh", "word", {"demo": "other"})


def environments(settings: MeshConfig) -> dict[str, dict[str, str]]:
    specs = child_specs(settings, Path("/run"), Path("/s"), CREDENTIALS, "secret")
    return {spec.name: spec.environment for spec in specs}


def test_child_specs_give_each_service_its_own_settings() -> None:
    by_name = environments(MeshConfig(ordering="fcfs", tenants=["demo", "acme"]))
    assert list(by_name) == [
        "scheduler",
        "router-0",
        "router-1",
        "profiler",
        "statemgr-rollout-0",
        "worker-rollout-0",
        "statemgr-train-0",
        "worker-train-0",
    ]
    assert by_name["scheduler"]["PHASELOOM_SCHEDULER_ORDERING"] == "fcfs"
    assert by_name["router-1"]["PHASELOOM_ROUTER_TENANTS"] == '["demo","acme"]'
    assert by_name["worker-train-0"]["PHASELOOM_WORKER_DEVICES"] == "[16777216]"
    assert by_name["worker-train-0"]["PHASELOOM_WORKER_EXCLUSIVE_RESIDENCY"] == "job"
    assert by_name["worker-train-0"]["PHASELOOM_WORKER_DEVICE_KIND"] == "emulated"
    assert by_name["statemgr-train-0"]["PHASELOOM_STATEMGR_SOCKET"] == "/s/train-0.sock"
    for environment in by_name.values():
        assert environment["PHASELOOM_BUS_PASSWORD"] == "word"
        assert environment["OMP_NUM_THREADS"] == "1"


async def test_second_mesh_in_a_directory_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CallerError, match="in use by a running mesh"):
        async with Mesh(MeshConfig(), tmp_path):
            raise AssertionError("two meshes on one store")


def test_metrics_give_each_child_a_port_of_its_own() -> None:
    """Without them none, whatever is inherited."""
    specs = [
        ChildSpec(name, "module", environ) for name, environ in environments(MeshConfig()).items()
    ]
    assert {spec.environment["PHASELOOM_METRICS_PORT"] for spec in specs} == {"0"}
    with_ports, ports = with_metrics(specs)
    assert list(ports) == [spec.name for spec in specs]
    assert len(set(ports.values())) == len(specs)
    assert [int(s.environment["PHASELOOM_METRICS_PORT"]) for s in with_ports] == list(
        ports.values()
    )


def test_child_specs_keep_the_nodes_secret_from_services_that_need_it_not() -> None:
    has_secret = {
        name for name, environ in environments(MeshConfig()).items() if "secret" in environ.values()
    }
    assert has_secret == {
        "scheduler",
        "statemgr-rollout-0",
        "worker-rollout-0",
        "statemgr-train-0",
        "worker-train-0",
    }


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (MeshConfig(nodes=[]), "mesh.nodes"),
        (MeshConfig(nodes=[NodeConfig("a", "train", [1])] * 2), "mesh.nodes"),
        (MeshConfig(nodes=[NodeConfig("a.b", "train", [1])]), "mesh.nodes"),
        (MeshConfig(tenants=[]), "mesh.tenants"),
        (MeshConfig(tenants=["a", "a"]), "mesh.tenants"),
        (MeshConfig(tenants=["*"]), "mesh.tenants"),
        (MeshConfig(tenants=["mesh"]), "mesh.tenants"),
        (MeshConfig(routers=0), "mesh.routers"),
        (MeshConfig(schedulers=0), "mesh.schedulers"),
        (MeshConfig(nats_servers=2), "mesh.nats_servers"),
        (MeshConfig(nats_servers=5), "mesh.nats_servers"),
        (MeshConfig(nodes=[NodeConfig("a", "tr.ain", [1])]), "mesh.nodes.pool"),
        (MeshConfig(nodes=[NodeConfig("a", "train", [])]), "mesh.nodes.devices"),
        (MeshConfig(nodes=[NodeConfig("a", "train", [1, -5])]), "mesh.nodes.devices"),
        (
            MeshConfig(nodes=[NodeConfig("a", "train", [1], host_memory_bytes=-1)]),
            "mesh.nodes.a.host_memory_bytes",
        ),
        (MeshConfig(nodes=[NodeConfig("a", "train", [1, 2**50])]), "mesh.nodes.a.devices"),
        (
            MeshConfig(nodes=[NodeConfig("a", "train", [1], host_memory_bytes=2**50)]),
            "mesh.nodes.a.host_memory_bytes",
        ),
        (
            MeshConfig(nodes=[NodeConfig("a", "train", [1], price_per_hour=-1.0)]),
            "mesh.nodes.a.price_per_hour",
        ),
        (
            MeshConfig(nodes=[NodeConfig("a", "train", [1], interpreters={"vlm": "/bin/sh"})]),
            "mesh.nodes.interpreters",
        ),
        (
            MeshConfig(nodes=[NodeConfig("a", "train", [1], interpreters={"vllm": "/bin"})]),
            "mesh.nodes.interpreters",
        ),
        (MeshConfig(duty_limit=1.5), "mesh.duty_limit"),
        (MeshConfig(switch_s=float("inf")), "mesh.switch_s"),
        (MeshConfig(checkpoint_root="/dev/null/checkpoints"), "mesh.checkpoint_root"),
        (MeshConfig(checkpoint_root="/dev/null"), "mesh.checkpoint_root"),
        (MeshConfig(frozen_bases={"base": ["ab" * 31]}), "mesh.frozen_bases.base"),
        (MeshConfig(gateway_port=70_000), "mesh.gateway_port"),
        (MeshConfig(gateway_port=8_000, console_port=8_000), "mesh.console_port"),
        (MeshConfig(tenant_limits={"demo": {"rate": math.inf}}), "mesh.tenant_limits.demo.rate"),
        (MeshConfig(max_group_jobs=-2), "mesh.max_group_jobs"),
        (MeshConfig(idle_grace_s=float("nan")), "mesh.idle_grace_s"),
        (MeshConfig(ops_max_bytes=0), "mesh.ops_max_bytes"),
        (MeshConfig(tenant_limits={"nobody": {}}), "mesh.tenant_limits.nobody"),
        (
            MeshConfig(tenant_limits={"demo": {"max_operation": 5.0}}),
            "mesh.tenant_limits.demo.max_operation",
        ),
        (MeshConfig(tenant_limits={"demo": {"burst": 0.0}}), "mesh.tenant_limits.demo.burst"),
        (
            MeshConfig(tenant_limits={"demo": {"max_operations": 5.5}}),
            "mesh.tenant_limits.demo.max_operations",
        ),
    ],
)
def test_check_refuses_what_cannot_run(settings: MeshConfig, field: str) -> None:
    with pytest.raises(CallerError) as refused:
        settings.check()
    assert refused.value.info.field == field


def test_mesh_config_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        "[mesh]\nrouters = 1\n"
        '[[mesh.nodes]]\nname = "big"\npool = "train"\ndevices = [1024, 1024]\n'
        'exclusive_residency = "shared"\ndevice_kind = "cuda"\nsite = "oslo"\n'
    )
    settings = config.load(MeshConfig, "mesh", {}, file=file)
    assert [node.name for node in settings.nodes] == ["big"]
    assert settings.nodes[0].devices == [1024, 1024]
    assert settings.routers == 1
    of_big = environments(settings)
    assert of_big["worker-big"]["PHASELOOM_WORKER_DEVICE_KIND"] == "cuda"
    assert of_big["statemgr-big"]["PHASELOOM_STATEMGR_SITE"] == "oslo"
    assert msgspec.structs.replace(settings, nodes=[], routers=2) == MeshConfig(nodes=[])


def test_bounds_of_a_tenant_reach_the_routers(tmp_path: Path) -> None:
    """They came there as 5.0, which is no number of operations, and no router started."""
    file = tmp_path / "mesh.toml"
    file.write_text("[mesh.tenant_limits.demo]\nmax_operations = 5\nrate = 10\n")
    settings = config.load(MeshConfig, "mesh", environ={}, file=file)
    settings.check()
    router = config.load(RouterConfig, "router", environments(settings)["router-0"])
    assert router.limits("demo") == Limits(max_operations=5, rate=10)


def test_pause_doubles_up_to_a_limit() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert pause_s(7) == pause_s(60) == 5.0


@pytest.mark.parametrize(
    ("code", "text"), [(1, "exit code 1 after 2.0 s"), (-9, "SIGKILL after 2.0 s")]
)
def test_ended_says_how(code: int, text: str) -> None:
    assert str(Ended(code, 2.0)) == text


def test_socket_directory_is_in_the_run_where_its_name_leaves_room(short_dir: Path) -> None:
    assert socket_directory(short_dir, ["train-0"]) == short_dir / "s"


def test_socket_directory_is_elsewhere_when_the_name_is_too_long(tmp_path: Path) -> None:
    directory = socket_directory(tmp_path / ("x" * 100), ["train-0"])
    assert len(os.fsencode(directory / "agent-train-0.sock")) <= 107
    directory.rmdir()


def test_reason_that_a_service_ended_for_is_told(tmp_path: Path) -> None:
    log = tmp_path / "router-0.log"
    assert logged_reason(log) == ""
    said = {"time": 1.0, "level": "CRITICAL", "message": "router cannot start: there is no port 1"}
    log.write_bytes(b"x" * 100_000 + b"\n" + msgspec.json.encode(said) + b"\n")
    assert logged_reason(log) == ": router cannot start: there is no port 1"
    for line in (msgspec.json.encode(said | {"level": "INFO"}), b"Fatal Python error", b"", b"7"):
        log.write_bytes(line)
        assert logged_reason(log) == ""


def test_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    node = NodeConfig("rollout-0", "rollout", [1], interpreters={"vllm": str(tmp_path / "python")})
    with pytest.raises(CallerError, match="for vllm") as refused:
        MeshConfig(nodes=[node]).check()
    assert refused.value.info.field == "mesh.nodes.interpreters"
