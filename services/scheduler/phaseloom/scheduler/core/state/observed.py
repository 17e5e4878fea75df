"""Observed durations of operations that ran side by side, compared with the table of slowdowns.

The *work* of an operation is the time that it would have taken alone on the whole device according
to the table: its duration times the speeds in the table. If the table is right, the work does not
depend on the neighbours. If work grows with the fraction of time next to certain neighbours, the
growth shows how wrong the table is for them.

The estimate is a linear regression of the logarithm of the work on these fractions, with decreasing
weights for older operations. No operation needs to have the same neighbours all the time. And an
operation that has more neighbours only because it is long does not count as slowed down. If every
operation has neighbours for the same fraction of its time, nothing can be learned.

Only operations of one deployment and kind with about the same number of tokens are compared,
because a job's batches may become longer at the time when it gets neighbours.
Cost: inverting a matrix of at most five rows per operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

ALONE = ""
"""Key of operations without neighbours."""
TOGETHER = "+"
"""Separator of the sub-stages of several neighbours."""
UNKNOWN = "?"
"""Key of the time in which a deployment may not use all of its units yet, so that its speed is
unknown."""
MIN_OPERATIONS = 8.0
"""Minimum number of operations next to certain neighbours before a result is trusted."""
MEMORY = 64.0
"""Number of operations after which an old one has a third of the weight of a new one."""
MIN_SPREAD = 0.1
"""Assumed minimum standard deviation of the logarithm of the work: a few operations may be similar
by chance."""
CERTAINTY_ERRORS = 3.0
"""Number of standard errors by which operations must exceed the table."""
FINDING_LIFETIME = 256
"""A finding expires after this many operations of the deployment without these neighbours. They are
then tried again, because the cause of the slowdown may be gone."""
MAX_SIZES = 16
"""Maximum number of records per deployment. Beyond that, the least recently needed ones are
dropped."""
MIN_ALONE = 2.0
"""Minimum number of operations without neighbours before others are compared with them. Older ones
count less, so one in `MEMORY` / `MIN_ALONE` suffices."""
_MAX_LOGARITHM = 10.0
"""Error of an unknown value, and the logarithm of the largest factor."""
_PRIOR = 0.01
"""Weight of the table, in operations. Keeps the regression solvable."""

Matrix = list[list[float]]


class Finding(msgspec.Struct):
    """How much slower operations were next to certain neighbours than the table says."""

    excess: float
    """Logarithm of the slowdown factor relative to the table."""
    error: float
    count: float
    """Number of operations behind it, each weighted by its fraction of time next to these
    neighbours."""
    since: int = 0
    """Number of the deployment's operations since the last one with these neighbours."""


