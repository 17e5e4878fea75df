"""Find phrasing and names in `libs` and `services` that native readers stumble over.

    python -m tests.support.prose                    exit 1 above a limit, and say where
    python -m tests.support.prose --worst 40 libs/cli

A match is a hint: a flagged sentence may read well, and an unflagged one badly. So the limits are
shares: of docstrings and messages that are flagged, and of the names that code binds.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("libs", "services")

_SENTENCE = r"(?:^|[.;:] )"
_AFTER_WHERE = (
    "there it they nothing nobody none this that one no its a an the any all several each he not "
    "some else these those what"
)
_AFTER_WHAT = "is was has had comes came runs ran waits they it needs no must may can"
_AFTER_TO = (
    "be go run do have get take give come leave move stop start hold keep wait forget end make send"
)
_DETERMINERS = "a an the its their all every each one this that whatever what"
_PARTICIPLES = (
    "done looked started killed fetched run taken given made told ended moved copied written sent "
    "deleted added stopped kept freed dropped rebuilt"
)


def _any(words: str) -> str:
    return f"(?:{'|'.join(words.split())})"


PATTERNS = {
    "`where` for `if` or `when`": (
        rf"{_SENTENCE}Where\b|(?<![a-z] )\bwhere {_any(_AFTER_WHERE)}\b"
    ),
    "a pronoun as the subject": (
        rf"{_SENTENCE}(?:What|Who|Whoever|Whatever|Whose|Those|That which|Of)\b"
        rf"|\b(?:whoever|whatever|what {_any(_AFTER_WHAT)})\b"
    ),
    "a dated adverb": (
        r"\b(?:any more|no more|anew|all the same|come to nothing|for good|for ever|of late|"
        r"by turns|beside|thereof|therein|hereby|thereby)\b"
    ),
    "`so long` without a comparison": r"\bso (?:long|many|much|often|far)\b(?! as)",
    "`is to` for `must`": rf"\b(?:is|are|was|were) to {_any(_AFTER_TO)}\b",
    "`have` something done": (
        rf"\b(?:Have|have|has|had) {_any(_DETERMINERS)} [\w' `]{{1,40}}? {_any(_PARTICIPLES)}\b"
    ),
}
_COMPILED = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}
_NAMES = (
    "asked told said found given made known left rest kept drawn held wanted taken lent heard came "
    "took gone having alike each one other others there here own mine beside company whole most "
    "least more some places who what why where news due odd"
)
NAMES = frozenset(_NAMES.split())
"""Names that say nothing of what they hold."""


@dataclass(frozen=True)
class Limits:
    """The greatest shares that pass."""

    texts_percent: float
    names_per_mille: float


TOGETHER = Limits(2.0, 6.0)
DIRECTORY = Limits(4.0, 10.0)


@dataclass
class Tally:
    """Counts of one directory and everything below it."""

    num_texts: int = 0
    num_flagged: int = 0
    num_names: int = 0
    num_listed: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def texts_percent(self) -> float:
        return 100 * self.num_flagged / max(1, self.num_texts)

    @property
    def names_per_mille(self) -> float:
        return 1000 * self.num_listed / max(1, self.num_names)

    def add(self, path: Path, tree: ast.Module) -> None:
        for line, text in texts(tree):
            self.num_texts += 1
            if kinds := flags(text):
                self.num_flagged += 1
                self.places.append(f"{path}:{line}: {', '.join(kinds)}: {_one_line(text)[:110]}")
        for line, name in bound_names(tree):
            self.num_names += 1
            if name in NAMES:
                self.num_listed += 1
                self.places.append(f"{path}:{line}: the name `{name}`")

    def passes(self, limits: Limits) -> bool:
        return (
            self.texts_percent <= limits.texts_percent
            and self.names_per_mille <= limits.names_per_mille
        )


def flags(text: str) -> list[str]:
    """Return the kinds of pattern that a text has."""
    text = _one_line(text)
    return [kind for kind, pattern in _COMPILED.items() if pattern.search(text)]


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, and of each message of an error or an option."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield node.lineno, docstring
            case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                for value in (*args, *(keyword.value for keyword in keywords)):
                    yield from _message(value)
            case ast.keyword(arg="help" | "remedy" | "message", value=value):
                yield from _message(value)


def _message(node: ast.expr) -> Iterator[tuple[int, str]]:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = ""
    for part in parts:
        match part:
            case ast.Constant(value=str(literal)):
                text += literal
            case ast.FormattedValue():
                text += "X"
    if text:
        yield node.lineno, text


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable that is assigned and of each parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) if name not in {"self", "cls"}:
                yield node.lineno, name


def tallies(root: Path, packages: Sequence[str]) -> dict[Path, Tally]:
    """Count every directory that has Python below it; `Path()` stands for all of them together.

    Args:    packages: directories or files, relative to the root.
    Returns: counts by the directory's path, relative to the root.
    """
    counts = {Path(): Tally()}
    for package in packages:
        top = root / package
        for file in [top] if top.is_file() else sorted(top.rglob("*.py")):
            path = file.relative_to(root)
            if "node_modules" in path.parts:
                continue
            tree = ast.parse(file.read_text())
            for directory in path.parents:
                counts.setdefault(directory, Tally()).add(path, tree)
    return counts


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=PACKAGES, help="below the repository's root")
    parser.add_argument("--worst", type=int, default=0, help="also print so many places")
    options = parser.parse_args(arguments)
    counts = tallies(root, options.paths)
    together = counts.pop(Path())
    failed = {
        directory: tally for directory, tally in counts.items() if not tally.passes(DIRECTORY)
    }
    for directory, tally in sorted(failed.items()):
        print(f"{directory}: {_shares(tally)}; at most {_bounds(DIRECTORY)}")
    print(f"together: {_shares(together)}; at most {_bounds(TOGETHER)}")
    print(*together.places[: options.worst], sep="\n", end="\n" if options.worst else "")
    return int(bool(failed) or not together.passes(TOGETHER))


def _shares(tally: Tally) -> str:
    return (
        f"{tally.texts_percent:.1f} % of {tally.num_texts} texts flagged, "
        f"{tally.names_per_mille:.1f} listed names in 1,000"
    )


def _bounds(limits: Limits) -> str:
    return f"{limits.texts_percent:g} % and {limits.names_per_mille:g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
