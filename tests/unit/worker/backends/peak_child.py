"""Run by test_activation_checkpointing: the memory that one backward pass takes at its peak."""

from __future__ import annotations

import sys
from pathlib import Path

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
        before = _peak_kib()
        backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
        print(_peak_kib() - before)


def _peak_kib() -> int:
    """Not `ru_maxrss`: a process begins with that of the one that started it."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
