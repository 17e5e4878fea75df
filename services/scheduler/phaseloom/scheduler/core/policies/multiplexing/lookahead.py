"""What leads to the least expected end begins: beside what runs, or after it.

It tries all choices of the next three decisions of the two jobs, on the durations that the profiler
has measured and a table of slowdowns. So it may leave a pair that gains now for one that gains more
later. Where it cannot predict, or knows no more of a job than the operation at hand, it decides as
`greedy` does.

Source: JigsawRL §4.4. Deviations: nothing that runs is stopped; the cost beyond the window, which
the paper leaves open, is the longer rest and a part of the shorter one.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning import chains
from phaseloom.scheduler.core.policies.multiplexing.greedy import greedy
from phaseloom.scheduler.core.policies.pairing import by_chains

lookahead = by_chains(chains.lookahead, greedy, looks_ahead=True)
