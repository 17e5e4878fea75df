"""Run by test_adapters: a rank that writes to the base that it shares, which kills it."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.state.heap import Heap


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=DeploymentSpec)
    factory, ranks = backend_factory(spec.backend), RankGroup(node_directory=sys.argv[2])
    backend: Any = factory(spec, Heap(factory.plan(spec, ranks).heap_bytes), ranks)
    backend._model.model.embed_tokens.weight.data[0, 0] = 1.0


if __name__ == "__main__":
    main()
