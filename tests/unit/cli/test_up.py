from __future__ import annotations

import sys
from pathlib import Path
from socket import create_server

import msgspec
import pytest
from msgspec.structs import replace

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.up import CONSOLE_PORT, load_settings, up, with_models, with_policies
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import machine
from tests.support.processes import free_port


def test_policies_are_chosen_by_name() -> None:
    settings = with_policies(MeshConfig(placement="isolated"), None, "fcfs")
    assert (settings.placement, settings.ordering) == ("isolated", "fcfs")
    assert with_policies(settings, "pack", None).placement == "pack"


@pytest.mark.parametrize(
    ("placement", "ordering", "field", "known"),
    [
        ("packed", None, "placement", "pack"),
        (None, "first", "ordering", "hrrs"),
        (None, "hrrs_anticipatory", "ordering", "--ordering hold"),
    ],
)
def test_policy_that_there_is_not_is_refused_with_those_that_there_are(
    placement: str | None, ordering: str | None, field: str, known: str
) -> None:
    with pytest.raises(CallerError) as caught:
        with_policies(MeshConfig(), placement, ordering)
    assert caught.value.info.field == field
    assert known in (caught.value.info.remedy or "")


def test_percentile_of_iterations_is_that_of_the_command_line_before_the_file_s() -> None:
    settings = MeshConfig(slo_percentile=95.0)
    assert with_policies(settings, None, None).slo_percentile == 95.0
    assert with_policies(settings, None, None, None, 0.0).slo_percentile == 0.0
    with pytest.raises(CallerError, match="slo_percentile must be from 0 to 100") as caught:
        with_policies(settings, None, None, None, 101.0)
    assert caught.value.info.field == "slo_percentile"
    assert "95" in (caught.value.info.remedy or "")


NODES = MeshConfig().nodes


@pytest.mark.parametrize(
    ("earlier", "field", "what"),
    [
        (MeshConfig(nodes=[*NODES, NodeConfig("train-1", "train", [1])]), "nodes", "train-1"),
        (MeshConfig(nodes=[NODES[0], replace(NODES[1], pool="other")]), "nodes", "train-0"),
        (MeshConfig(nodes=[NODES[0], replace(NODES[1], devices=[1])]), "nodes", "train-0"),
        (MeshConfig(tenants=["demo", "acme"]), "tenants", "acme"),
        (MeshConfig(checkpoint_root="/kept"), "checkpoint_root", "/kept"),
        (MeshConfig(nats_servers=3), "nats_servers", "3 NATS servers"),
    ],
)
def test_run_is_not_resumed_without_what_it_has(
    tmp_path: Path, earlier: MeshConfig, field: str, what: str
) -> None:
    (tmp_path / "mesh.json").write_text('{"pid": 0}')
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(earlier))
    mesh_file = tmp_path / "mesh.toml"
    rows = [
        f'{{name = "{node.name}", pool = "{node.pool}", devices = {node.devices}}}'
        for node in NODES
    ]
    mesh_file.write_text(f"[mesh]\nnodes = [{', '.join(rows)}]\n")
    with pytest.raises(CallerError, match=what) as caught:
        up(resume=True, run=str(tmp_path), mesh_file=mesh_file)
    assert caught.value.info.field == f"mesh.{field}"
    assert str(tmp_path) in (caught.value.info.remedy or "")


def test_run_goes_on_with_its_own_settings_where_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MeshConfig(nodes=NODES[:1], ordering="fcfs", gateway_port=8801)

    def resumed(console_port: int, mesh_file: Path | None = None) -> MeshConfig:
        stored = replace(own, console_port=console_port)
        (tmp_path / "settings.json").write_bytes(msgspec.json.encode(stored))
        return load_settings(mesh_file, tmp_path)

    assert resumed(0) == own, "and without a console, as before"
    port = free_port()
    assert resumed(port) == replace(own, console_port=port)
    with create_server(("127.0.0.1", port)):
        other = resumed(port)
    assert other.console_port not in (0, port)
    assert replace(other, console_port=0) == own

    mesh_file = tmp_path / "mesh.toml"
    mesh_file.write_text("[mesh]\nrouters = 1\n")
    plain = MeshConfig(routers=1)
    assert replace(resumed(0, mesh_file), console_port=0) == plain
    monkeypatch.setenv("PHASELOOM_MESH_ROUTERS", "1")
    assert replace(resumed(0), console_port=0) == plain


