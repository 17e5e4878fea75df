"""The Megatron backend: trains models with every kind of parallelism.

Megatron-core provides the layers, their collectives and the pipeline schedule. Our part is the
memory (`slices`: every parameter is a view of the heap), attention and the pass through a stage
(`stage`), reduction over ranks (`gradients`), and the optimizer. Only `devices` deals with
Megatron's assumption of GPUs. Only this package imports Megatron, in a Python interpreter of its
own (`worker.agent.interpreters`).
"""
