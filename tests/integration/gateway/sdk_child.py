"""What a user of the Tinker SDK does, in an interpreter that has the SDK: python sdk_child.py PART
[NUMBER].

What comes out is told as one JSON object on stdout. It imports nothing of ours.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import deque
from typing import Any

import tinker
from tinker import types

TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
STEP = types.AdamParams(learning_rate=1e-2)
IN_FLIGHT = 8
"""Pairs of calls."""
SAMPLE_EVERY = 10
"""Steps."""


def datum(**more: Any) -> types.Datum:
    inputs = {"target_tokens": TOKENS[1:], **more}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


LESSON = datum(weights=[1.0] * (len(TOKENS) - 1))


def loss(client: Any) -> float:
    return float(client.forward([LESSON], "cross_entropy").result().metrics["loss:sum"])


def step(client: Any) -> float:
    trained = client.forward_backward([LESSON], "cross_entropy")
    client.optim_step(STEP).result()
    return float(trained.result().metrics["loss:sum"])


def sampling(client: Any, num_tokens: int = 6, **more: Any) -> Any:
    params = types.SamplingParams(max_tokens=num_tokens, temperature=0.0, **more)
    prompt = types.ModelInput.from_ints(TOKENS[:2])
    return client.sample(prompt=prompt, num_samples=1, sampling_params=params)


def sampled(client: Any, num_tokens: int = 6, **more: Any) -> list[int]:
    return [*(sampling(client, num_tokens, **more).result().sequences[0].tokens or [])]


def at_once(*clients: Any) -> list[list[int]]:
    drawing = [sampling(client) for client in clients]
    return [[*(each.result().sequences[0].tokens or [])] for each in drawing]


def untrained(service: Any, rank: int) -> Any:
    """A sampling client of another model, which says what the base says."""
    client = service.create_lora_training_client(base_model="tiny", rank=rank)
    return client.save_weights_and_get_sampling_client()


def failure(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole(rank: int = 8) -> dict[str, Any]:
    """Every step from a session to a checkpoint that another client goes on from.

    Args: rank: 0: all weights are trained.
    """
    service = tinker.ServiceClient()
    said: dict[str, Any] = {
        "models": [m.model_name for m in service.get_server_capabilities().supported_models]
    }
    rest = service.create_rest_client()
    earlier = rest.list_training_runs().result().cursor.total_count
    client = service.create_lora_training_client(base_model="tiny", rank=rank)
    info = client.get_info()
    said["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    said["before"] = loss(client)
    said["losses"] = [step(client) for _ in range(20)]
    said["shapes"] = [
        [*(array.shape or [])]
        for array in client.forward([LESSON], "cross_entropy").result().loss_fn_outputs[0].values()
    ]

    first = client.save_weights_and_get_sampling_client()
    said["sampled"] = sampled(first)
    scored = first.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    own = client.forward([LESSON], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    said["difference"] = max(abs(a - b) for a, b in zip(own, scored[1:], strict=True))
    drawn = first.sample(
        prompt=types.ModelInput.from_ints(TOKENS[:2]),
        num_samples=3,
        sampling_params=types.SamplingParams(max_tokens=4, temperature=1.0, seed=7),
    ).result()
    said["drawn"] = [[*(each.tokens or [])] for each in drawn.sequences]

    path = client.save_weights_for_sampler("a.name").result().path
    said["named"] = sampled(service.create_sampling_client(model_path=path))
    said["base"] = sampled(service.create_sampling_client(base_model="tiny"))
    saved = client.save_state("kept").result().path
    said["paths"] = [path, saved]
    at = loss(client)
    with_optimizer = service.create_training_client_from_state_with_optimizer(saved)
    without = service.create_training_client_from_state(saved)
    said["loaded"] = [at, loss(with_optimizer), loss(without)]
    for each in (client, with_optimizer, without):
        step(each)
    said["went_on"] = [loss(client), loss(with_optimizer), loss(without)]

    # The weights of an earlier sampling client are still there, beside newer ones.
    newer = client.save_weights_and_get_sampling_client()
    said["earlier"], said["newer"] = sampled(first), sampled(newer)
    said["both"] = at_once(newer, untrained(service, rank // 2))

    def custom(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {"mine": 1.0}

    if importlib.util.find_spec("torch"):  # which only losses of one's own need
        said["custom"] = dict(client.forward_backward_custom([LESSON], custom).result().metrics)
        client.optim_step(STEP).result()
    count = len(TOKENS) - 1
    rl = datum(logprobs=[-1.0] * count, advantages=[0.5] * count)
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        said[name] = dict(client.forward_backward([rl], name).result().metrics)
    client.optim_step(STEP).result()

    said["refused"] = failure(lambda: client.forward_backward([rl], "kto").result())
    said["partial"] = failure(lambda: client.optim_step(STEP).result())
    said["after"] = step(client)
    said["runs"] = rest.list_training_runs().result().cursor.total_count - earlier
    said["listed"] = [
        each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints
    ]
    gone = client.save_weights_for_sampler("gone").result().path
    rest.delete_checkpoint_from_tinker_path(gone).result()
    said["gone"] = failure(lambda: sampled(service.create_sampling_client(model_path=gone)))
    said["unknown_model"] = failure(
        lambda: service.create_lora_training_client(base_model="none", rank=8).get_info()
    )
    said["unknown_path"] = failure(
        lambda: sampled(service.create_sampling_client(model_path=path + "x"))
    )
    return said


def steps(count: int) -> dict[str, Any]:
    """Pairs of calls, several on their way before the first is answered; now and then a sample."""
    client = tinker.ServiceClient().create_lora_training_client(base_model="tiny", rank=8)
    print("begun", file=sys.stderr, flush=True)
    asked: deque[tuple[Any, Any]] = deque()
    said: dict[str, Any] = {"losses": [], "sampled": []}

    def answered() -> None:
        trained, stepped = asked.popleft()
        said["losses"].append(trained.result().metrics["loss:sum"])
        stepped.result()
        number = len(said["losses"])
        print(f"step {number}", file=sys.stderr, flush=True)
        if number % SAMPLE_EVERY == 0:
            said["sampled"].append(sampled(client.save_weights_and_get_sampling_client()))

    for _ in range(count):
        if len(asked) == IN_FLIGHT:
            answered()
        trained = client.forward_backward([LESSON], "cross_entropy")
        asked.append((trained, client.optim_step(STEP)))
    while asked:
        answered()
    return said


def saved() -> dict[str, Any]:
    """What can be done with checkpoints, under names of all kinds."""
    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    client = service.create_lora_training_client(base_model="tiny", rank=4)
    said: dict[str, Any] = {}

    def listed() -> dict[str, Any]:
        found = rest.list_checkpoints(client.model_id).result().checkpoints
        return {each.checkpoint_id: each for each in found}

    path = client.save_state("a").result().path
    before = loss(client)
    step(client)
    said["taken"] = failure(lambda: client.save_state("a").result())
    said["slash"] = failure(lambda: client.save_state("b/c").result())
    said["percent"] = failure(lambda: client.save_weights_for_sampler("a%2Fb").result())
    said["no_ttl"] = failure(lambda: client.save_state("d", ttl_seconds=-1).result())
    other = service.create_training_client_from_state(path)
    client.save_state("a", overwrite=True, ttl_seconds=3600).result()
    after = loss(client)
    newer = service.create_training_client_from_state(path)
    said["loaded"] = [loss(other) == before, loss(newer) == after, before != after]
    one = listed()["weights/a"]
    said["expires"] = [one.expires_at is not None, (one.size_bytes or 0) > 0]
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    said["kept"] = listed()["weights/a"].expires_at is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    said["again"] = listed()["weights/a"].expires_at is not None

    names = ["a b", "ü!", "x" * 150, "...", "a:b@c"]
    paths = [client.save_weights_for_sampler(name).result().path for name in names]
    said["odd"] = [
        failure(lambda p=p: rest.get_weights_info_by_tinker_path(p).result()) for p in paths
    ]
    said["drawn"] = len(
        {tuple(sampled(service.create_sampling_client(model_path=p))) for p in paths}
    )
    said["count"] = len(listed())
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    said["page"] = [len(page.checkpoints), page.cursor.total_count if page.cursor else 0]
    # Whoever has loaded it goes on, also where it is deleted.
    rest.delete_checkpoint_from_tinker_path(path).result()
    for each in paths:
        rest.delete_checkpoint_from_tinker_path(each).result()
    said["left"] = list(listed())
    said["gone"] = failure(lambda: rest.delete_checkpoint_from_tinker_path(path).result())
    said["step"] = step(newer) > 0.0
    said["kept_path"] = client.save_state("kept").result().path
    return said


def external(*recipients: str) -> dict[str, Any]:
    """Weights saved for other programs, and their files.

    Args: recipients: keys for whom they are encrypted.
    """
    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    client = service.create_lora_training_client(base_model="tiny", rank=4)
    step(client)
    keys = [*recipients] or None
    saved = client.save_weights_external(
        "out", ttl_seconds=7200, age_encryption_recipients=keys
    ).result()
    urls = rest.get_external_weights_urls(saved.path).result()
    (row,) = rest.list_checkpoints(client.model_id).result().checkpoints
    said: dict[str, Any] = {"path": saved.path, "urls": urls.urls, "type": row.checkpoint_type}
    said["expires"] = row.expires_at is not None
    said["state"] = client.save_state("state").result().path
    said["taken"] = failure(lambda: client.save_weights_external("out").result())
    said["key"] = failure(
        lambda: client.save_weights_external("b", age_encryption_recipients=["age1x"]).result()
    )
    sampler = service.create_sampling_client(model_path=said["state"])
    said["tokens"] = [c.get_tokenizer().encode("a b") for c in (client.result(), sampler)]
    said["drawn"] = sampled(service.create_sampling_client(base_model=sampler.get_base_model()))
    said["after"] = step(client)
    return said


def long() -> dict[str, Any]:
    """The same long sample twice."""
    client = tinker.ServiceClient().create_sampling_client(base_model="long")
    prompt = types.ModelInput.from_ints(TOKENS[:2])
    params = types.SamplingParams(max_tokens=4000, temperature=1.0, seed=4)
    drawn = []
    for _ in range(2):
        asked = client.sample(prompt=prompt, num_samples=1, sampling_params=params)
        print("asked", file=sys.stderr, flush=True)
        drawn.append([*(asked.result().sequences[0].tokens or [])])
        print("drawn", file=sys.stderr, flush=True)
    return {"drawn": drawn}


def distilled() -> dict[str, Any]:
    """A teacher's likeliest tokens as weighted targets, several a position."""
    import torch

    service = tinker.ServiceClient()
    teacher = service.create_sampling_client(base_model="tiny")
    top = 4
    drawn = teacher.sample(
        prompt=types.ModelInput.from_ints(TOKENS),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=3, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=top,
        topk_sample_logprobs=2,
    ).result()
    rows = drawn.topk_prompt_logprobs or []
    own = drawn.prompt_logprobs or []
    said: dict[str, Any] = {
        "rows": [row is None or len(row) for row in rows],
        "sorted": all(sorted(r, key=lambda e: -e[1]) == r for r in rows if r),
        "own": all(
            abs(dict(row)[token] - (lp or 0.0)) < 1e-6
            for row, token, lp in zip(rows[1:], TOKENS[1:], own[1:], strict=True)
            if row and token in dict(row)
        ),
        "drawn_rows": [len(row or []) for row in drawn.sequences[0].topk_logprobs or []],
    }
    last = teacher.sample(
        prompt=types.ModelInput.from_ints(TOKENS),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=top,
        prompt_logprobs_last_n=2,
    ).result()
    said["last"] = [
        [index for index, each in enumerate(array or []) if each is not None]
        for array in (last.prompt_logprobs, last.topk_prompt_logprobs)
    ]
    client = service.create_lora_training_client(base_model="tiny", rank=8)
    for _ in range(20):
        step(client)
    tokens = torch.tensor([[token for token, _ in row] for row in rows[1:] if row])
    weights = torch.tensor([[lp for _, lp in row] for row in rows[1:] if row]).exp()
    weights = weights / weights.sum(-1, keepdim=True)

    def soft(weights: Any) -> types.Datum:
        inputs = {"target_tokens": tokens, "weights": weights}
        text = types.ModelInput.from_ints(TOKENS[:-1])
        return types.Datum(model_input=text, loss_fn_inputs=inputs)

    losses = []
    for _ in range(20):
        trained = client.forward_backward([soft(weights)], "cross_entropy")
        client.optim_step(STEP).result()
        losses.append(trained.result().metrics["loss:sum"])
    logprobs = client.forward([soft(weights)], "cross_entropy").result()
    array = logprobs.loss_fn_outputs[0]["logprobs"]
    said["shape"] = [*(array.shape or [])]
    expected = -(array.to_torch() * weights).sum().item()
    said["loss"] = abs(expected - logprobs.metrics["loss:sum"]) < 1e-3
    said["falls"] = losses[-1] < losses[0]
    # Mostly zeroes travel as compressed sparse rows.
    few = weights.clone()
    few[:-1] = 0.0
    sparse = client.forward([soft(few)], "cross_entropy").result().metrics["loss:sum"]
    said["sparse"] = abs(sparse + (array.to_torch() * few).sum().item()) < 1e-3
    said["is_sparse"] = soft(few).loss_fn_inputs["weights"].sparse_crow_indices is not None
    said["mixed"] = failure(
        lambda: client.forward_backward([soft(weights), LESSON], "cross_entropy").result()
    )
    said["ppo"] = failure(lambda: client.forward_backward([soft(weights)], "ppo").result())
    client.optim_step(STEP)
    said["after"] = step(client) > 0.0
    return said


