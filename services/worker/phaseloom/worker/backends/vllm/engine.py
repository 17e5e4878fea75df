"""vLLM's engine in this process. Only this module knows its class, its executor and its worker.

vLLM calls `LLMEngine` legacy, so it is hidden behind `Engine`; `EngineCore` would replace it.
Scheduler and worker run in the thread that calls `step`. Nothing runs between two calls.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process.config import set_for_children
from phaseloom.worker.backends.vllm.adapters import AddedParts, ByWeight
from phaseloom.worker.backends.vllm.draws import KEY, Draw, Draws
from phaseloom.worker.backends.vllm.loader import (
    LOAD_FORMAT,
    Placement,
    Shapes,
    load_into,
    move,
    place,
    unsupported,
)

MAX_ROWS = 256
"""Most sequences decoded at once. Others wait for a row of the batch."""
_CACHE_ERRORS = ("KV cache", "cache blocks")
"""Parts of vLLM's messages about a cache too small for one sequence, or for one block."""
_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache. Prompts share whole blocks only."""


@dataclass(frozen=True)
class Settings:
    """The settings of one rank's engine."""

    config: dict[str, Any]
    """The model's config, as `transformers` writes it."""
    dtype: str
    """The dtype of the weights and of all computation."""
    kv_bytes: int
    """Size of the KV cache."""
    num_positions: int
    """Maximum length of a sequence, in positions."""
    tp: int = 1
    """Number of ranks that each layer is split over."""
    pp: int = 1
    """Number of ranks that the layers are distributed over."""


