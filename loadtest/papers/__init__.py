"""Figures of PlexRL, WEAVE and JigsawRL, reproduced by the scheduler's own code in the simulator.

`scenarios` has one module for each figure; `python -m loadtest simulate NAME` runs one.
`workloads` makes the papers' jobs. `spatial` studies two jobs on one device. `optimum` and `bounds`
compute costs and times that no schedule can beat.
"""
