"""What the router refuses, by the field that it names; and that nothing else trips it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.arrays import Int32s, pack_float32s, pack_int32s
from phaseloom.common.contract.codec import JSON, MSGPACK, encode
from phaseloom.common.contract.completions import decode_outcome
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo, PhaseloomError
from phaseloom.common.contract.events import OperationsQueued
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import KINDS, kind_for
from phaseloom.common.contract.operations import (
    AdamParams,
    After,
    Args,
    Completion,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    LoadState,
    Loss,
    Operation,
    OptimStep,
    Outcome,
    Prompt,
    PublishWeights,
    SamplingParams,
    SaveState,
    Sequence,
    SyncWeights,
    kind_of,
)
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES
from phaseloom.common.transport.groupcommit import MAX_ITEMS
from phaseloom.router.core import validate

KEY = OperationKey("acme", "sums", "policy", "5")
UNORDERED = OperationKey("acme", "sums", "policy", "r1")
DATUM = Datum([1, 2], [2, 3], logprobs=[-1.0, -2.0], advantages=[0.5, 0.5])
WEIGHTED = Datum([1, 2], [2, 3], weights=[0.0, 1.0], logprobs=[-1.0, -2.0])
SAMPLING = SamplingParams(max_tokens=4)

SOUND: list[Args] = [
    Generate([Prompt([1]), Prompt(pack_int32s([1, 2]), seed=3)], SAMPLING, 4),
    Generate([Prompt([1])], SamplingParams(1, temperature=0.0)),
    Forward([Datum([1], [2])]),
    *(ForwardBackward([DATUM], loss) for loss in Loss if loss is not Loss.CROSS_ENTROPY),
    ForwardBackward([WEIGHTED], Loss.CROSS_ENTROPY),
    ForwardBackward(
        [Datum(pack_int32s([1]), pack_int32s([2]), weights=pack_float32s([1.0]))],
        Loss.CROSS_ENTROPY,
    ),
    OptimStep(AdamParams(learning_rate=1e-4)),
    SaveState("step-1"),
    SaveState("step-2", keep=3),
    SaveState("step-3", ttl_s=365 * 86_400.0),
    SaveState("step-1", b"\x00blob", {"sampler": "step-1"}),
    OptimStep(AdamParams(learning_rate=1e-4), allow_partial=True),
    Generate(
        [Prompt([1])],
        SamplingParams(1, stop_token_ids=[0], stop_strings=["\n\n", "."], ignore_eos=True),
        prompt_logprobs=True,
    ),
    Generate(
        [Prompt([1])],
        SamplingParams(
            1,
            0.0,
            top_k=50,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            bad_words=[[1, 2], [3]],
            top_logprobs=20,
        ),
    ),
    LoadState("step-1"),
    PublishWeights(),
    SyncWeights("policy", 3),
]


def changed(datum: Datum = DATUM, /, **fields: object) -> ForwardBackward:
    return ForwardBackward([datum, msgspec.structs.replace(datum, **fields)], Loss.PPO)


def generate(tokens: Int32s | None = None, num_samples: int = 1, **sampling: Any) -> Generate:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return Generate([Prompt([1]), Prompt([1] if tokens is None else tokens)], params, num_samples)


BAD: list[tuple[Args, str]] = [
    (Generate([], SAMPLING), "args.prompts"),
    (generate([]), "args.prompts[1].tokens"),
    (generate([-1]), "args.prompts[1].tokens"),
    (generate([2**31]), "args.prompts[1].tokens"),
    (generate(b"\x01\x00\x00"), "args.prompts[1].tokens"),
    (generate(pack_int32s([-5])), "args.prompts[1].tokens"),
    (generate(num_samples=0), "args.num_samples"),
    (generate(num_samples=100_000), "args.num_samples"),
    (generate(max_tokens=0), "args.sampling.max_tokens"),
    (generate(max_tokens=2**30), "args.sampling.max_tokens"),
    (generate(max_tokens=600_000), "args.prompts"),
    (generate(temperature=-0.1), "args.sampling.temperature"),
    (generate(temperature=math.nan), "args.sampling.temperature"),
    (generate(temperature=math.inf), "args.sampling.temperature"),
    (generate(stop_token_ids=[1, -1]), "args.sampling.stop_token_ids[1]"),
    (generate(stop_token_ids=[0] * 2000), "args.sampling.stop_token_ids"),
    (generate(stop_strings=["x", ""]), "args.sampling.stop_strings[1]"),
    (generate(stop_strings=["x" * 257]), "args.sampling.stop_strings[0]"),
    (generate(stop_strings=["x"] * 17), "args.sampling.stop_strings"),
    (generate(top_k=-1), "args.sampling.top_k"),
    (generate(top_p=0.0), "args.sampling.top_p"),
    (generate(top_p=1.1), "args.sampling.top_p"),
    (generate(top_p=float("nan")), "args.sampling.top_p"),
    (generate(min_p=-0.1), "args.sampling.min_p"),
    (generate(min_p=1.1), "args.sampling.min_p"),
    (generate(repetition_penalty=0.0), "args.sampling.repetition_penalty"),
    (generate(repetition_penalty=float("inf")), "args.sampling.repetition_penalty"),
    (generate(presence_penalty=2.5), "args.sampling.presence_penalty"),
    (generate(frequency_penalty=float("nan")), "args.sampling.frequency_penalty"),
    (generate(bad_words=[[1], []]), "args.sampling.bad_words[1]"),
    (generate(bad_words=[[1], [-1]]), "args.sampling.bad_words[1]"),
    (generate(bad_words=[[1]] * 257), "args.sampling.bad_words"),
    (generate(top_logprobs=21), "args.sampling.top_logprobs"),
    (Generate([Prompt([1])], SAMPLING, 1, True, 21), "args.prompt_top_logprobs"),
    (Generate([Prompt([1])], SAMPLING, 1, True, -1), "args.prompt_top_logprobs"),
    (Generate([Prompt([1])], SAMPLING, prompt_top_logprobs=2), "args.prompt_top_logprobs"),
    (Generate([Prompt([1], seed=2**63)], SAMPLING), "args.prompts[0].seed"),
    (
        Generate([Prompt([1] * 40)], SamplingParams(1_048_500 - 30), prompt_logprobs=True),
        "args.prompts",
    ),
    (Forward([]), "args.batch"),
    (Forward([Datum([], [])]), "args.batch[0].tokens"),
    (Forward([Datum([1, 2], [1])]), "args.batch[0].targets"),
    (ForwardBackward([], Loss.PPO), "args.batch"),
    (changed(targets=[1]), "args.batch[1].targets"),
    (changed(logprobs=None), "args.batch[1].logprobs"),
    (changed(advantages=None), "args.batch[1].advantages"),
    (changed(advantages=[1.0]), "args.batch[1].advantages"),
    (changed(advantages=[1.0, math.nan]), "args.batch[1].advantages"),
    (changed(logprobs=pack_float32s([1.0, -math.inf])), "args.batch[1].logprobs"),
    (changed(logprobs=b"12345"), "args.batch[1].logprobs"),
    (changed(weights=[1.0]), "args.batch[1].weights"),
    (changed(weights=[1e39, -1e39]), "args.batch[1].weights"),
    (changed(weights=[1.0, 1.0]), "args.batch[1].weights"),
    (
        ForwardBackward(
            [WEIGHTED, msgspec.structs.replace(DATUM, weights=[1.0, 1.0])], Loss.CROSS_ENTROPY
        ),
        "args.batch[1].advantages",
    ),
    (ForwardBackward([Datum([1], [1])], Loss.CROSS_ENTROPY), "args.batch[0].weights"),
    (ForwardBackward([Datum([1], [1])], Loss.IMPORTANCE_SAMPLING), "args.batch[0].logprobs"),
    (ForwardBackward([DATUM], Loss.PPO, clip_low=1.3, clip_high=1.2), "args.clip_low"),
    (ForwardBackward([DATUM], Loss.PPO, clip_high=math.inf), "args.clip_high"),
    (changed(staleness=-1), "args.batch[1].staleness"),
    (OptimStep(AdamParams(-1.0)), "args.adam.learning_rate"),
    (OptimStep(AdamParams(math.nan)), "args.adam.learning_rate"),
    (OptimStep(AdamParams(1.0, eps=0.0)), "args.adam.eps"),
    (OptimStep(AdamParams(1.0, beta1=1.0)), "args.adam.beta1"),
    (OptimStep(AdamParams(1.0, beta2=-0.1)), "args.adam.beta2"),
    (OptimStep(AdamParams(1.0, grad_clip_norm=math.inf)), "args.adam.grad_clip_norm"),
    (SaveState("../escape"), "args.name"),
    (SaveState("s", keep=-1), "args.keep"),
    (SaveState("s", ttl_s=-1.0), "args.ttl_s"),
    (SaveState("s", ttl_s=float("nan")), "args.ttl_s"),
    (PublishWeights(ttl_s=31 * 86_400.0), "args.ttl_s"),
    (LoadState(""), "args.name"),
    (SaveState("s", b"x" * (2**20 + 1)), "args.controller_blob"),
    (SaveState("s", b"x", {"../policy": "s"}), "args.checkpoints"),
    (SaveState("s", b"x", {"sampler": "../s"}), "args.checkpoints[sampler]"),
    (SaveState("s", b"x", {"policy": "s"}), "args.checkpoints[policy]"),
    (SaveState("s", b"x", {f"d{i}": "s" for i in range(65)}), "args.checkpoints"),
    (SaveState("s", checkpoints={"sampler": "s"}), "args.checkpoints"),
    (ForwardBackward([DATUM], Loss.CISPO, clip_low=2.0), "args.clip_low"),
    (ForwardBackward([Datum([1], [1])], Loss.CISPO), "args.batch[0].logprobs"),
    (SyncWeights("policy", 0), "args.version"),
    (SyncWeights("other.tenant", 1), "args.policy"),
]


@pytest.mark.parametrize("args", SOUND, ids=kind_of)
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_sound_operations_pass(args: Args, content_type: str) -> None:
    operation = Operation("a", 1, args, [After("sampler", 9), After("policy", 4)])
    assert validate.read(KEY, encode(operation, content_type), content_type) == operation


@pytest.mark.parametrize(("args", "field"), BAD, ids=[field for _, field in BAD])
def test_bad_arguments_are_refused_by_field(args: Args, field: str) -> None:
    with pytest.raises(CallerError) as error:
        validate.validate(KEY, Operation("a", 1, args))
    assert error.value.info.field == field
    assert error.value.info.remedy


@pytest.mark.parametrize(
    ("key", "operation", "field"),
    [
        (UNORDERED, Operation("a", 1, PublishWeights()), "subject.seq"),
        (UNORDERED, Operation("a", 1, OptimStep(AdamParams(1.0))), "subject.seq"),
        (KEY, Operation("", 1, PublishWeights()), "id"),
        (KEY, Operation("x" * 200, 1, PublishWeights()), "id"),
        (KEY, Operation("a", 1, PublishWeights(), [After("policy", 5)]), "after[0].seq"),
        (KEY, Operation("a", 1, PublishWeights(), [After("policy", 6)]), "after[0].seq"),
        (
            KEY,
            Operation("a", 1, PublishWeights(), [After("sampler", 1), After("sampler", 0)]),
            "after[1].seq",
        ),
        (KEY, Operation("a", 1, PublishWeights(), [After("a.b", 1)]), "after[0].deployment"),
        (KEY, Operation("a", 1, PublishWeights(), [After("sampler", 2**70)]), "after[0].seq"),
        (KEY, Operation("a", 1, PublishWeights(), timeout_s=-1.0), "timeout_s"),
        (KEY, Operation("a", 1, PublishWeights(), timeout_s=math.nan), "timeout_s"),
        (KEY, Operation("a", 1, PublishWeights(), timeout_s=math.inf), "timeout_s"),
        (KEY, Operation("a", 1, PublishWeights(), timeout_s=31 * 86400.0), "timeout_s"),
        (KEY, Operation("a", 1, PublishWeights(), [After("sampler", 1)] * 300), "after"),
    ],
)
def test_bad_headers_are_refused_by_field(
    key: OperationKey, operation: Operation, field: str
) -> None:
    with pytest.raises(CallerError) as error:
        validate.validate(key, operation)
    assert error.value.info.field == field


def test_reading_operation_needs_no_seq_and_may_follow_any_of_its_own() -> None:
    operation = Operation("a", 1, Forward([Datum([1], [1])]), [After("policy", 99)])
    validate.validate(UNORDERED, operation)


LARGE: list[Args] = [
    Generate([Prompt([1])] * 100, SamplingParams(5_000)),
    Generate([Prompt([1] * 20_000)] * 20, SamplingParams(1), prompt_logprobs=True),
    Forward([Datum([1] * 20_000, [1] * 20_000)] * 20),
]


@pytest.mark.parametrize("args", LARGE, ids=["generate", "prompt-logprobs", "forward"])
def test_result_that_only_fits_as_messagepack_is_refused_as_json(args: Args) -> None:
    """A number takes four bytes there, and up to 24 as text."""
    operation = Operation("a", 1, args)
    validate.validate(KEY, operation, MSGPACK)
    with pytest.raises(CallerError) as refused:
        validate.validate(KEY, operation, JSON)
    assert refused.value.info.field in ("args.prompts", "args.batch")
    assert "MessagePack" in refused.value.info.remedy


@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 3), st.data())
def test_estimate_of_a_result_is_never_too_small(
    num_prompts: int, max_tokens: int, num_top: int, data: st.DataObject
) -> None:
    """The worst that a backend may answer, encoded, against what it was estimated at."""
    worst_tokens = [2**31 - 1] * max_tokens
    number = data.draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
    numbers = [number] * max_tokens
    top = worst_tokens * num_top, numbers * num_top
    sequence = Sequence(worst_tokens, numbers, "length", *top)
    packed = Sequence(
        *(pack_int32s(worst_tokens), pack_float32s(numbers), "length"),
        *(pack_int32s(top[0]), pack_float32s(top[1])),
    )
    prompt = Prompt([1] * 7)
    sampling = SamplingParams(max_tokens, top_logprobs=num_top)
    args = Generate([prompt] * num_prompts, sampling, 1, True, num_top)
    ids, numbers = worst_tokens[:1] * 7 * num_top, [number] * 7 * num_top
    for content_type, each, scored in (
        (JSON, sequence, ([number] * 7, ids, numbers)),
        (
            MSGPACK,
            packed,
            (pack_float32s([number] * 7), pack_int32s(ids), pack_float32s(numbers)),
        ),
    ):
        first = scored[0]
        tops: list[Any] = [[part] * num_prompts for part in scored[1:] if num_top]
        result = GenerateResult([[each]] * num_prompts, [first] * num_prompts, *tops)
        assert (
            len(encode(result, content_type))
            <= KINDS["generate"].result_bytes(args, content_type) + 64
        )


def test_refused_header_is_small_whatever_it_quotes() -> None:
    payload = encode({"id": "a", "args": {"type": "x" * 100_000}}, JSON)
    with pytest.raises(CallerError) as error:
        validate.read(KEY, payload, JSON)
    refused = validate.refused(KEY, payload, JSON, error.value.info)
    assert refused.kind == ""
    assert len(encode(refused)) < 4000


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_deep_nesting_is_refused(content_type: str) -> None:
    """In a field that nobody reads: it once ended every router in turn."""
    nested = {JSON: b"[" * 50_000 + b"]" * 50_000, MSGPACK: b"\x91" * 50_000 + b"\xc0"}
    head = {JSON: b'{"x": %s}', MSGPACK: b"\x81\xa1x%s"}
    payload = head[content_type] % nested[content_type]
    with pytest.raises(CallerError) as error:
        validate.read(KEY, payload, content_type)
    assert validate.refused(KEY, payload, content_type, error.value.info).id == ""


@given(st.binary(max_size=200), st.sampled_from([JSON, MSGPACK, "text/plain"]))
def test_any_bytes_are_refused_with_a_typed_error(payload: bytes, content_type: str) -> None:
    with pytest.raises(PhaseloomError) as error:
        validate.read(KEY, payload, content_type)
    assert error.value.info.code is Code.INVALID_ARGUMENT
    refused = validate.refused(KEY, payload, content_type, error.value.info)
    assert refused.error == error.value.info


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from(SOUND), st.data())
def test_any_damage_to_a_sound_operation_is_refused_or_harmless(
    args: Args, data: st.DataObject
) -> None:
    """One value anywhere in the message replaced by any other: never an error of ours."""
    tree = msgspec.to_builtins(Operation("a", 1, args, [After("sampler", 1)]))
    places = list(_places(tree))
    container, name = data.draw(st.sampled_from(places))
    container[name] = data.draw(json_values)
    payload = msgspec.msgpack.encode(tree) if _fits_msgpack(tree) else msgspec.json.encode(tree)
    content_type = MSGPACK if _fits_msgpack(tree) else JSON
    with suppress(CallerError):
        validate.queued(KEY, validate.read(KEY, payload, content_type))
    validate.identify(payload, content_type)


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in items:
        yield tree, name
        if isinstance(value, dict | list):
            yield from _places(value)


def _fits_msgpack(tree: object) -> bool:
    try:
        msgspec.msgpack.encode(tree)
    except OverflowError:
        return False
    return True


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (Generate([Prompt([1, 2, 3]), Prompt(pack_int32s([1]))], SAMPLING, 5), 5 * (3 + 1 + 8)),
        (Forward([Datum([1, 2], [1, 2]), Datum([1], [1])]), 3),
        (ForwardBackward([DATUM], Loss.PPO), 2),
        (PublishWeights(), 0),
    ],
)
def test_size_counts_tokens_at_most(args: Args, size: int) -> None:
    assert kind_for(args).max_num_tokens(args) == size


def test_refused_operation_keeps_what_identity_can_be_read() -> None:
    error = CallerError("no").info
    cases: list[tuple[bytes, str, str]] = [
        (b'{"id": "a", "args": {"type": "forward", "batch": 3}}', "a", "forward"),
        (b'{"id": "a"}', "a", ""),
        (b'{"args": {"type": "forward"}}', "", "forward"),
        (b'{"id": 7}', "", ""),
        (b"not json", "", ""),
        (b'{"id": "%s"}' % (b"x" * 1000), "", ""),
    ]
    for payload, id, kind in cases:
        refused = validate.refused(KEY, payload, JSON, error)
        assert (refused.id, refused.kind, refused.error) == (id, kind, error)


@pytest.mark.parametrize(
    ("session", "newest", "code"),
    [
        (1, 2, Code.ABORTED),
        (-1, 2, Code.ABORTED),
        (3, 2, Code.FAILED_PRECONDITION),
        (0, 0, Code.FAILED_PRECONDITION),
        (1, 0, Code.FAILED_PRECONDITION),
    ],
)
def test_only_the_newest_session_may_publish(session: int, newest: int, code: Code) -> None:
    with pytest.raises(PhaseloomError) as error:
        validate.check_session(session, newest)
    assert error.value.info.code is code
    assert error.value.info.field == "session"
    validate.check_session(newest or 1, newest or 1)


def test_as_many_of_the_largest_headers_as_go_together_fit_in_one_message() -> None:
    name = "n" * 64
    key = OperationKey(name, name, name, str(10**15))
    after = [After("d" * 64, 10**15)] * validate.MAX_AFTER
    operation = Operation("i" * validate.MAX_ID_LENGTH, 10**9, SyncWeights(name, 10**15), after)
    validate.validate(key, operation)
    quoted = "\N{GRINNING FACE}" * 10_000
    error = ErrorInfo(Code.INVALID_ARGUMENT, quoted, field=quoted, remedy=quoted)
    refused = validate.refused(key, encode(operation), MSGPACK, error)
    header = replace(validate.queued(key, operation), error=refused.error)
    batch = OperationsQueued([header] * MAX_ITEMS, ["t" * 55] * MAX_ITEMS)
    assert len(encode(batch)) < MAX_PAYLOAD_BYTES


# --- headers of large operations -----------------------------------------------------------------


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_too_many_prompts_are_counted_before_they_are_decoded(content_type: str) -> None:
    args = Generate([Prompt([1])] * (validate.MAX_ITEMS + 1), SamplingParams(4))
    payload = encode(Operation("id", 1, args), content_type)
    assert not validate.is_small(payload)
    header = validate.header(KEY, payload, content_type)
    assert (header.id, header.kind) == ("id", "generate")
    assert header.error is not None
    assert f"got {validate.MAX_ITEMS + 1}" in header.error.message


def test_header_of_a_valid_operation_has_its_size_and_session() -> None:
    payload = encode(Operation("id", 7, Generate([Prompt([1])], SamplingParams(4))))
    assert validate.is_small(payload)
    header = validate.header(KEY, payload, MSGPACK)
    assert (header.error, header.num_bytes, header.session) == (None, len(payload), 7)


def test_many_items_in_few_bytes_are_not_small() -> None:
    args = Generate([Prompt([1])] * 1000, SamplingParams(4))
    assert len(encode(Operation("id", 1, args))) < 16_000
    assert not validate.is_small(encode(Operation("id", 1, args)))


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("num", [1, 10_000])
def test_large_completions_are_decoded_without_their_results(num: int, content_type: str) -> None:
    result = GenerateResult([[Sequence([1], [-1.0], "stop")]] * num)
    completion = Completion("id", Outcome.COMPLETED, result)
    decoded = decode_outcome(encode(completion, content_type), content_type)
    assert decoded == (completion if num == 1 else replace(completion, result=None))