def refused() -> dict[str, Any]:
    """What is not served is told, and the program goes on: each refusal keeps its place."""
    service = tinker.ServiceClient(user_metadata={"note": "mine"}, display_name="a name")
    rest = tinker.RestClient()
    client = service.create_lora_training_client(base_model="tiny", rank=4).result()
    path = client.save_state("kept").result().path
    sampler = client.save_weights_and_get_sampling_client()
    count = len(TOKENS) - 1
    rl = datum(logprobs=[-1.0] * count, advantages=[0.5] * count)
    other: Any = types.DimuonOptimizerConfig()
    recorded = service.create_sampling_client(path, record_stability_info=True)

    def drawn(**params: Any) -> Any:
        prompt, given = types.ModelInput.from_ints([1]), types.SamplingParams(**params)
        return sampler.sample(prompt=prompt, num_samples=1, sampling_params=given).result()

    calls: dict[str, Any] = {
        "optimizer_config": lambda: service.create_lora_training_client(
            base_model="tiny", rank=4, optimizer=other
        ).result(),
        "optimizer_config of a load": lambda: service.create_training_client_from_state(
            path, optimizer=other
        ).result(),
        "base_model": lambda: service.create_training_client_from_state(path, "other").result(),
        "weights_access_token": lambda: client.load_state(path, weights_access_token="x").result(),
        "checkpoint": lambda: client.load_state(path + "x").result(),
        "optimizer_params": lambda: client.optim_step(
            types.DimuonParams(learning_rate=0.1)
        ).result(),
        "path": lambda: client.save_weights_external("a/b").result(),
        "age_encryption_recipients": lambda: client.save_weights_external(
            "elsewhere", age_encryption_recipients=[]
        ).result(),
        "kind": lambda: client.save_weights_and_get_sampling_client(kind="inflight").result(),
        "loss_fn_config": lambda: client.forward_backward([rl], "ppo", {"beta": 0.1}).result(),
        "loss_fn": lambda: client.forward([LESSON], "gspo").result(),
        "record_stability_info": lambda: sampled(recorded),
        "max_tokens": lambda: drawn(max_tokens=0),
        "top_p": lambda: drawn(max_tokens=2, top_p=0.0),
        "project_id": lambda: rest.list_training_runs(project_id="some").result(),
    }
    said: dict[str, Any] = {name: failure(call) for name, call in calls.items()}
    said["dropped"] = failure(lambda: client.optim_step(STEP).result())
    said["after"] = step(client)

    def squared(logprobs: Any, weights: Any) -> Any:
        total = (logprobs * logprobs * weights).sum()
        return total, {"custom/squared:sum": total}

    own = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
    metrics = client.forward_backward_custom([LESSON], own).result().metrics
    said["custom"] = [metrics["loss:sum"], metrics["custom/squared:sum"]]
    session = rest.get_session(client.model_id.partition(":")[0]).result()
    said["session"] = [session.user_metadata, session.display_name]
    run = rest.get_training_run(client.model_id).result()
    last = run.last_checkpoint
    said["last"] = [last is not None and last.tinker_path == path, run.last_sampler_checkpoint]
    page = rest.list_training_runs(limit=1).result()
    said["page"] = [[each.training_run_id == client.model_id for each in page.training_runs]]
    said["page"] += [len(rest.list_sessions(limit=1).result().sessions)]
    said["page"] += [len(rest.list_sessions(limit=1, offset=1000).result().sessions)]
    service.close("success").result()
    return said


