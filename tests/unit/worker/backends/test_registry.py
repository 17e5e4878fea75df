"""The registry of backends: complete, torch-free, and clear about what it lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phaseloom.common.errors import CallerError
from phaseloom.worker.backends import BACKENDS, backend_factory
from tests.unit.worker.backends.models import running, spec


def test_backend_factory_names_the_choices_when_unknown() -> None:
    with pytest.raises(CallerError) as raised:
        backend_factory("cuda")
    assert raised.value.info.field == "deployments.backend"
    assert all(name in raised.value.info.remedy for name in BACKENDS)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_backend_lays_weights_first_and_within_its_heap(name: str) -> None:
    deployment = spec(name)
    num_bytes = backend_factory(name).heap_bytes(deployment)
    with running(deployment) as (backend, heap):
        assert heap.num_bytes == num_bytes
        stops = [slot.offset + slot.num_bytes for slot in backend.slots]
        assert backend.slots[0].offset == 0
        assert max(stops) <= num_bytes


def test_registry_and_noop_import_no_torch() -> None:
    code = (
        "import sys; from phaseloom.worker.backends import backend_factory;"
        "backend_factory('noop'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
