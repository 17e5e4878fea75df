"""Generates docs/errors.md, the list of all errors, from the sources.

    python -m tests.support.refusals

writes the page. A test checks that the page is up to date, and that every CallerError has a remedy:
whoever sends a wrong request must learn how to correct it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "errors.md"

CODES = {
    "INVALID_ARGUMENT": ("The request is invalid in any state of the mesh.", "Correct the field."),
    "NOT_FOUND": (
        "The thing that the request names does not exist.",
        "Create it first, or correct the name.",
    ),
    "ALREADY_EXISTS": (
        "The thing that the request would create already exists.",
        "Choose another name.",
    ),
    "FAILED_PRECONDITION": (
        "The request is valid, but the current state of its subject does not allow it.",
        "Bring the subject into the required state first.",
    ),
    "PERMISSION_DENIED": ("The caller may not do this.", "Use the credentials of the owner."),
    "RESOURCE_EXHAUSTED": (
        "A limit is reached, for example of a tenant, a device, or the size of a message.",
        "If the details have `retry_after_s`, wait for that long and send the request again. "
        "Otherwise request less, or have the limit raised.",
    ),
    "ABORTED": (
        "The request was cancelled, or something that it needs is gone: the session, the job, "
        "the incarnation or the weights version.",
        "Attach again, and continue from the state in the response.",
    ),
    "DEADLINE_EXCEEDED": (
        "The request took longer than its timeout.",
        "Set a longer timeout, or try again.",
    ),
    "UNAVAILABLE": ("A service that the request needs does not answer.", "Try again."),
    "DATA_LOSS": (
        "Stored data is lost or damaged.",
        "Continue from the job's last checkpoint. The services' logs name the disk.",
    ),
    "INTERNAL": ("Phaseloom has a bug.", "Report the bug with the service's log."),
}
"""Code → its meaning, and the remedy if the error itself has none."""

AREAS = {
    "services/router": "Operations and sessions (router)",
    "services/scheduler": "Jobs and order (scheduler)",
    "services/worker/phaseloom/worker/backends": "Execution (backends)",
    "services/worker": "Execution (worker)",
    "libs/client": "Controllers (client library)",
    "libs/common": "Messages, names, configuration, connections (all services)",
    "libs/cli": "Running a mesh (command line)",
    "libs/demo": "The demo (demo)",
    "libs/simulator": "Simulation (simulator)",
    "services/profiler": "Profiles (profiler)",
    "services/gateway": "Front doors (gateway)",
    "services/console": "The web page (console)",
    "services/statemgr": "State (state manager)",
}
"""Folder → heading; the first that a file is under. A folder that is not here has its name."""

BETWEEN_OUR_OWN = {
    "libs/common/phaseloom/common/transport/framing.py": "two processes of one node",
    "services/statemgr": "the state manager and its agent, ranks and peers",
    "services/worker/phaseloom/worker/agent/wpgs.py": "the agent and its ranks",
    "services/worker/phaseloom/worker/agent/stateclient.py": "an agent and the state manager",
    "services/worker/phaseloom/worker/state/client.py": "a rank and the state manager",
    "services/worker/phaseloom/worker/state/hostcopies.py": "a rank and the state manager",
    "services/worker/phaseloom/worker/state/link.py": "a rank and the state manager",
}
"""Where a caller is one of our own processes: such a CallerError is a bug of ours, and nobody else
is told of it."""

_ROOTS = {
    "CallerError": "INVALID_ARGUMENT",
    "ResourceError": "UNAVAILABLE",
    "InternalError": "INTERNAL",
    "ErrorInfo": "",
}
"""Class → the code of its instances that name none."""


@dataclass(frozen=True, order=True)
class Refusal:
    area: str
    code: str
    message: str
    field: str
    remedy: str
    source: str
    """File, and where in it."""
    is_callers: bool
    """Raised as a CallerError to somebody who is none of ours."""

    @property
    def has_remedy(self) -> bool:
        return bool(self.remedy)


def refusals(root: Path = ROOT) -> list[Refusal]:
    """All of them, sorted by area, code and message.

    Raises: AssertionError: one is in no area, or has a code that this file does not know.
    """
    files = [f for top in ("libs", "services") for f in sorted((root / top).rglob("*.py"))]
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in files}
    kinds = _kinds(trees)
    found = {refusal for name, tree in trees.items() for refusal in _in_file(name, tree, kinds)}
    unknown = {refusal.code for refusal in found} - CODES.keys()
    assert not unknown, f"no meaning is given for {unknown}"
    return sorted(found)


def _kinds(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Every error class, by name, with its default code."""
    kinds = dict(_ROOTS)
    classes = [n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    while True:
        new = {
            c.name: _default_code(c) or kinds[base.id]
            for c in classes
            for base in c.bases
            if isinstance(base, ast.Name) and base.id in kinds and c.name not in kinds
        }
        if not new:
            return kinds
        kinds |= new


def _default_code(node: ast.ClassDef) -> str:
    for statement in node.body:
        if (
            isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == "default_code"
        ):
            return ast.unparse(statement.value).rpartition(".")[2]
    return ""


def _in_file(name: str, tree: ast.Module, kinds: dict[str, str]) -> Iterator[Refusal]:
    room = name.split("/")[1]
    areas = (heading for folder, heading in AREAS.items() if name.startswith(folder))
    area = next(areas, f"{room.capitalize()} ({room})")
    within: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while within:
        parent, function = within.pop()
        for node in ast.iter_child_nodes(parent):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            within.append((node, node if is_function else function))
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in kinds
            ):
                refusal = _refusal(name, area, function, node, kinds)
                if refusal is not None:
                    yield refusal


