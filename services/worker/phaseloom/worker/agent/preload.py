"""What the fork server imports once, so that a rank starts in a fraction of a second.

Never initialise CUDA here: a forked child could not use it. What is imported may ask whether there
is a GPU: without `QUIET_CHECK` torch would initialise it to answer.
"""

import gc
import importlib
import os

from phaseloom.common.process import lifecycle
from phaseloom.worker.cuda.driver import QUIET_CHECK

os.environ.setdefault(*QUIET_CHECK)

# The fork server watches its agent only after these imports, which take seconds.
lifecycle.die_with_parent()

# Nothing of this is garbage: looking for some takes a fifth of the time.
gc.disable()

for _module in (
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "phaseloom.worker.backends.fsdp",
    "phaseloom.worker.backends.sampler",
    "phaseloom.worker.rank.process",
):
    importlib.import_module(_module)

# Ranks neither scan these objects in their collections nor copy their pages for it.
gc.freeze()
gc.enable()
