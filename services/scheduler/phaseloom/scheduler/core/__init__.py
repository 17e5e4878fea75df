"""The pure core of the scheduler: `core.Core.step` is its only entry point.

Packages stand in layers, lowest first: `state`; `operations`, `devices`, `planning`; `durability`,
`policies`; `wpgs`; `dispatch`, `placement`; `jobs`; `core` and `validate`. Nothing imports upwards.

The state of a step is the tree of `state.tree` alone. Four caches are kept outside it, and
snapshots do not include them: the text forms of a deployment's key (`state.deployment`), the
iteration times and periods of jobs that share nodes (`planning.weave.fifo`,
`planning.weave.period`), and the seconds in which a cycle keeps nodes busy (`planning.timeline`).
"""
