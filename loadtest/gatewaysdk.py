"""The Tinker SDK's side of the gateway bench, a program of its own: python gatewaysdk.py CALLS.

A line on stdin has it make so many calls of each kind, one at a time; it answers with a JSON object
of the seconds of each. It imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
_IN_FLIGHT = 256
_LONG = 50
"""Tokens of a datum in the large batch."""


def timed(call: Callable[[], Any], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return taken


def main(count: int, large: int) -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model="tiny", rank=0)
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": [1.0] * 7}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    adam = types.AdamParams(learning_rate=1e-4)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=1)

    def sample() -> Any:
        return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)

    calls = {
        "forward": lambda: client.forward([datum], "cross_entropy").result(),
        "forward_backward": lambda: client.forward_backward([datum], "cross_entropy").result(),
        "optim_step": lambda: client.optim_step(adam).result(),
        "sample": lambda: sample().result(),
    }
    text = [index % 29 for index in range(_LONG)]
    many: Any = {"target_tokens": text, "weights": [1.0] * _LONG}
    long = types.Datum(model_input=types.ModelInput.from_ints(text), loss_fn_inputs=many)
    for call in calls.values():
        timed(call, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "calls":
            told: dict[str, Any] = {name: timed(call, count) for name, call in calls.items()}
        else:
            began = time.perf_counter()
            for future in [sample() for _ in range(_IN_FLIGHT)]:
                future.result()
            told = {"in_flight_s": time.perf_counter() - began}
            began = time.perf_counter()
            client.forward_backward([long] * large, "cross_entropy").result()
            told["large_s"] = time.perf_counter() - began
            client.optim_step(adam).result()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
