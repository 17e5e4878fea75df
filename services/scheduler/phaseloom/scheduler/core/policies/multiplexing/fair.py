"""What gets most done begins beside what runs, as long as neither job falls behind the other.

Of the ways to share the device, and of leaving the newcomer waiting, it takes the one that gets
most done among those that keep the two jobs' progress level, or bring them nearer: each against
what it would have done alone. A tenth is level. Where it cannot predict, it decides as `greedy`
does.

Source: JigsawRL §5.5 has the aim, that the slower job is protected; the rule is ours.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning import chains
from phaseloom.scheduler.core.policies.multiplexing.greedy import greedy
from phaseloom.scheduler.core.policies.pairing import by_chains

fair = by_chains(chains.fair, greedy, looks_ahead=False)
