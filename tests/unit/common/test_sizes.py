from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.sizes import LARGEST, SIZE, Size, format_size, parse_size
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.common.process import config
from phaseloom.gateway.main import GatewayConfig
from phaseloom.router.main import RouterConfig
from phaseloom.scheduler.main import Config
from phaseloom.statemgr.main import StateManagerConfig
from phaseloom.worker.config import WorkerConfig

GiB = 2**30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("0", 0), ("1", 1), ("12B", 12), ("8GiB", 8 * GiB), ("8 gib", 8 * GiB), ("8Gi", 8 * GiB)),
        *(
            ("1G", 10**9),
            ("1GB", 10**9),
            ("1.5GiB", 3 * GiB // 2),
            ("0.5k", 500),
            (" 2T ", 2 * 10**12),
        ),
        *(("1KiB", 1024), ("3MiB", 3 * 2**20), ("1PiB", 2**50), (str(LARGEST), LARGEST)),
    ],
)
def test_sizes_are_read_with_and_without_units(text: str, num_bytes: int) -> None:
    assert parse_size(text, "devices") == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1", "-1G", "1GG", "1Gib2", "8 G B", "8  GiB", "1e9", "0x10", "nan", "inf"),
        *("1.3B", "0.3", "1,000", "9" * 5000, "9999999PiB", "1 TiB\n1", "١GiB", "8GiBs"),
    ],
)
def test_other_texts_are_refused_with_the_units(text: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_size(text, "mesh.ops_max_bytes")
    info = refused.value.info
    assert (info.field, len(info.message) < 100) == ("mesh.ops_max_bytes", True)
    assert "8GiB" in info.remedy


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (5, "5 B"),
        (1536, "1.5 KiB"),
        (8 * 2**20, "8 MiB"),
        (1000 * 2**20, "1.0 GiB"),
        (2**41, "2,048.0 GiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_sizes_of_a_mesh_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        '[mesh]\nops_max_bytes = "1GiB"\n[mesh.tenant_limits.demo]\nmax_bytes = "1M"\nrate = 2.5\n'
        '[[mesh.nodes]]\nname = "n"\npool = "train"\ndevices = ["1GiB", 7]\n'
        'host_memory_bytes = "512MiB"\n'
    )
    settings = config.load(MeshConfig, "mesh", {}, file=file)
    assert settings.nodes == [NodeConfig("n", "train", [GiB, 7], host_memory_bytes=GiB // 2)]
    assert settings.ops_max_bytes == GiB
    assert settings.tenant_limits == {"demo": {"max_bytes": 10**6, "rate": 2.5}}

    nodes = '[{"name": "m", "pool": "train", "devices": ["2MiB"]}]'
    environ = {"PHASELOOM_MESH_NODES": nodes, "PHASELOOM_MESH_OPS_MAX_BYTES": "2G"}
    settings = config.load(MeshConfig, "mesh", environ, file=file)
    assert (settings.nodes[0].devices, settings.ops_max_bytes) == ([2 * 2**20], 2 * 10**9)

    file.write_text('[[mesh.nodes]]\nname = "n"\npool = "train"\ndevices = ["1GiBB"]\n')
    with pytest.raises(CallerError, match="expected a size in bytes, got '1GiBB'") as refused:
        config.load(MeshConfig, "mesh", {}, file=file)
    assert refused.value.info.field == "[mesh] nodes.devices"


def test_text_settings_that_look_like_sizes_stay_texts(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[mesh]\ncheckpoint_root = "1G"\n[mesh.models]\nmax_bytes = "1G"\n')
    settings = config.load(MeshConfig, "mesh", {}, file=file)
    assert (settings.checkpoint_root, settings.models) == ("1G", {"max_bytes": "1G"})


@pytest.mark.parametrize(
    "kind",
    [
        *(MeshConfig, NodeConfig, GatewayConfig, RouterConfig, Config, SchedulerSettings),
        *(StateManagerConfig, WorkerConfig),
    ],
)
def test_every_setting_in_bytes_accepts_units(kind: type[msgspec.Struct]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    sizes = [name for name in hints if name.endswith("_bytes") or name == "devices"]
    assert [name for name in sizes if SIZE not in {*_marks(hints[name])}] == []


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks(part)


def test_optional_sizes_are_read() -> None:
    class Example(msgspec.Struct):
        limit_bytes: Annotated[Size, msgspec.Meta(ge=10)] | None = None

    environ = {"PHASELOOM_EXAMPLE_LIMIT_BYTES": "1k"}
    assert config.load(Example, "example", environ).limit_bytes == 1000
    for text, expected in (("null", None), ("12", 12)):
        loaded = config.load(Example, "example", {"PHASELOOM_EXAMPLE_LIMIT_BYTES": text})
        assert loaded.limit_bytes == expected
    with pytest.raises(CallerError, match="Expected `int` >= 10"):
        config.load(Example, "example", {"PHASELOOM_EXAMPLE_LIMIT_BYTES": "5B"})
