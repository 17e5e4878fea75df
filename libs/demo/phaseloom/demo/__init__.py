"""`phaseloom demo`: two GRPO jobs on a mesh of their own, and what they show.

`command` is the subcommand. `controllers` runs the jobs' programs, `report` reads the recorded log
into figures, `verdict` judges them, and `pictures` and `timeline` draw them. `spatial` compares
multiplexing policies on one device. The mesh itself is the command line's (`phaseloom.cli`).
"""
