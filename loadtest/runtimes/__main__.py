"""`python -m loadtest.runtimes SETTINGS FILE`: what is measured in vLLM's own interpreter.

The settings are JSON; the figures are written to the file as JSON, whose directory is used for
what is measured. `python -m loadtest runtimes` runs it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from loadtest.runtimes.measuring import Settings, measure_here

if __name__ == "__main__":
    torch.set_num_threads(1)
    settings, file = msgspec.json.decode(sys.argv[1], type=Settings), Path(sys.argv[2])
    figures = asyncio.run(measure_here(settings, file.parent))
    file.write_bytes(msgspec.json.encode(figures))
