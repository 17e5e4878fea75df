"""What the fork server imports once, so that a rank starts in a fraction of a second.

Never initialise CUDA here: a forked child could not use it.
"""

import importlib

for _module in (
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "phaseloom.worker.backends.fsdp",
    "phaseloom.worker.backends.sampler",
    "phaseloom.worker.rank",
):
    importlib.import_module(_module)