def defaults() -> dict[str, Any]:
    """An adapter as the SDK makes one where nothing is said of it: on the output head, too."""
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(base_model="tiny")
        for _ in range(10):
            step(client)
        scored = client.forward([LESSON], "cross_entropy").result().loss_fn_outputs[0]
        return {
            "path": client.save_weights_for_sampler("mine").result().path,
            "sampled": sampled(client.save_weights_and_get_sampling_client()),
            "logprobs": scored["logprobs"].tolist(),
        }


def reward(rank: int) -> dict[str, Any]:
    """Policy gradients on a reward: how often a sample has the token 3.

    Args: rank: 0: all weights are trained.
    """
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model="tiny", rank=rank)
    prompt = types.ModelInput.from_ints(TOKENS[:2])
    rewards = []
    for number in range(12):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=number)
        drawn = sampler.sample(prompt=prompt, num_samples=32, sampling_params=params).result()
        scores = [sum(token == 3 for token in each.tokens) / 6 for each in drawn.sequences]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        batch = []
        for each, score in zip(drawn.sequences, scores, strict=True):
            tokens = [*TOKENS[:2], *(each.tokens or [])]
            inputs: Any = {
                "target_tokens": tokens[1:],
                "logprobs": [0.0, *(each.logprobs or [])],
                "advantages": [0.0] + [score - mean] * (len(tokens) - 2),
            }
            text = types.ModelInput.from_ints(tokens[:-1])
            batch.append(types.Datum(model_input=text, loss_fn_inputs=inputs))
        client.forward_backward(batch, "importance_sampling")
        client.optim_step(STEP).result()
    return {"rewards": rewards}


PARTS = {
    "whole": whole,
    "full": lambda: whole(0),
    "steps": lambda: steps(int(sys.argv[2])),
    "long": long,
    "reward": lambda: reward(int(sys.argv[2])),
    "saved": saved,
    "external": lambda: external(*sys.argv[2:]),
    "distilled": distilled,
    "refused": refused,
    "defaults": defaults,
}

if __name__ == "__main__":
    json.dump(PARTS[sys.argv[1]](), sys.stdout)
