"""A state manager whose host memory stays writable, as hardware's is: for bits that flip in it.

python -m tests.support.unsealed <command of the state manager>
"""

from __future__ import annotations

from phaseloom.statemgr import main
from phaseloom.statemgr.node.extents import Extent


def _freeze(self: Extent) -> bool:
    """Whoever has it mapped keeps that, as before; only the kernel is not told."""
    return True


if __name__ == "__main__":
    Extent.freeze = _freeze  # type: ignore[method-assign]
    main.main()
