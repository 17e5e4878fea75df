"""Entry point of a forked rank, free of torch so that the agent can name it."""

from __future__ import annotations


def rank(config_json: str) -> None:
    from phaseloom.worker.rank import main

    main(config_json)
