"""The scheduler's own code under a virtual clock.

`engine.simulate(jobs, pools, config)` runs a workload to its end and returns a `metrics.Result`.
The engine is a second shell of the scheduler's core, next to the live one. `world` emulates
everything that a shell talks to: nodes (`nodes`), controllers (`controllers`), and faults. The core
does not know the simulator.

Jobs and `Costs` say how much time to charge for switches, the start of workers, moves, seals,
restarts, a controller's own work, and the sync between iterations. The bus, its latency, and
payloads are not emulated.

The same workload, configuration and seed give the same decision log, entry by entry. Only figures
that measure this machine (`Result.decisions`, `step_s`) differ.
"""
