"""The newest messages stored by streams, by subject.

If several servers store each stream, followers may lag, so reads go to the leader. A disconnected
leader may answer for up to `LAG_S` more. So a message that must exist is requested again for that
long.

These calls are on the path of every operation. They bypass nats-py's JetStream layer, which parses
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

from phaseloom.common.transport.link import Link, StreamRefusal, ordered, position_of

_NOT_FOUND = "404"
_NOT_FOUND_CODE = 404
_LAG_PAUSE_S = 0.1
_ANSWER_BYTES = 16 * 2**20
"""Maximum size of one answer with many stored messages. Without this limit, the server sends more
than it buffers per connection (64 MiB), and then disconnects slow readers."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message stored by a stream."""

    payload: bytes
    sequence: int
    """The message's sequence in the stream, for compare-and-set."""
    headers: dict[str, str]

    @property
    def is_gone(self) -> bool:
        """Whether the message is only the marker of a deleted or expired KV key."""
        return not {"KV-Operation", "Nats-Marker-Reason"}.isdisjoint(self.headers)


class _StoredMessage(msgspec.Struct, frozen=True):
    """A stored message. In JSON, `data` and `hdrs` are Base64."""

    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _GetError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _GetAnswer(msgspec.Struct, frozen=True):
    message: _StoredMessage | None = None
    error: _GetError | None = None


class _Purged(msgspec.Struct, frozen=True):
    error: StreamRefusal | None = None


_json = msgspec.json.Encoder()
_get_answer = msgspec.json.Decoder(_GetAnswer)
_purged = msgspec.json.Decoder(_Purged)


class StoredMessages:
    """The newest stored message of each subject."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def get(self, stream: str, subject: str) -> Stored | None:
        """Return the newest stored message of a subject (by direct get), or None.

        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        # With several servers, a direct get may be answered by a follower that lags.
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
        """Return the newest stored message of a subject without direct get.

        This is for the case that direct get does not answer: the stream does not exist, has no
        direct get, or the server is starting. In none of these cases does it follow that there is
        no message; the JetStream API distinguishes them.
        """
        message = await self.request_from_leader(stream, {"last_by_subj": subject})
        if message is None:
            return None
        headers = await self._link.client._process_headers(message.hdrs) if message.hdrs else {}
        return Stored(message.data, message.seq, headers or {})

    async def request_from_leader(
        self, stream: str, query: dict[str, object]
    ) -> _StoredMessage | None:
        """Request a stored message from the stream's leader. Returns: None if there is none.

        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        message = await self._link.client.request(
            f"$JS.API.STREAM.MSG.GET.{stream}", _json.encode(query), timeout=self._link.timeout_s
        )
        answer = _get_answer.decode(message.data)
        if answer.error is not None:
            if answer.error.code == _NOT_FOUND_CODE:
                return None
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])
        return answer.message

    async def get_all(
        self, stream: str, subjects: Sequence[str], *, must_exist: bool = False
    ) -> dict[str, Stored]:
        """Return the newest stored message of each subject that has one; see `get`.

        Args:   subjects: without wildcards.
                must_exist: whether all of them are known to be stored. If so, missing ones are
                    requested again for as long as a server may lag.
        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        messages = await self._get_all_once(stream, subjects)
        sure_at_s = time.monotonic() + self._link.lag_s
        while must_exist and len(messages) < len(subjects) and time.monotonic() < sure_at_s:
            await asyncio.sleep(_LAG_PAUSE_S)
            messages = await self._get_all_once(stream, subjects)
        return messages

    async def _get_all_once(self, stream: str, subjects: Sequence[str]) -> dict[str, Stored]:
        if len(subjects) == 1:
            only = await self.get(stream, subjects[0])
            return {} if only is None else {subjects[0]: only}
        if self._link.replicas > 1:
            newest = await asyncio.gather(*(self.get(stream, subject) for subject in subjects))
            return {
                s: stored for s, stored in zip(subjects, newest, strict=True) if stored is not None
            }
        results: dict[str, Stored] = {}
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
            results[headers["Nats-Subject"]] = Stored(
                message.data, int(headers["Nats-Sequence"]), headers
            )
        status = {} if end is None else end.headers or {}
        if status.get("Status") == _NOT_FOUND or status.get("Nats-Num-Pending") == "0":
            return results
        # The messages do not fit in one answer, or no server answered.
        for subject in subjects:
            if subject not in results and (stored := await self.get(stream, subject)):
                results[subject] = stored
        return results

    async def delete(self, stream: str, subject: str) -> None:
        """Drop the stored messages of a subject.

        Raises: nats.errors.Error: the server does not answer. APIError: the stream does not exist.
        """
        message = await self._link.client.request(
            f"$JS.API.STREAM.PURGE.{stream}",
            _json.encode({"filter": subject}),
            timeout=self._link.timeout_s,
        )
        if _purged.decode(message.data).error is not None:
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])

    async def before(self, stream: str, subject: str, time_s: float) -> AsyncGenerator[str, None]:
        """Yield the subjects of messages stored before a time (Unix seconds), oldest first.

        The iteration may wait forever if the last of these messages is deleted meanwhile, so the
        caller must limit it.
        """
        if not (await self._link.js.stream_info(stream)).state.messages:
            return
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.ALL, headers_only=True)
        async with aclosing(ordered(self._link, stream, subject, config)) as messages:
            async for message in messages:
                _, stored_s = position_of(message)
                if stored_s >= time_s:
                    return
                yield message.subject
                if message.reply.endswith(".0"):  # the last pending message
                    return

    async def subjects(self, stream: str, filter_subject: str) -> list[str]:
        """Return the subjects that match a filter and have a stored message."""
        try:
            info = await self._link.js.stream_info(stream, subjects_filter=filter_subject)
        except NotFoundError:
            return []
        return sorted(info.state.subjects or {})
