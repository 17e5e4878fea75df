"""Two jobs that share one worker in space: the gain that is possible (JigsawRL §4).

This is a study without a mesh. `pipelines` cuts a job's iterations into sub-stages by the rule of
live meshes, with published shares of time. A table has the slowdown of each sub-stage on a part of
a device and next to another sub-stage (`SlowdownTable`). `chains` runs two jobs side by side under
a policy, `optimum` finds the shortest time of any schedule, and `merging` decides when to gather
the long tails of several workers.

Everything here is pure. The scenarios `jigsaw-*` call it. It plans no live device.
"""
