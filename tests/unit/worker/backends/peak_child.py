"""Run by test_activation_checkpointing: the memory that one backward pass takes at its peak."""

from __future__ import annotations

import resource
import sys

from msgspec.structs import replace

from phaseloom.common.contract.operations import Datum, ForwardBackward, Loss
from tests.unit.worker.backends.models import running, spec


def main() -> None:
    """Print the growth of the peak in KiB."""
    large = replace(
        spec("fsdp", hidden_size=64, intermediate_size=512, num_hidden_layers=16),
        activation_checkpointing=sys.argv[1] == "checkpointing",
    )
    data = [Datum([row] * 60, [row + 1] * 60, weights=[1.0] * 60) for row in range(20)]
    with running(large) as (backend, _):
        backend.forward_backward(ForwardBackward(data[:1], Loss.CROSS_ENTROPY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    main()
