"""Imports of the fork server, made once so that a rank starts in a fraction of a second.

Nothing here may initialise CUDA: a forked child could not use it then. Imported code may ask
whether there is a GPU, which initialises CUDA in torch unless `QUIET_CHECK` is set.
"""

import gc
import importlib
import os

from phaseloom.common.process import lifecycle
from phaseloom.worker.cuda.driver import QUIET_CHECK

os.environ.setdefault(*QUIET_CHECK)

# Before the imports, which take seconds: the fork server watches its agent only after them.
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