def test_console_takes_another_port_than_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(None, None, gateway=CONSOLE_PORT).console_port != CONSOLE_PORT
    monkeypatch.setenv("PHASELOOM_MESH_GATEWAY_PORT", str(CONSOLE_PORT))
    assert load_settings(None, None).console_port != CONSOLE_PORT


def test_run_is_resumed_with_more_than_it_has(tmp_path: Path) -> None:
    MeshConfig().check_resumes(tmp_path)
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(MeshConfig()))
    more = [*NODES, NodeConfig("train-1", "train", [1])]
    MeshConfig(nodes=more, tenants=["demo", "acme"], ordering="fcfs").check_resumes(tmp_path)


def test_port_that_somebody_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given, field in (({"console_port": port}, "console"), ({"gateway": port}, "gateway")):
            with pytest.raises(CallerError, match=f"port {port} cannot be used") as refused:
                up(runs=tmp_path / "runs", **given)
            assert refused.value.info.field == f"mesh.{field}_port"
    assert not (tmp_path / "runs").exists()
    with pytest.raises(CallerError, match="gateway_port must be 0 to 65535, got 99999"):
        up(runs=tmp_path / "runs", gateway=99999)


def test_run_to_go_on_with_is_not_passed_over_without_resume(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="works only with --resume") as refused:
        up(runs=tmp_path / "runs", run="20260101-000000")
    assert "--resume" in (refused.value.info.remedy or "")
    assert not (tmp_path / "runs").exists()


def test_extra_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services that could not be imported would be started again until the timeout."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    port = free_port()
    with pytest.raises(CallerError, match="a gateway needs packages that are not") as refused:
        up(runs=tmp_path / "runs", gateway=port, console_port=0)
    assert refused.value.info.remedy == "pip install 'phaseloom[gateway]'"
    with pytest.raises(CallerError, match="a console needs packages that are not") as refused:
        up(runs=tmp_path / "runs", console_port=port)
    assert refused.value.info.remedy == "pip install 'phaseloom[console]'"
    assert not (tmp_path / "runs").exists()


def test_model_that_there_is_not_is_refused_before_anything_starts(tmp_path: Path) -> None:
    mesh_file = tmp_path / "mesh.toml"
    mesh_file.write_text(f'[mesh.models]\nsmall = "{tmp_path}/none"\n')
    with pytest.raises(CallerError, match=r"the directory .*/none does not exist") as refused:
        up(mesh_file=mesh_file, runs=tmp_path / "runs", console_port=0)
    info = refused.value.info
    assert (info.code, info.field) == (Code.NOT_FOUND, "mesh.models.small")
    assert "config.json" in info.remedy
    assert not (tmp_path / "runs").exists()


def test_run_keeps_its_nodes_unless_the_mesh_file_states_some(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(MeshConfig(nodes=NODES[:1])))
    mesh_file = tmp_path / "mesh.toml"
    mesh_file.write_text("[mesh]\nrouters = 1\n")
    settings = load_settings(mesh_file, tmp_path)
    assert with_models(settings, [], mesh_file, tmp_path).nodes == NODES[:1]
    mesh_file.write_text('[[mesh.nodes]]\nname = "n"\npool = "train"\ndevices = ["1MiB"]\n')
    settings = load_settings(mesh_file, tmp_path)
    assert with_models(settings, [], mesh_file, tmp_path).nodes == settings.nodes


def test_devices_of_a_new_run_have_half_of_the_available_memory() -> None:
    sized = with_models(load_settings(None, None), [], None, None)
    devices = sum(size for node in sized.nodes for size in node.devices)
    assert devices > sum(size for node in NODES for size in node.devices)
    assert devices == pytest.approx(machine.available_bytes() / 2, rel=0.2), "others use memory too"
