"""The Megatron backend: trains models over ranks of every kind of parallelism.

Megatron-core gives the layers, their collectives and the pipeline's schedule. Ours are the memory
(`slices`: every parameter is a view of the heap), the attention and the pass through a stage
(`stage`), the sums over ranks (`gradients`) and the optimizer. `devices` is the one module that
knows that Megatron expects GPUs. Megatron is imported by the modules of this package only, and runs
in an interpreter of its own (`worker.agent.interpreters`).
"""
