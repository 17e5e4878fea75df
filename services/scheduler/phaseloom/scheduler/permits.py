"""Permits of reading operations that go in one message, each with the parent of its trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.context import Context

from phaseloom.common.contract.commands import Permit, Permits
from phaseloom.common.observability import telemetry


def together(permits: Sequence[tuple[Permit, str]]) -> Permits:
    """One command of permits of one activation, each beside its `traceparent` (may be empty)."""
    first, _ = permits[0]
    traceparents = [traceparent for _, traceparent in permits]
    return Permits(
        first.id,
        first.node,
        first.revision,
        [permit for permit, _ in permits],
        traceparents if any(traceparents) else [],
    )


def traced(command: Permit | Permits, context: Context | None) -> Iterable[tuple[Permit, str]]:
    """What a command permits. Args: context: that it travels under; of one permit alone."""
    if isinstance(command, Permit):
        return [(command, traceparent(context))]
    return zip(command.permits, command.traceparents or [""] * len(command.permits), strict=True)


def traceparent(context: Context | None) -> str:
    """Empty where nothing is traced."""
    return "" if context is None else telemetry.inject({}, context).get("traceparent", "")
