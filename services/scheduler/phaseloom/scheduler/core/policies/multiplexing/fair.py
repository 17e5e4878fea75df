"""Maximize throughput while neither of two jobs falls behind the other.

The policy compares all options: make the newcomer wait, or run it side by side with one of the
possible splits of the device. It considers those that keep the two jobs' progress level or bring it
closer together, and takes the one with the highest throughput. Progress is measured against running
alone; a difference of up to a tenth counts as level. Without predictions it decides like `greedy`.

Source: JigsawRL §5.5 has the aim of protecting the slower job. The rule is ours.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning import chains
from phaseloom.scheduler.core.policies.multiplexing.greedy import greedy
from phaseloom.scheduler.core.policies.pairing import by_chains

fair = by_chains(chains.fair, greedy, looks_ahead=False)
