"""The process of a rank: what it has malloc keep."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, threading
from phaseloom.worker.rank.process import keep_freed_memory

def one_pass():
    tensors = [bytearray(8 * 2**20) for _ in range(6)]

def count():
    for _ in range(3):
        one_pass()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    one_pass()
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

if sys.argv[1] == "keeps":
    keep_freed_memory()
device = threading.Thread(target=count)
device.start()
device.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not glibc's")
def test_a_pass_gets_the_memory_that_the_last_one_has_freed() -> None:
    """48 MiB in a device thread: 12,288 page faults a pass, where malloc gives them back."""
    assert _page_faults("by itself") > 1000
    assert _page_faults("keeps") < 100


def _page_faults(malloc: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, malloc], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
