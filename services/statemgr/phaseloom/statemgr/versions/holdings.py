"""Which node holds which parts of a weights version: asked of each, because only it knows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.mesh.tls import connect, explained
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.fetching import Home

log = logging.getLogger(__name__)


@dataclass
class Holdings:
    version: VersionKey
    by_source: dict[str, set[str]] = field(default_factory=dict)
    errors: list[PhaseloomError] = field(default_factory=list)
    """Of sources that did not answer, or refused."""

    def holders_of(self, part: str) -> list[str]:
        """In the order in which the sources were named."""
        return [source for source, parts in self.by_source.items() if part in parts]

    def without(self, parts: list[str]) -> PhaseloomError:
        """Nobody has these."""
        why = "; ".join(map(str, self.errors)) or "no source that is named has them"
        text = f"version {self.version} lacks {', '.join(parts)}: {why}"
        remedy = "retry; name sources that hold the version"
        if all(error.info.code is Code.NOT_FOUND for error in self.errors):
            return CallerError(text, code=Code.NOT_FOUND, field="version", remedy=remedy)
        codes = {error.info.code for error in self.errors} - {Code.NOT_FOUND}
        code = codes.pop() if len(codes) == 1 else Code.UNAVAILABLE
        return ResourceError(text, code=code, remedy=remedy)


async def ask_holdings(
    version: VersionKey, ticket: Ticket | None, sources: list[str], home: Home
) -> Holdings:
    """Ask all of them at once; who does not answer holds nothing for now."""
    named = list(dict.fromkeys(sources))
    answers = await asyncio.gather(*(_ask(version, ticket, source, home) for source in named))
    found = Holdings(version)
    for source, answer in zip(named, answers, strict=True):
        if isinstance(answer, PhaseloomError):
            log.warning("which parts of version %s are at %s: %s", version, source, answer)
            found.errors.append(answer)
        else:
            found.by_source[source] = answer
    return found


async def _ask(
    version: VersionKey, ticket: Ticket | None, source: str, home: Home
) -> set[str] | PhaseloomError:
    try:
        stream = await connect(source, wire.SLICES, home.identity, home.timeout_s)
    except PhaseloomError as error:
        return error
    try:
        async with asyncio.timeout(home.timeout_s):
            await stream.send(wire.SlicesRequest(version, ticket, []))
            payload = await stream.receive(wire.MAX_REPLY_BYTES)
        reply = msgspec.msgpack.decode(payload, type=wire.Holding | wire.Refusal)
        if isinstance(reply, wire.Refusal):
            return to_exception(reply.error)
        return set(reply.digests)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        return explained(error, source, home.timeout_s)
    finally:
        stream.close()