def _refusal(
    name: str, area: str, function: ast.AST, call: ast.Call, kinds: dict[str, str]
) -> Refusal | None:
    """None: it passes on another error's text, which is listed where that is made."""
    assert isinstance(call.func, ast.Name)
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    order = ["code", "message", "field", "remedy"] if call.func.id == "ErrorInfo" else ["message"]
    given |= dict(zip(order, call.args, strict=False))
    message = _pattern(given.get("message"))
    if not message.strip("{}….()_abcdefghijklmnopqrstuvwxyz") and " " not in message:
        return None
    code = _pattern(given.get("code")).rpartition(".")[2] or kinds[call.func.id]
    if code.strip("{}") not in CODES:
        return None
    is_ours = any(name.startswith(place) for place in BETWEEN_OUR_OWN)
    where = getattr(function, "name", "")
    return Refusal(
        area=area,
        code=code.strip("{}"),
        message=message,
        field=_pattern(given.get("field")),
        remedy=_pattern(given.get("remedy")),
        source=f"{name}:{where}",
        is_callers=_is_callers(call.func.id, kinds) and not is_ours,
    )


def _is_callers(name: str, kinds: dict[str, str]) -> bool:
    return kinds[name] == "INVALID_ARGUMENT"


def _pattern(node: ast.expr | None) -> str:  # noqa: PLR0911 - one a kind of node
    """A text as it is written, each value in it as `{its expression}`."""
    match node:
        case None:
            return ""
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_pattern(value) for value in values)
        case ast.FormattedValue(value=value):
            return f"{{{_named(value)}}}"
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return _pattern(left) + _pattern(right)
        case ast.Attribute():
            return f"{{{ast.unparse(node)}}}"
        case _:
            return f"{{{_named(node)}}}"


def _named(node: ast.expr) -> str:  # noqa: PLR0911 - one a kind of node
    """What a reader makes of a value: its last name."""
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.Name(id=name):
            return name
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"number of {_named(value)}"
        case ast.Call(func=ast.Attribute(value=value)):
            return _named(value)
        case ast.Call(args=[value, *_]):
            return _named(value)
        case ast.Subscript(value=value):
            return _named(value)
        case _:
            return "…"


def document(found: list[Refusal]) -> str:
    """The page."""
    lines = [
        "# Errors",
        "",
        "All errors have the same fields. They appear in the completion of an operation (`error`), "
        "in the response of an API call (`error`, along with the header "
        "`Nats-Service-Error-Code`), and as the `info` of the client library's exceptions:",
        "",
        "| field | meaning |",
        "| --- | --- |",
        "| `code` | one of the gRPC status codes below |",
        "| `message` | what is wrong, in words |",
        "| `field` | path of the wrong value, such as `args.batch[3].targets`; may be empty |",
        "| `remedy` | how to fix it; if it is empty, see the code in the table below |",
        "| `details` | numbers: `retry_after_s`, `limit`, `used`, `needed_bytes`, … |",
        "",
        "The client library raises the first five codes as `CallerError`, `INTERNAL` as "
        "`InternalError`, and all others as `ResourceError`. Their attribute `retry_after_s` is "
        "the time after which the same request may succeed, if that is known.",
        "",
        "| code | meaning | what to do |",
        "| --- | --- | --- |",
        *(f"| `{code}` | {says} | {remedy} |" for code, (says, remedy) in CODES.items()),
        "",
        "`python -m tests.support.refusals` generates this page from the sources. Names in braces, "
        "such as `{node}`, stand for values in the message.",
    ]
    for heading in dict.fromkeys((*AREAS.values(), *sorted({refusal.area for refusal in found}))):
        rows = {_row(refusal) for refusal in found if refusal.area == heading}
        if rows:
            lines += ["", f"## {heading}", "| code | message | field | what to do |"]
            lines += ["| --- | --- | --- | --- |", *sorted(rows)]
    return "\n".join(lines) + "\n"


def _row(refusal: Refusal) -> str:
    cells = (refusal.message, refusal.field, refusal.remedy)
    message, field, remedy = (text.replace("|", "\\|").replace("\n", " ") for text in cells)
    shown = f"`{field}`" if field else ""
    return f"| `{refusal.code}` | {message} | {shown} | {remedy or 'see the code'} |"


if __name__ == "__main__":
    FILE.write_text(document(refusals()))
