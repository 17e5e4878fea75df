"""The scheduler's own code under a virtual clock.

`engine.simulate(jobs, pools, config)` runs a workload to its end and answers with a
`metrics.Result`. `engine` is a second shell of the scheduler's core, beside the live one; `world`
is what both talk to when nodes (`nodes`), controllers (`controllers`) and what goes wrong
(`faults`) are emulated. Nothing in the core knows of it.

Charged are, where a job or `Costs` says so: loading and offloading at each switch, the start of
workers, moves, seals, restarts, a controller's own time, and the sync between iterations. Not
emulated are the bus and its latency, and payloads.

The same workload, configuration and seed give the same result, entry by entry of the decision log;
only what is measured of this machine (`Result.decisions`, `step_s`) differs.
"""
