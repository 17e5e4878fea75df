"""The proofs that need a mesh, on emulated devices."""

from __future__ import annotations

import pytest

from loadtest.gpu import meshes
from phaseloom.common.contract.specs import DeviceKind
from tests.unit.loadtest.gpu.test_backends import SMALL


@pytest.mark.slow
@pytest.mark.parametrize("samples", [False, True])
def test_jobs_take_turns_on_one_device_with_the_weights_of_each_alone(samples: bool) -> None:
    setup = meshes.Setup(DeviceKind.EMULATED, 16 * 2**20, SMALL, samples, steps=10)
    figures = meshes.prove(setup).figures
    assert figures["switches"] >= 2
    assert figures["switch_ms"] > 0
    assert ("sync_weights_ms" in figures) is samples
