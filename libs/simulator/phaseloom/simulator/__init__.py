"""The scheduler's own code under a virtual clock.

`engine.simulate(jobs, pools, config)` runs a workload to its end and returns a `metrics.Result`.
`engine` is a second shell of the scheduler's core, beside the live one. `world` emulates everything
that a shell talks to: nodes (`nodes`), controllers (`controllers`), and faults. Nothing in the core
knows of the simulator.

Where a job or `Costs` says so, time is charged for loading and offloading at each switch, the start
of workers, moves, seals, restarts, a controller's own work, and the sync between iterations. The
bus and its latency are not emulated, and neither are payloads.

The same workload, configuration and seed give the same result, entry by entry of the decision log.
Only the figures that measure this machine (`Result.decisions`, `step_s`) differ.
"""
