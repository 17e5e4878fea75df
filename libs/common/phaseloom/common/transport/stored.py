"""The newest messages that streams have stored, by subject.

Where several servers keep each stream, whoever does not lead it may lag behind: what is read is
asked of the leader. A leader that was cut off may take itself for one for `LAG_S` more: what must
be there is looked for that long.

These calls are on the path of every operation and bypass nats-py's JetStream layer, which parses
more of an answer than we use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from nats.errors import NoRespondersError
from nats.js import api
from nats.js.errors import APIError, NotFoundError

from phaseloom.common.transport.link import Link, Refusal, ordered, place

_NOT_FOUND = "404"
_NOT_THERE = 404
_LAG_PAUSE_S = 0.1
_ANSWER_BYTES = 16 * 2**20
"""Most bytes of one answer with many stored messages. Without this limit the server sends more than
it lets wait for a connection (64 MiB), and then cuts off a slow reader."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message that a stream has stored."""

    payload: bytes
    sequence: int
    """The message's sequence in the stream, for compare-and-set."""
    headers: dict[str, str]

    @property
    def is_gone(self) -> bool:
        """Whether the message only marks that a KV key was deleted or has expired."""
        return not {"KV-Operation", "Nats-Marker-Reason"}.isdisjoint(self.headers)


class _Found(msgspec.Struct, frozen=True):
    """A stored message. `data`, `hdrs`: in Base64 in JSON."""

    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _FoundError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _GetAnswer(msgspec.Struct, frozen=True):
    message: _Found | None = None
    error: _FoundError | None = None


class _Purged(msgspec.Struct, frozen=True):
    error: Refusal | None = None


_json = msgspec.json.Encoder()
_get_answer = msgspec.json.Decoder(_GetAnswer)
_purged = msgspec.json.Decoder(_Purged)


class StoredMessages:
    """The newest messages that streams have stored of each subject."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def get(self, stream: str, subject: str) -> Stored | None:
        """The newest stored message of a subject (direct get), or None where there is none.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        if self._link.replicas > 1:
            return await self._get_by_api(stream, subject)
        try:
            message = await self._link.client.request(
                f"$JS.API.DIRECT.GET.{stream}.{subject}", timeout=self._link.timeout_s
            )
        except NoRespondersError:
            return await self._get_by_api(stream, subject)
        headers = dict(message.headers or {})
        sequence = headers.get("Nats-Sequence")
        if sequence is not None:
            return Stored(message.data, int(sequence), headers)
        if headers.get("Status") == _NOT_FOUND:
            return None
        raise APIError.from_msg(message)

    async def _get_by_api(self, stream: str, subject: str) -> Stored | None:
        """The newest stored message of a subject, asked for without direct get.

        It is for the case that direct get gives no answer: there is no such stream, the stream has
        no direct get, or the server is starting. No answer does not mean that there is no message;
        the JetStream API tells these cases apart.
        """
        found = await self.ask_leader(stream, {"last_by_subj": subject})
        if found is None:
            return None
        headers = await self._link.client._process_headers(found.hdrs) if found.hdrs else {}
        return Stored(found.data, found.seq, headers or {})

    async def ask_leader(self, stream: str, which: dict[str, object]) -> _Found | None:
        """A stored message, as whoever leads the stream has it; None where it has none.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        message = await self._link.client.request(
            f"$JS.API.STREAM.MSG.GET.{stream}", _json.encode(which), timeout=self._link.timeout_s
        )
        answer = _get_answer.decode(message.data)
        if answer.error is not None:
            if answer.error.code == _NOT_THERE:
                return None
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])
        return answer.message

    async def get_all(
        self, stream: str, subjects: Sequence[str], *, are_there: bool = False
    ) -> dict[str, Stored]:
        """The newest stored message of each subject that has one, as `get` gives it.

        Args:   subjects: without wildcards.
                are_there: all of them have been stored: a server that has none is asked again for
                    as long as it may lag behind.
        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        found = await self._get_all_once(stream, subjects)
        sure_at_s = time.monotonic() + self._link.lag_s
        while are_there and len(found) < len(subjects) and time.monotonic() < sure_at_s:
            await asyncio.sleep(_LAG_PAUSE_S)
            found = await self._get_all_once(stream, subjects)
        return found

    async def _get_all_once(self, stream: str, subjects: Sequence[str]) -> dict[str, Stored]:
        if len(subjects) == 1:
            only = await self.get(stream, subjects[0])
            return {} if only is None else {subjects[0]: only}
        if self._link.replicas > 1:
            each_one = await asyncio.gather(*(self.get(stream, each) for each in subjects))
            return {s: one for s, one in zip(subjects, each_one, strict=True) if one is not None}
        found: dict[str, Stored] = {}
        try:
            *messages, end = await self._link.client.request_many(
                f"$JS.API.DIRECT.GET.{stream}",
                _json.encode({"multi_last": subjects, "max_bytes": _ANSWER_BYTES}),
                timeout=self._link.timeout_s,
            )
        except NoRespondersError:
            messages, end = [], None
        for message in messages:
            headers = dict(message.headers or {})
            found[headers["Nats-Subject"]] = Stored(
                message.data, int(headers["Nats-Sequence"]), headers
            )
        status = {} if end is None else end.headers or {}
        if status.get("Status") == _NOT_FOUND or status.get("Nats-Num-Pending") == "0":
            return found
        # The messages are too much for one answer, or nobody was there to give it.
        for subject in subjects:
            if subject not in found and (one := await self.get(stream, subject)):
                found[subject] = one
        return found

    async def delete(self, stream: str, subject: str) -> None:
        """Drop the stored messages of a subject.

        Raises: nats.errors.Error: the server does not answer. APIError: there is no such stream.
        """
        message = await self._link.client.request(
            f"$JS.API.STREAM.PURGE.{stream}",
            _json.encode({"filter": subject}),
            timeout=self._link.timeout_s,
        )
        if _purged.decode(message.data).error is not None:
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])

    async def before(self, stream: str, subject: str, time_s: float) -> AsyncGenerator[str, None]:
        """Subjects of the messages that a stream took before a time (Unix seconds), oldest first.

        The iteration may wait for ever where the last of the messages is deleted meanwhile: the
        caller must bound it.
        """
        if not (await self._link.js.stream_info(stream)).state.messages:
            return
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.ALL, headers_only=True)
        async with aclosing(ordered(self._link, stream, subject, config)) as messages:
            async for message in messages:
                _, stored_s = place(message)
                if stored_s >= time_s:
                    return
                yield message.subject
                if message.reply.endswith(".0"):  # none is pending behind it
                    return

    async def subjects(self, stream: str, filter_subject: str) -> list[str]:
        """The subjects under a filter that have a stored message."""
        try:
            info = await self._link.js.stream_info(stream, subjects_filter=filter_subject)
        except NotFoundError:
            return []
        return sorted(info.state.subjects or {})
