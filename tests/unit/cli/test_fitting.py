"""Sizes of a mesh by this machine's memory and the models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phaseloom.cli.fitting import Footprint, footprints, nodes_for, what_fits
from phaseloom.common.contract.errors import CallerError, Code
from tests.support.pretrained import save_model

GiB, MiB = 2**30, 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Footprint:
    directory = save_model(tmp_path_factory.mktemp("models") / "tiny", torch.float32)
    (footprint,) = footprints({"org/tiny": str(directory)})
    return footprint


def test_devices_get_half_of_the_memory_and_host_state_a_quarter() -> None:
    rollout, train = nodes_for([], 16 * GiB)
    assert [rollout.pool, train.pool] == ["rollout", "train"]
    sizes = [*rollout.devices, *train.devices]
    assert sum(sizes) == pytest.approx(8 * GiB, abs=2 * MiB)
    assert sizes[1] == pytest.approx(4 * sizes[0], rel=0.01), "weights alone, and with AdamW"
    host = rollout.host_memory_bytes + train.host_memory_bytes
    assert host == pytest.approx(4 * GiB, abs=2 * MiB)


def test_large_model_leaves_the_train_device_what_adapters_need(tiny: Footprint) -> None:
    scale = 10**4
    tiny.num_parameters *= scale
    tiny.sampled_bytes *= scale
    tiny.trained_bytes *= scale
    available = 2 * int(1.5 * tiny.sampled_bytes)
    rollout, train = nodes_for([tiny], available)
    assert rollout.devices[0] >= tiny.sampled_bytes - MiB
    assert tiny.adapter_bytes <= train.devices[0] < tiny.trained_bytes
    text = "\n".join(what_fits(tiny, [rollout, train]))
    assert "training all weights does not fit" in text

    with pytest.raises(CallerError) as refused:
        nodes_for([tiny], tiny.sampled_bytes)
    info = refused.value.info
    assert (info.code, info.field) == (Code.RESOURCE_EXHAUSTED, "--model")
    assert int(info.details["needed_bytes"]) > int(info.details["budget_bytes"])


def test_what_else_fits_is_told(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "tiny", torch.float32)
    model = Footprint("org/tiny", directory)
    text = "\n".join(what_fits(model, nodes_for([model], 2 * GiB)))
    for word in ("org/tiny", "parameters", "context of", "adapters of rank 32", "KV cache"):
        assert word in text
    assert "more waiting in host memory" in text