class Observed(msgspec.Struct):
    """Operations of one deployment, kind and approximate size."""

    kind: str
    stage: str
    """Kind of their sub-stage in the table."""
    combinations: list[str] = []
    """Combinations of neighbours that occurred: their sub-stages, sorted and joined by
    `TOGETHER`."""
    sums: Matrix = msgspec.field(default_factory=lambda: [[0.0]])
    """Sums of products of the regression's variables. The first variable is 1, the others are the
    fractions of an operation's time next to each combination of neighbours."""
    products: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """Sums of the variables times the logarithm of the work in seconds."""
    squares: float = 0.0
    """Sum of the squares of these logarithms."""
    findings: dict[str, Finding] = {}
    """Combination of neighbours → finding at the last operation with them."""

    def record(self, work_s: float, fractions: dict[str, float]) -> None:
        """Add an operation.

        Args: fractions: combination of neighbours → fraction of the operation's time next to them,
            0 to 1.
        """
        present = [
            combination
            for combination, fraction in fractions.items()
            if fraction > 0.0 and combination != ALONE
        ]
        for combination in present:
            if combination not in self.combinations:
                self._add_variable(combination)
        logarithm = math.log(work_s)
        values = [1.0, *(fractions.get(combination, 0.0) for combination in self.combinations)]
        decay = 1 - 1 / MEMORY
        for row, value in zip(self.sums, values, strict=True):
            row[:] = [decay * old + value * other for old, other in zip(row, values, strict=True)]
        self.products = [
            decay * old + value * logarithm
            for old, value in zip(self.products, values, strict=True)
        ]
        self.squares = decay * self.squares + logarithm**2
        for combination in present:
            if combination == UNKNOWN:
                continue
            count = self.sums[0][self.combinations.index(combination) + 1]
            if count >= MIN_OPERATIONS:
                excess, error = self._estimate(combination)
                error = error if self.num_alone >= MIN_ALONE else _MAX_LOGARITHM
                self.findings[combination] = Finding(excess, error, count)

    def _add_variable(self, combination: str) -> None:
        self.combinations.append(combination)
        for row in self.sums:
            row.append(0.0)
        self.sums.append([0.0] * (len(self.combinations) + 1))
        self.products.append(0.0)

    @property
    def count(self) -> float:
        """Weighted number of operations; older ones count less."""
        return self.sums[0][0]

    @property
    def num_alone(self) -> float:
        """Weighted number of operations without neighbours."""
        return self.count - sum(self.sums[0][1:])

    def age(self) -> None:
        """Record that an operation of the deployment has ended, and drop expired findings."""
        for combination in [*self.findings]:
            finding = self.findings[combination]
            finding.since += 1
            if finding.since > FINDING_LIFETIME:
                del self.findings[combination]

    def _estimate(self, combination: str) -> tuple[float, float]:
        """Logarithm of the slowdown relative to the table next to these neighbours, and its
        standard error."""
        index = self.combinations.index(combination) + 1
        inverse = _inverse(
            [
                [value + _PRIOR * (i == j > 0) for j, value in enumerate(row)]
                for i, row in enumerate(self.sums)
            ]
        )
        coefficients = [_dot(row, self.products) for row in inverse]
        residual = self.squares - 2 * _dot(coefficients, self.products)
        residual += _dot(coefficients, [_dot(row, coefficients) for row in self.sums])
        freedom = max(1.0, self.sums[0][0] - len(coefficients))
        variance = max(residual / freedom, MIN_SPREAD**2)
        return coefficients[index], math.sqrt(variance * inverse[index][index])


def certain_slowdown(findings: Sequence[Finding]) -> float:
    """Factor by which operations are certainly slower than the table says. 1: the table may be
    right.

    Args: findings: of different kinds and deployments with the same neighbours; at least one.
    """
    excess, error = _combined(findings)
    return math.exp(max(0.0, excess - CERTAINTY_ERRORS * error))


def possible_slowdown(findings: Sequence[Finding]) -> float:
    """Upper bound of the factor by which operations may be slower than the table says."""
    excess, error = _combined(findings)
    return math.exp(min(max(0.0, excess + CERTAINTY_ERRORS * error), _MAX_LOGARITHM))


def _combined(findings: Sequence[Finding]) -> tuple[float, float]:
    """Mean excess and its error, with findings weighted by their certainty."""
    certainty = sum(finding.error**-2 for finding in findings)
    excess = sum(finding.excess * finding.error**-2 for finding in findings) / certainty
    return excess, certainty**-0.5


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _inverse(matrix: Matrix) -> Matrix:
    """Invert a symmetric positive definite matrix, which needs no pivoting."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i, row in enumerate(rows):
        row[:] = [value / row[i] for value in row]
        for j, target in enumerate(rows):
            if i != j:
                factor = target[i]
                target[:] = [a - factor * b for a, b in zip(target, row, strict=True)]
    return [row[size:] for row in rows]


def name_of(kind: str, num_tokens: int) -> str:
    """Name of the record for operations of a kind and size. Sizes are rounded to powers of two."""
    return f"{kind} {num_tokens.bit_length()}"
