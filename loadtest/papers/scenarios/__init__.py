"""The scenarios of `python -m loadtest simulate`. Each module has a `SCENARIO` and a line here."""

from __future__ import annotations

from loadtest.papers.scenarios import (
    jigsaw,
    llmd_replay,
    order_mixes,
    order_optimum,
    philly,
    plexrl_fig7b,
    plexrl_fig8,
    plexrl_hrrs,
    plexrl_relaxation,
    weave_company,
    weave_drift,
    weave_failure,
    weave_fig14,
    weave_fig15,
    weave_jitter,
    weave_micro,
    weave_punctual,
    weave_rivals,
    weave_space,
    weave_table5,
    weave_tails,
    wrong_table,
)
from loadtest.papers.scenarios.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    "plexrl-fig7b": plexrl_fig7b.SCENARIO,
    "plexrl-fig8": plexrl_fig8.SCENARIO,
    "plexrl-hrrs": plexrl_hrrs.SCENARIO,
    "plexrl-relaxation": plexrl_relaxation.SCENARIO,
    "weave-fig14": weave_fig14.SCENARIO,
    "weave-fig15": weave_fig15.SCENARIO,
    "weave-rivals": weave_rivals.SCENARIO,
    "weave-table5": weave_table5.SCENARIO,
    "weave-drift": weave_drift.SCENARIO,
    "weave-jitter": weave_jitter.SCENARIO,
    "weave-punctual": weave_punctual.SCENARIO,
    "weave-failure": weave_failure.SCENARIO,
    "weave-micro": weave_micro.SCENARIO,
    "weave-tails": weave_tails.SCENARIO,
    "weave-space": weave_space.SCENARIO,
    "weave-company": weave_company.SCENARIO,
    "wrong-table": wrong_table.SCENARIO,
    "philly": philly.SCENARIO,
    "llmd-replay": llmd_replay.SCENARIO,
    "order-mixes": order_mixes.SCENARIO,
    "order-optimum": order_optimum.SCENARIO,
    **jigsaw.SCENARIOS,
}

__all__ = ["SCENARIOS", "Scenario"]
