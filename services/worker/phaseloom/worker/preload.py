"""What the fork server imports once, so that a rank starts in a fraction of a second.

Never initialise CUDA here: a forked child could not use it.
"""

import torch.distributed.fsdp
import transformers.models.qwen3.modeling_qwen3

import phaseloom.worker.backends.fsdp
import phaseloom.worker.backends.sampler
import phaseloom.worker.rank  # noqa: F401
