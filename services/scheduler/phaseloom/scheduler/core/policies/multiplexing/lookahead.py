"""Choose by the earliest expected end of both jobs: start the next operation side by side, or
after.

Tries all options of the two jobs' next three decisions, using the durations measured by the
profiler and a table of slowdowns. It may therefore forgo a gain now for a larger one later. Without
predictions, or if only a job's current operation is known, it decides like `greedy`.

Source: JigsawRL §4.4. Deviations: running operations are never stopped. The paper does not define
    the cost beyond the window; here it is the longer job's remaining time plus a fraction of the
    shorter one's.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning import chains
from phaseloom.scheduler.core.policies.multiplexing.greedy import greedy
from phaseloom.scheduler.core.policies.pairing import by_chains

lookahead = by_chains(chains.lookahead, greedy, looks_ahead=True)
