"""The durations of operations side by side, as they were seen, against the table of slowdowns.

The *work* of an operation is the time that it would have taken alone on the whole device, by the
table: its duration times the speeds that the table gives it. Where the table is right, the work
does not depend on what ran beside. So work that grows with the part of the time in some company
says by how much the table is wrong there: a linear regression of the logarithms of works on these
parts, in which older operations count less. It needs no operation that was in one company for all
of its time, and what happens to be long, and so is beside more, is not taken to be slowed down.
Where every operation is beside others for the same part of its time, nothing can be learnt.

Only operations of one deployment, of one kind, and of about the same number of tokens are compared:
a job may come to longer batches just when it gets company.
Cost: the inversion of a matrix of at most five rows an operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

ALONE = ""
"""The company of what runs beside nothing."""
TOGETHER = "+"
"""Joins the kinds of sub-stages of a company of several."""
UNKNOWN = "?"
"""Stands for the company of what may not use yet all units that it has: nobody knows how fast it
is."""
ENOUGH = 8.0
"""The number of operations in a company from which on anything is believed of it."""
MEMORY = 64.0
"""The number of operations after which one counts for a third of a new one."""
LEAST_SPREAD = 0.1
"""The least spread of the logarithms of works that is assumed: few operations may be alike by
chance."""
SURE = 3.0
"""The number of standard errors by which operations must be slower than the table says."""
HELD_FOR = 256
"""The number of a deployment's operations for which what was found of a company is held while no
operation has it. Then it is tried again: what made it slow may be gone."""
MOST_SIZES = 16
"""The most records of a deployment; of more, those are dropped that were not needed for longest."""
ENOUGH_ALONE = 2.0
"""The number of operations alone from which on others are compared with them. Older ones count
less, so that it takes one in `MEMORY` / `ENOUGH_ALONE` to have so many."""
_MOST = 10.0
"""The error of what is not known, and the logarithm of the greatest factor."""
_PRIOR = 0.01
"""The part of an operation for which the table counts: it keeps the regression solvable."""

Matrix = list[list[float]]


class Finding(msgspec.Struct):
    """How much slower operations were in one company than the table says."""

    excess: float
    """The logarithm of the factor by which they were slower."""
    error: float
    """The standard error of `excess`."""
    count: float
    """The operations that have shown it; each counts for the part of its time in the company."""
    since: int = 0
    """The number of the deployment's operations since the last one that had the company."""


class Observed(msgspec.Struct):
    """The operations of a deployment of one kind and about one size."""

    kind: str
    stage: str
    """The kind of sub-stage that the table has for them."""
    companies: list[str] = []
    """The companies that they had: the kinds of sub-stages beside, sorted, joined by `TOGETHER`."""
    sums: Matrix = msgspec.field(default_factory=lambda: [[0.0]])
    """The sums of products of the regression's variables: 1, then the part of an operation's time
    in each company."""
    products: list[float] = msgspec.field(default_factory=lambda: [0.0])
    """The sums of the variables times the logarithm of the work, in seconds."""
    squares: float = 0.0
    """The sum of the squares of these logarithms."""
    findings: dict[str, Finding] = {}
    """Company → what was found when an operation had it last."""

    def take(self, work_s: float, beside: dict[str, float]) -> None:
        """Take in an operation.

        Args: beside: the part of its time in each company, 0 to 1.
        """
        had = [company for company, part in beside.items() if part > 0.0 and company != ALONE]
        for company in had:
            if company not in self.companies:
                self._add(company)
        logarithm = math.log(work_s)
        values = [1.0, *(beside.get(company, 0.0) for company in self.companies)]
        kept = 1 - 1 / MEMORY
        for row, value in zip(self.sums, values, strict=True):
            row[:] = [kept * old + value * other for old, other in zip(row, values, strict=True)]
        self.products = [
            kept * old + value * logarithm for old, value in zip(self.products, values, strict=True)
        ]
        self.squares = kept * self.squares + logarithm**2
        for company in had:
            if company == UNKNOWN:
                continue
            count = self.sums[0][self.companies.index(company) + 1]
            if count >= ENOUGH:
                excess, error = self._find(company)
                error = error if self.alone >= ENOUGH_ALONE else _MOST
                self.findings[company] = Finding(excess, error, count)

    def _add(self, company: str) -> None:
        self.companies.append(company)
        for row in self.sums:
            row.append(0.0)
        self.sums.append([0.0] * (len(self.companies) + 1))
        self.products.append(0.0)

    @property
    def count(self) -> float:
        """The number of operations; older ones count less."""
        return self.sums[0][0]

    @property
    def alone(self) -> float:
        """The part of them that ran beside nothing."""
        return self.count - sum(self.sums[0][1:])

    def age(self) -> None:
        """Note that an operation of the deployment has ended; forget what was found too long ago,
        so that the company is tried again."""
        for company in [*self.findings]:
            finding = self.findings[company]
            finding.since += 1
            if finding.since > HELD_FOR:
                del self.findings[company]

    def _find(self, company: str) -> tuple[float, float]:
        """The logarithm of the factor by which operations are slower in a company than the table
        says, and its standard error."""
        place = self.companies.index(company) + 1
        inverse = _inverse(
            [
                [each + _PRIOR * (i == j > 0) for j, each in enumerate(row)]
                for i, row in enumerate(self.sums)
            ]
        )
        found = [_dot(row, self.products) for row in inverse]
        left = self.squares - 2 * _dot(found, self.products)
        left += _dot(found, [_dot(row, found) for row in self.sums])
        freedom = max(1.0, self.sums[0][0] - len(found))
        variance = max(left / freedom, LEAST_SPREAD**2)
        return found[place], math.sqrt(variance * inverse[place][place])


def surely(findings: Sequence[Finding]) -> float:
    """The factor by which operations are surely slower than the table says; 1: they may be as it
    says.

    Args: findings: of several kinds and deployments, in the same company; at least one.
    """
    excess, error = _all(findings)
    return math.exp(max(0.0, excess - SURE * error))


def perhaps(findings: Sequence[Finding]) -> float:
    """The factor by which operations may be slower than the table says: more would be seen."""
    excess, error = _all(findings)
    return math.exp(min(max(0.0, excess + SURE * error), _MOST))


def _all(findings: Sequence[Finding]) -> tuple[float, float]:
    """The mean excess and its error; each finding counts by how certain it is."""
    certainty = sum(finding.error**-2 for finding in findings)
    excess = sum(finding.excess * finding.error**-2 for finding in findings) / certainty
    return excess, certainty**-0.5


def _dot(first: list[float], second: list[float]) -> float:
    return sum(one * other for one, other in zip(first, second, strict=True))


def _inverse(matrix: Matrix) -> Matrix:
    """The inverse of a symmetric positive definite matrix, which needs no pivoting."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i, row in enumerate(rows):
        row[:] = [each / row[i] for each in row]
        for j, other in enumerate(rows):
            if i != j:
                factor = other[i]
                other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
    return [row[size:] for row in rows]


def name_of(kind: str, num_tokens: int) -> str:
    """The name of the record for operations of a kind with about so many tokens: by powers of
    two."""
    return f"{kind} {num_tokens.bit_length()}"
