"""`make bench-runtimes`: each runtime under our adapter beside the same work without it.

`training` compares a step of the backend `fsdp` with plain torch, `switching` the switches of a
runtime's ranks with plain copies, `syncing` a weight sync from `fsdp` to `vllm` with plain copies,
and `decoding` the tokens a second of the backend `vllm` with vLLM alone. What needs vLLM in this
very process runs in its interpreter, as a program of its own: `__main__`. All sides of a comparison
take turns in changing order. A figure is the median over rounds, a ratio the median of the rounds'
ratios.
"""

from loadtest.runtimes.measuring import Settings, measure

__all__ = ["Settings", "measure"]
