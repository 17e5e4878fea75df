"""Every decoder of a message, against what no sound peer sends: a typed error, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.api import (
    Attached,
    Checkpoint,
    Heartbeat,
    JobRequest,
    JobStatus,
    OperationRequest,
    PhaseRequest,
    ResultReply,
    ResultRequest,
    SubmitJob,
    UsageRequest,
)
from phaseloom.common.contract.codec import JSON, MSGPACK, decode, encode
from phaseloom.common.contract.commands import Command, Permits
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import Event, Notice
from phaseloom.common.contract.operations import Completion, Operation, Progress
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_rank import StateMessage
from phaseloom.common.transport.framing import Frame
from phaseloom.worker.rank.wire import RankMessage

UNIONS: dict[str, Any] = {
    "event": Event,
    "command": Command,
    "state": StateMessage,
    "rank": RankMessage,
}
PLAIN: list[Any] = [
    Operation,
    Completion,
    Progress,
    Checkpoint,
    SubmitJob,
    JobRequest,
    JobStatus,
    Attached,
    Heartbeat,
    PhaseRequest,
    OperationRequest,
    ResultRequest,
    ResultReply,
    UsageRequest,
    Notice,
]
NESTED = {
    JSON: b'{"x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    MSGPACK: b"\x81\xa1x" + b"\x91" * 20_000 + b"\xc0",
}
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)
st.register_type_strategy(
    ModelSpec,
    st.builds(
        ModelSpec,
        config=st.dictionaries(st.text(max_size=5), scalars, max_size=3),
        init_seed=st.integers(0, 2**63),
    ),
)


def examples(kind: Any) -> st.SearchStrategy[bytes]:
    """A sound message of one of these types, encoded; integers as MessagePack can carry them."""
    kinds = get_args(kind) or (kind,)
    made = st.one_of([_building(k) for k in kinds])
    return made.map(_encoded).filter(bool)


def _building(kind: Any) -> st.SearchStrategy[Any]:
    if kind is Permits:  # which holds as many traceparents as permits, or none
        return st.builds(kind, traceparents=st.just([]))
    return st.builds(kind)


def _encoded(message: object) -> bytes:
    try:
        return encode(message)
    except (CallerError, UnicodeEncodeError):  # what hypothesis makes of `int` and `str`
        return b""


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Bytes changed, cut out and put in."""
    payload = bytearray(draw(sound))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(payload)))
        match draw(st.sampled_from(["change", "cut", "insert", "end"])):
            case "change" if at < len(payload):
                payload[at] = draw(st.integers(0, 255))
            case "cut":
                del payload[at : at + draw(st.integers(1, 16))]
            case "insert":
                payload[at:at] = draw(st.binary(min_size=1, max_size=16))
            case _:
                del payload[at:]
    return bytes(payload)


@pytest.mark.parametrize("name", UNIONS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_message_of_the_mesh_is_refused_with_a_typed_error(
    name: str, data: st.DataObject
) -> None:
    payload = data.draw(damaged(examples(UNIONS[name])))
    with suppress(CallerError):
        decode(payload, UNIONS[name])


@pytest.mark.parametrize("kind", [StateMessage, RankMessage], ids=["state", "rank"])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_frame_is_refused_with_the_errors_that_a_connection_expects(
    kind: Any, data: st.DataObject
) -> None:
    body = st.one_of([_building(k) for k in get_args(kind)])
    frame = st.builds(Frame, st.integers(0, 2**32), st.booleans(), body, st.integers(0, 8))
    payload = data.draw(damaged(frame.map(_encoded).filter(bool)))
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        msgspec.msgpack.Decoder(Frame[kind]).decode(payload)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_message_of_a_tenant_is_refused_with_a_typed_error(
    kind: Any, data: st.DataObject
) -> None:
    payload = data.draw(damaged(examples(kind)))
    with suppress(CallerError):
        decode(payload, kind)
    as_json = data.draw(st.binary(max_size=64))
    with suppress(CallerError):
        decode(as_json, kind, JSON)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize(
    "kind", [*PLAIN, *UNIONS.values()], ids=[*(kind.__name__ for kind in PLAIN), *UNIONS]
)
def test_deep_nesting_is_refused_with_a_typed_error(kind: Any, content_type: str) -> None:
    """Skipped as an unknown field, it once ended every router in turn."""
    with pytest.raises(CallerError):
        decode(NESTED[content_type], kind, content_type)
