"""The pure core of the scheduler: `core.Core.step` is its only door.

Packages stand in layers, lowest first: `state`; `operations`, `devices`, `planning`; `durability`,
`policies`; `wpgs`; `dispatch`, `placement`; `jobs`; `core` and `validate`. Nothing imports upwards.
"""
