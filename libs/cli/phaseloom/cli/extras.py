"""Checks for optional packages, with the extra that installs them as the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from phaseloom.common.contract.errors import CallerError, Code


def missing(packages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed, without importing any."""
    return [name for name in packages if find_spec(name) is None]


def check_installed(feature: str, packages: Sequence[str], extras: str) -> None:
    """Check that packages are installed.

    Args:   what: the feature that needs them, as the subject of a sentence.
            extras: the extras that install them, separated by commas.
    Raises: CallerError: FAILED_PRECONDITION: a package is missing.
    """
    if absent := missing(packages):
        raise CallerError(
            f"{feature} needs packages that are not installed: {', '.join(absent)}",
            code=Code.FAILED_PRECONDITION,
            remedy=f"pip install 'phaseloom[{extras}]'",
        )
