"""Checks for optional packages. The remedy names the pip extra that installs them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from phaseloom.common.contract.errors import CallerError, Code


def missing(packages: Sequence[str]) -> list[str]:
    """Return those of the packages that are not installed, without importing any."""
    return [name for name in packages if find_spec(name) is None]


def check_installed(feature: str, packages: Sequence[str], extras: str) -> None:
    """Raise an error if a package is not installed.

    Args:   what: the feature that needs the packages, as the subject of a sentence.
            extras: the pip extras that install them, separated by commas.
    Raises: CallerError: FAILED_PRECONDITION: a package is missing.
    """
    if absent := missing(packages):
        raise CallerError(
            f"{feature} needs packages that are not installed: {', '.join(absent)}",
            code=Code.FAILED_PRECONDITION,
            remedy=f"pip install 'phaseloom[{extras}]'",
        )
