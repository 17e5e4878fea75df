"""Two jobs that share one worker in space: the gain that is possible (JigsawRL §4).

`rerun` predicts how long a recorded run of a mesh would have taken under another policy. The rest
is a study without a mesh. A job's iterations are cut into sub-stages by the rule that live meshes
go by, drawn after published shares of time (`pipelines`). A table says how much slower a sub-stage
is with part of a device and beside another (`SlowdownTable`). `chains` runs two jobs side by side
under a policy, `optimum` finds the least time that any schedule needs, and `merging` says when long
tails of several workers are better gathered.

Everything here is pure. The scenarios `jigsaw-*` call the study, and `phaseloom demo --spatial`
calls `rerun`. Neither plans a live device.
"""
