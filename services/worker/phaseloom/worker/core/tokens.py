"""How much an operation worked on, for throughput figures."""

from __future__ import annotations

from phaseloom.common.contract.arrays import length
from phaseloom.common.contract.operations import (
    Args,
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    Result,
)


def num_tokens(args: Args, result: Result | None) -> int:
    """Tokens of an operation: prompts and new tokens of a `generate`, those of the batch else. 0
    for operations without any."""
    match args, result:
        case Generate(), GenerateResult():
            new = sum(length(s.tokens) for group in result.sequences for s in group)
            return new + sum(length(prompt.tokens) for prompt in args.prompts)
        case ((Forward() | ForwardBackward()), _):
            return sum(length(datum.tokens) for datum in args.batch)
        case _:
            return 0