@dataclass(frozen=True)
class Request:
    """One sequence to decode."""

    name: str
    tokens: Sequence[int]
    max_tokens: int
    stop_token_ids: Sequence[int] = ()
    draw: Draw | None = None
    """None for greedy decoding."""
    num_top: int = 0
    """Number of likeliest tokens to return with log-probabilities, besides the drawn one."""
    scores_prompt: bool = False
    """Whether to return the log-probabilities of the prompt."""
    num_prompt_top: int = 0
    """Number of likeliest tokens to return at each position of the prompt, besides the prompt's
    own."""


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of consecutive tokens and, if requested, of the likeliest tokens at the
    same positions."""

    logprobs: Sequence[float]
    top_tokens: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True)
class Step:
    """The result of one step of the engine for one sequence."""

    name: str
    tokens: Sequence[int]
    scored: Scored
    """Log-probabilities of the new tokens."""
    stop_reason: str
    """`stop` or `length`; empty if the sequence continues."""
    prompt: Scored | None = None
    """Log-probabilities of the prompt's tokens after the first. Set in the first step, if
    requested."""


class _RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """An executor of one worker in this process. The other ranks are started elsewhere."""

    supports_pp = True

    def _distributed_args(self) -> tuple[str, int, int]:
        return _address(), dist.get_rank(), 0


def _address() -> str:
    """Return the address where this rank would meet the others without an existing process group.

    On CPUs, vLLM names shared memory after the address. A killed rank would leave that memory
    behind, and the others would wait in it forever. With a different name on each rank, vLLM falls
    back to gloo.
    """
    return f"file:///nowhere-{dist.get_rank()}"


class Engine:
    """vLLM's scheduler and worker, over weights in `memory`."""

    def __init__(
        self,
        settings: Settings,
        memory: torch.Tensor,
        scratch: torch.Tensor,
        shapes: Shapes,
        *,
        is_filled: bool = False,
    ) -> None:
        """Build the model on the memory, which must be zero, and the KV cache on the scratch
        memory. torch's process group must be the replica's.

        Args: is_filled: the memory holds the weights already and must not be written to.
        Raises: CallerError: RESOURCE_EXHAUSTED: the KV cache is too small for one sequence.
        """

        def move_in(model: nn.Module, dtype: torch.dtype) -> None:
            move(model, place(model, shapes, dtype), memory, is_filled=is_filled)

        with engine_args(settings) as args:
            load_into(move_in)
            try:
                self._engine = LLMEngine.from_engine_args(args)
            except ValueError as error:
                if not any(phrase in str(error) for phrase in _CACHE_ERRORS):
                    raise
                raise CallerError(
                    f"{settings.kv_bytes} bytes of scratch memory are too few for vLLM's KV cache: "
                    f"{error}",
                    code=Code.RESOURCE_EXHAUSTED,
                    field="scratch_bytes",
                    remedy="raise the deployment's scratch_bytes, or use a model config with fewer "
                    "positions",
                ) from error
            finally:
                load_into(None)
        self._check_weights(memory)
        self._use_scratch(scratch)
        if settings.pp > 1:
            _use_stages(self._runner)
        self._internal: dict[str, str] = {}
        self.salt = ""
        """Identifies the weights that new requests use. Requests share cached keys and values only
        with the same salt."""
        self._added: AddedParts | None = None

    def _check_weights(self, memory: torch.Tensor) -> None:
        """Check that all weights are in `memory`.

        Raises: CallerError: vLLM moved some elsewhere, as it does with experts on CPUs.
        """
        start = memory.data_ptr()
        for name, parameter in self._runner.model.named_parameters():
            if not start <= parameter.data_ptr() < start + memory.numel():
                raise unsupported(f"vLLM stores {name} in a form of its own")

    @property
    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    def add_adapter(self, parts: ByWeight) -> None:
        """Make layers add an adapter's output to their own."""
        self._added = AddedParts(self._runner.model, parts)

    def exchanged_adapter(self, parts: ByWeight) -> AbstractContextManager[None]:
        """Return a context in which layers add another adapter instead."""
        assert self._added is not None, "`add_adapter` comes first"
        return self._added.exchanged(parts)

    def _use_scratch(self, scratch: torch.Tensor) -> None:
        """Make every layer's KV cache a view of this memory, and free vLLM's own allocation."""
        context = self._engine.vllm_config.compilation_config.static_forward_context
        caches = [*self._runner.kv_caches, *(layer.kv_cache for layer in context.values())]
        for cache in {id(cache): cache for cache in caches}.values():
            items = scratch.view(cache.dtype)
            cache.data = items.as_strided(cache.size(), cache.stride(), cache.storage_offset())

    def add(self, request: Request) -> None:
        extra = None if request.draw is None else {KEY: request.draw}
        params = SamplingParams(
            temperature=0.0,  # `Draws` chooses the token, so vLLM must not sample
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # stop_token_ids has the model's end tokens, if they count
            detokenize=False,
            logprobs=request.num_top,
            prompt_logprobs=request.num_prompt_top if request.scores_prompt else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.tokens))
        if self.salt:
            prompt["cache_salt"] = self.salt
        # Results carry our name, but aborting needs the name that the engine derives from it.
        self._internal[request.name] = self._engine.add_request(request.name, prompt, params)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no sequence."""
        return not self._internal

    def step(self) -> Iterator[Step]:
        """Add a token to each sequence in the batch."""
        for output in self._engine.step():
            completion = output.outputs[0]
            if output.finished:
                del self._internal[output.request_id]
            yield Step(
                output.request_id,
                completion.token_ids,
                _scored(completion.logprobs),
                completion.finish_reason or "",
                # The prompt's first token follows nothing, so it has no log-probability.
                _scored(output.prompt_logprobs, 1) if output.prompt_logprobs else None,
            )

    def abort(self, names: Sequence[str]) -> None:
        """End sequences. Names of ended ones are ignored."""
        inner = [self._internal.pop(name) for name in names if name in self._internal]
        self._engine.abort_request(inner, internal=True)

    def forget_prompts(self) -> None:
        """Drop the KV cache of earlier prompts. Call it only while no sequence is being decoded."""
        assert self._engine.reset_prefix_cache(), "a sequence is being decoded"


def _scored(flat: Any, first: int = 0) -> Scored:
    """Extract log-probabilities from vLLM's flat lists, from position `first` on. At each position,
    the chosen token comes first, then the likeliest ones."""
    spans = [*zip(flat.start_indices, flat.end_indices, strict=True)][first:]
    top = [i for start, end in spans for i in range(start + 1, end)]
    return Scored(
        [flat.logprobs[start] for start, _ in spans],
        [flat.token_ids[i] for i in top],
        [flat.logprobs[i] for i in top],
    )


def plan(settings: Settings, shapes: Shapes) -> Placement:
    """Plan the offsets of a rank's parameters, using a model without memory. torch's process group
    must be the replica's."""
    if settings.config["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unsupported(f"{settings.config['model_type']} is not a causal language model")
    # vLLM caches rotary embeddings by their parameters. Those of this model have no memory, so
    # other parameters keep the engine from reusing them.
    uncached = replace(settings, num_positions=settings.num_positions + 1)
    with engine_args(uncached) as args:
        try:
            config: VllmConfig = args.create_engine_config()
        except ValueError as error:
            raise unsupported(str(error)) from error
    dtype = config.model_config.dtype
    # The worker sets this from its address, but only when it starts.
    set_for_children("VLLM_DIST_IDENT", Path(_address()).name)
    with set_current_vllm_config(config):
        init_worker_distributed_environment(
            config, dist.get_rank(), _address(), 0, current_platform.dist_backend
        )
        with set_default_torch_dtype(dtype), torch.device("meta"):
            model = initialize_model(config)
        return place(model, shapes, dtype)


def _use_stages(runner: Any) -> None:
    """Give the logits to all ranks of a pipeline, because each rank draws the tokens itself.

    vLLM does so if its executor has a certain name, but not for prompts. It also allocates the
    memory that a stage receives into during a warm-up, which is skipped on CPUs.
    """
    runner.broadcast_pp_output = True
    stages = get_pp_group()
    if not stages.is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )
    score_prompts, logits_here = runner._get_prompt_logprobs_dict, runner.model.compute_logits

    def logits_everywhere(hidden_states: Any) -> torch.Tensor:
        local = {"logits": logits_here(hidden_states).contiguous()} if stages.is_last_rank else {}
        received = stages.broadcast_tensor_dict(local, src=stages.world_size - 1)
        logits: torch.Tensor = received["logits"]
        return logits

    def score_prompts_everywhere(*args: Any) -> Any:
        runner.model.compute_logits = logits_everywhere
        try:
            return score_prompts(*args)
        finally:
            runner.model.compute_logits = logits_here

    runner._get_prompt_logprobs_dict = score_prompts_everywhere


@contextmanager
def engine_args(settings: Settings) -> Iterator[EngineArgs]:
    """Yield the arguments of an engine. The directory that they name exists within the block."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings.config["model_type"]]
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory:
        Path(directory, "config.json").write_text(
            json.dumps(
                {
                    **settings.config,
                    "architectures": [architecture],
                    "max_position_embeddings": settings.num_positions,
                }
            )
        )
        yield EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            load_format=LOAD_FORMAT,
            dtype=settings.dtype,
            generation_config="vllm",
            enforce_eager=True,
            tensor_parallel_size=settings.tp,
            pipeline_parallel_size=settings.pp,
            distributed_executor_backend=_RankExecutor,
            max_model_len=settings.num_positions,
            max_num_seqs=MAX_ROWS,
            block_size=_BLOCK_TOKENS,
            kv_cache_memory_bytes=settings.kv_bytes,
            enable_prefix_caching=True,
            async_scheduling=False,
            logits_processors=[Draws],
            max_logprobs=-1,
            disable_log_stats=True,
            seed=0,
        )
