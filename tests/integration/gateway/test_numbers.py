"""A refused call uses up its number, so that the model's later calls run."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import numpy as np
import pytest

from phaseloom.gateway.core import wire
from tests.support.gateway import Served

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
_CONTEXT = 16


class Caller:
    """Calls of the Tinker API with a key, and one model."""

    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http = http
        self._headers = {"X-API-Key": key}
        self.model = ""

    async def post(self, call: str, **more: Any) -> tuple[int, dict[str, Any]]:
        if "data" in more:
            more["data"] = io.BytesIO(more["data"])
        async with self._http.post(f"/api/v1/{call}", headers=self._headers, **more) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else {"bytes": await answer.read()}

    async def kept(self, call: str, **more: Any) -> dict[str, Any]:
        status, promise = await self.post(call, **more)
        assert status == 200, promise
        status, answer = await self.post("retrieve_future", json=promise)
        assert status == 200, answer
        return answer

    async def create_model(self, number: int) -> None:
        _, session = await self.post("create_session", json={})
        asked = {
            **session,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        }
        self.model = (await self.kept("create_model", json=asked))["model_id"]

    async def step(self, seq: int) -> dict[str, Any]:
        adam = {"learning_rate": 0.1}
        return await self.kept(
            "optim_step", json={"model_id": self.model, "seq_id": seq, "adam_params": adam}
        )


def training(model: str, seq: int, num_datums: int, num_targets: int = 1) -> Any:
    """A call with sparse targets: each position has one with a weight of 1, and others without."""
    request = wire.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for index in range(num_datums):
        datum = request.data.add()
        tokens = (np.arange(_CONTEXT) + index) % 29
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        for name, values, dtype in (("target_tokens", tokens, 3), ("weights", np.ones(16), 1)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = dtype
            tensor.shape.extend([_CONTEXT, num_targets])
            tensor.sparse_csr.values = values.astype(wire.DTYPES[dtype]).tobytes()
            tensor.sparse_csr.crow_indices = np.arange(_CONTEXT + 1, dtype="<i8").tobytes()
            tensor.sparse_csr.col_indices = np.zeros(_CONTEXT, "<i8").tobytes()
    return request


def output(answer: dict[str, Any]) -> Any:
    result = wire.ForwardBackwardOutput()
    result.ParseFromString(answer["bytes"])
    return result


async def test_call_above_a_message_is_split_and_later_calls_run(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
        caller = Caller(http, served.key())
        await caller.create_model(0)
        large = training(caller.model, 1, 1160, 128).SerializeToString()
        assert len(large) < 8 * 2**20 < 1160 * _CONTEXT * 128 * 8
        trained = output(await caller.kept("forward_backward", data=large))
        assert trained.metrics["num_tokens:sum"] == 1160 * _CONTEXT
        field = trained.loss_fn_outputs[0].fields["logprobs"]
        assert len(field.data) == 1160 * _CONTEXT * 128 * 4
        assert field.trailing_shape == [128]
        assert (await caller.step(2))["metrics"]["grad_norm:mean"] > 0

        small = training(caller.model, 3, 2).SerializeToString()
        assert output(await caller.kept("forward_backward", data=small)).metrics
        status, promise = await caller.post("forward_backward", data=large)
        assert (status, promise["request_id"]) == (200, f"{caller.model}:1x128")

        # The gradient of the parts is that of the batch: the same step follows from small calls.
        losses = []
        for number, sizes in ((1, [1160]), (2, [290] * 4)):
            await caller.create_model(number)
            seq = 0
            for size in sizes:
                seq += 1
                part = training(caller.model, seq, size, 128).SerializeToString()
                await caller.kept("forward_backward", data=part)
            assert "metrics" in await caller.step(seq + 1)
            probe = training(caller.model, seq + 2, 2).SerializeToString()
            answer = output(await caller.kept("forward_backward", data=probe))
            losses.append(answer.metrics["loss:sum"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


async def test_refused_numbered_calls_do_not_block_later_ones(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
        caller = Caller(http, served.key())
        await caller.create_model(0)
        numbered = {"model_id": caller.model}
        wrongs: list[tuple[str, dict[str, Any]]] = [
            ("optim_step", {"json": {"adam_params": {"learning_rate": "much"}}}),
            ("optim_step", {"json": {"adam_params": {"learning_rate": float("nan")}}}),
            ("optim_step", {"json": {"adam_params": [1]}}),
            ("optim_step", {"json": {"adam_params": {}, "optimizer_params": "\ud800"}}),
            ("save_weights", {"json": {"path": 7}}),
            ("save_weights", {"json": {"ttl_seconds": "long"}}),
            ("save_weights_for_sampler", {"json": {"path": []}}),
            ("load_weights", {"json": {"path": None}}),
            ("forward_backward", {"data": b"\xff\xff"}),
            ("forward_backward", {"data": b"\x1a\x7f"}),
        ]
        for seq, (call, more) in enumerate(wrongs, start=1):
            if "json" in more:
                sent: dict[str, Any] = {"json": {**numbered, "seq_id": seq, **more["json"]}}
            else:
                start = wire.ForwardBackwardRequest(model_id=caller.model, seq_id=seq)
                sent = {"data": start.SerializeToString() + more["data"]}
            status, answer = await caller.post(call, **sent)
            assert (status, bool(answer["detail"])) == (400, True), (call, more, answer)
        shape = training(caller.model, len(wrongs) + 1, 1, 1)
        shape.data[0].loss_fn_inputs["weights"].shape[0] = 10**9
        refused = await caller.kept("forward_backward", data=shape.SerializeToString())
        assert refused["category"] == "user", refused
        many = training(caller.model, len(wrongs) + 2, 9000)
        refused = await caller.kept("forward_backward", data=many.SerializeToString())
        assert "at most 8192 datums" in refused["error"], refused
        refused = await caller.step(len(wrongs) + 3)
        assert "partial gradients are dropped" in refused["error"], refused
        assert "metrics" in await caller.step(len(wrongs) + 4)


async def test_split_after_later_calls_is_refused_under_its_number(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
        caller = Caller(http, served.key())
        await caller.create_model(0)
        step = {"model_id": caller.model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
        _, later = await caller.post("optim_step", json=step)
        large = training(caller.model, 1, 1160, 128).SerializeToString()
        status, answer = await caller.post("forward_backward", data=large)
        assert (status, "send calls in order" in answer["detail"]) == (400, True), answer
        assert "error" in (await caller.post("retrieve_future", json=later))[1]
        assert "metrics" in await caller.step(3)
