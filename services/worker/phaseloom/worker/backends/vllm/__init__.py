"""The vLLM backend: one rank is one vLLM worker with its scheduler, in the rank's own process.

Importing this package sets vLLM up for that, before vLLM is imported: no process of its own, no
network, no statistics, the model runner whose logits processors `draws` is written for. The rest is
official seams: `loader` (a model loader), `draws` (a logits processor), `engine` (the only module
that knows vLLM's engine). vLLM is imported by these modules only, and runs in an interpreter of its
own (`worker.interpreters`).
"""

from typing import Final

from phaseloom.common.process import config

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}

for _name, _value in _ENVIRONMENT.items():
    config.set_for_children(_name, _value)
