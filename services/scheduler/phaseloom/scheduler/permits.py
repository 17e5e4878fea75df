"""Permit batches: permits for reading operations of one activation are sent in one message.

The shell batches the permits of one log entry; the sink batches those that arrive while it is
sending. Each permit keeps the parent of its own trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.context import Context

from phaseloom.common.contract.commands import Permit, Permits
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.kinds import READING_KINDS
from phaseloom.common.observability import telemetry
from phaseloom.scheduler.core.state.outputs import Output, SendCommand


def permits_in(outputs: Iterable[Output]) -> list[Permit]:
    return [
        output.command
        for output in outputs
        if isinstance(output, SendCommand) and isinstance(output.command, Permit)
    ]


def batched(outputs: list[Output], contexts: list[Context]) -> list[tuple[Output, Context | None]]:
    """Merge the permits in the outputs into batches, and pair each output with the trace context to
    send it with.

    The result is deterministic, so a restart sends the same messages again.

    Args: contexts: one for each permit among the outputs, in their order.
    Returns: pairs; an output that is not a permit gets the first permit's context.
    """
    first = contexts[0] if contexts else None
    performed: list[tuple[Output, Context | None]] = []
    batches: dict[tuple[DeploymentKey, int], list[tuple[Permit, Context]]] = {}
    remaining_contexts = iter(contexts)
    for output in outputs:
        if not (isinstance(output, SendCommand) and isinstance(output.command, Permit)):
            performed.append((output, first))
            continue
        permit, context = output.command, next(remaining_contexts)
        if permit.kind in READING_KINDS:
            key = permit.operation.deployment_key, permit.epoch
            batches.setdefault(key, []).append((permit, context))
        else:
            performed.append((output, context))
    # Batches come last, after the command that opens their activation.
    performed += [_as_command(permits) for permits in batches.values()]
    return performed


def _as_command(permits: list[tuple[Permit, Context]]) -> tuple[Output, Context | None]:
    permit, context = permits[0]
    if len(permits) == 1:
        return SendCommand(permit), context
    return SendCommand(batch([(item, _traceparent(parent)) for item, parent in permits])), None


def batch(permits: Sequence[tuple[Permit, str]]) -> Permits:
    """Build one command for permits of one activation, each given with its `traceparent` (may be
    empty)."""
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
    """The permits of a command, each with its `traceparent`.

    Args: context: trace context of a single permit; a batch carries its own.
    """
    if isinstance(command, Permit):
        return [(command, _traceparent(context))]
    return zip(command.permits, command.traceparents or [""] * len(command.permits), strict=True)


def _traceparent(context: Context | None) -> str:
    """Format the context as a header. Empty if nothing is traced."""
    return "" if context is None else telemetry.inject({}, context).get("traceparent", "")
