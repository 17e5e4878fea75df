"""The capabilities that a node declares for each backend. Reading them imports no runtime.

A job is refused at submission if no node of a pool has the capabilities that it needs. Sizes that
do not fit an architecture or a layout are only found when the model is built.
"""

from __future__ import annotations

from typing import Final

from phaseloom.common.contract.kinds import MUTATING_KINDS, READING_KINDS
from phaseloom.common.contract.specs import Capabilities, DeploymentSpec, Layout

MODEL_TYPES: Final = (
    "arcee",
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "helium",
    "llama",
    "ministral",
    "mistral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Values of `model_type` that our own code trains and samples."""

DTYPES: Final = ("float32", "bfloat16")

_STATE: Final = ("delete_checkpoint", "load_state", "save_state", "sync_weights")
_TRAINS: Final = ("forward", "forward_backward", "optim_step", "publish_weights", *_STATE)
_SAMPLES: Final = ("forward", "generate", *_STATE)

_IN_VLLM: Final = (
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "nemotron",
    "qwen2",
    "qwen3",
    "stablelm",
)
"""Model types that vLLM implements itself and whose weights it keeps in the form of the files."""

CAPABILITIES: Final = {
    "fsdp": Capabilities(
        _TRAINS, model_types=MODEL_TYPES, dtypes=DTYPES, adapters=True, divides=True
    ),
    "sampler": Capabilities(
        _SAMPLES,
        model_types=MODEL_TYPES,
        dtypes=DTYPES,
        joins=True,
        prefix_cache=True,
        adapters=True,
        divides=True,
        most_units=1,  # more would hardly speed it up, see `SamplerBackend.use_threads`
    ),
    "megatron": Capabilities(
        _TRAINS,
        axes=("dp", "tp", "pp", "cp", "ep"),
        model_types=("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
        dtypes=DTYPES,
        adapters=True,
    ),
    "vllm": Capabilities(
        _SAMPLES,
        axes=("dp", "tp", "pp"),
        model_types=_IN_VLLM,
        dtypes=DTYPES,
        joins=True,
        prefix_cache=True,
        adapters=True,
    ),
    "noop": Capabilities(
        tuple(sorted(MUTATING_KINDS | READING_KINDS)),
        axes=Layout.__struct_fields__,
        joins=True,
        divides=True,
    ),
}
"""Capabilities by backend, with the names of `BACKENDS`."""


def kinds_of(spec: DeploymentSpec) -> frozenset[str]:
    """Return the kinds that a deployment runs: its backend's, without training unless it is
    trainable."""
    left_out = () if spec.trainable else ("forward_backward", "optim_step")
    return frozenset(CAPABILITIES[spec.backend].kinds) - {*left_out}
