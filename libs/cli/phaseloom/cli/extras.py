"""Checks that packages are installed, with the extra of the distribution that brings them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from phaseloom.common.contract.errors import CallerError, Code


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed. None is imported."""
    return [name for name in packages if find_spec(name) is None]


def check_installed(what: str, packages: Sequence[str], extras: str) -> None:
    """Check that the packages are installed that something needs.

    Args:   what: what needs them, as the subject of a sentence.
            extras: the extras that bring them, with commas between them.
    Raises: CallerError: FAILED_PRECONDITION: some are not.
    """
    if lacking := missing(packages):
        raise CallerError(
            f"{what} needs packages that are not installed: {', '.join(lacking)}",
            code=Code.FAILED_PRECONDITION,
            remedy=f"pip install 'phaseloom[{extras}]'",
        )
