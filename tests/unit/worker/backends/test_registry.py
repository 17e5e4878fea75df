"""The registry of backends: complete, torch-free, and clear about what it lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Layout
from phaseloom.worker.backends import BACKENDS, backend_factory, missing_modules
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.state.heap import Heap, align
from tests.support.versions import take, written
from tests.unit.worker.backends.models import running, spec

INSTALLED = [name for name in sorted(BACKENDS) if not missing_modules(name)]


def test_backend_factory_names_the_choices_when_unknown() -> None:
    with pytest.raises(CallerError) as raised:
        backend_factory("cuda")
    assert raised.value.info.field == "deployments.backend"
    assert all(name in raised.value.info.remedy for name in BACKENDS)


@pytest.mark.parametrize("name", INSTALLED)
def test_backend_lays_weights_first_and_within_its_heap(name: str) -> None:
    deployment = spec(name)
    num_bytes = backend_factory(name).plan(deployment).heap_bytes
    with running(deployment) as (backend, heap):
        assert heap.num_bytes == num_bytes
        stops = [slot.offset + slot.num_bytes for slot in backend.slots]
        assert backend.slots[0].offset == 0
        assert max(stops) <= num_bytes


@pytest.mark.parametrize("name", INSTALLED)
def test_version_holds_the_weights_and_comes_back(name: str) -> None:
    with running(spec(name)) as (backend, heap):
        last = backend.version_slots[-1]
        version = written(backend, heap)
        assert len(version) == align(last.offset + last.num_bytes)
        assert version == heap.buffer[: len(version)]
        digest = backend.weights_sha256()
        heap.buffer[: len(version)] = bytes(len(version))
        backend.weights_changed()
        assert backend.weights_sha256() != digest or not any(version)
        take(backend, heap, 0, version)
        assert backend.weights_sha256() == digest


@pytest.mark.parametrize("name", ["fsdp", "sampler"])
@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_torch_backends_refuse_what_is_not_data_parallelism(name: str, axis: str) -> None:
    layout = Layout(**{"dp": 2, axis: 2})
    deployment = replace(spec(name), layout=layout)
    factory = backend_factory(name)
    ranks = RankGroup(0, layout.num_ranks)
    for call in (
        lambda: factory.plan(deployment, ranks).heap_bytes,
        lambda: factory(deployment, Heap(64), ranks),
    ):
        with pytest.raises(CallerError) as raised:
            call()
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        assert raised.value.info.field == f"layout.{axis}"
        assert "layout.dp" in raised.value.info.remedy


def test_registry_and_noop_import_no_torch() -> None:
    code = (
        "import sys; from phaseloom.worker.backends import backend_factory;"
        "backend_factory('noop'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
