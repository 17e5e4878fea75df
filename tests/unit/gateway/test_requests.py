"""What the Tinker SDK may say in a request, beside what the gateway reads: it overlooks nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2

from phaseloom.client import CallerError
from phaseloom.common.contract.operations import AdamParams
from phaseloom.gateway.core import convert, wire
from phaseloom.gateway.tinker import requests

HARMLESS: dict[str, set[str]] = {
    "CreateSessionRequest": {"tags", "project_id"},
    # The SDK names a sampling session in each sample.
    "SampleRequest": {"base_model", "model_path"},
    # They say which samples a datum is made of, for a loss that is not served.
    "Datum": {"model_input_spans", "loss_fn_input_spans"},
    # A number for bills, and the answers to what is refused.
    "SampleResponse": {"prompt_cache_hit_tokens", "target_prompt_logprobs", "prompt_alt_tokens"},
}
"""The fields that the gateway does not read, or write, because nothing depends on them."""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (types.CreateSessionRequest, requests.CreateSession),
        (types.CreateModelRequest, requests.CreateModel),
        (types.LoraConfig, requests.LoraConfig),
        (types.AdamParams, AdamParams),
        (types.SaveWeightsRequest, requests.SaveWeights),
        (types.SaveWeightsForSamplerRequest, requests.SaveWeights),
        (types.SaveWeightsExternalRequest, requests.SaveWeights),
        (types.LoadWeightsRequest, requests.LoadWeights),
        (types.CreateSamplingSessionRequest, requests.CreateSamplingSession),
        (types.SampleRequest, requests.Sample),
        (types.SamplingParams, convert.SampleParams),
    ],
)
def test_every_field_of_the_sdk_is_read_or_harmless(
    theirs: Any, ours: type[msgspec.Struct]
) -> None:
    asked = {*theirs.model_fields} - {"type"} - HARMLESS.get(theirs.__name__, set())
    assert asked <= {*ours.__struct_fields__}


@pytest.mark.parametrize("message", ["ForwardBackwardRequest", "Datum", "SampleResponse"])
def test_every_field_of_the_sdks_protobuf_is_known_or_harmless(message: str) -> None:
    theirs = getattr(tinker_public_pb2, message).DESCRIPTOR.fields
    ours = {field.number for field in getattr(wire, message).DESCRIPTOR.fields}
    assert {each.name for each in theirs if each.number not in ours} == HARMLESS.get(message, set())


@pytest.mark.parametrize("version", ["0.24.9", "0.9.0", "0.0.1"])
def test_sdk_before_protobuf_is_refused(version: str) -> None:
    with pytest.raises(CallerError, match=f"version {version} of the Tinker SDK") as refused:
        requests.CreateSession(sdk_version=version).check()
    assert refused.value.info.field == "sdk_version"


@pytest.mark.parametrize("version", ["0.25.0", "0.38.0rc1", "1.0", "2", "unknown", "", None])
def test_other_sdks_are_served(version: str | None) -> None:
    requests.CreateSession(sdk_version=version).check()
