"""The vLLM backend: each rank runs one vLLM worker and its scheduler in its own process.

Importing this package configures vLLM before vLLM itself is imported: no subprocesses, no network,
no usage statistics, and the model runner that `draws` is written for. Everything else uses vLLM's
official extension points: `loader` (a model loader), `draws` (a logits processor) and `engine` (the
only module that knows vLLM's engine). Only these modules import vLLM, in a Python interpreter of
its own (`worker.interpreters`).
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
