"""What a node's devices are."""

from __future__ import annotations

from enum import StrEnum


class DeviceKind(StrEnum):
    EMULATED = "emulated"
    """Memory of this machine, with a budget, and its processors."""
    CUDA = "cuda"
    """Device i is GPU i."""
