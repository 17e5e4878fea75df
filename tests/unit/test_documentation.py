"""What the documentation names is there: commands, options, targets of make, links, files,
settings."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cyclopts
import pytest

import loadtest.__main__ as benches
from phaseloom.cli.main import application
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.common.process import config

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy", "docs", "examples", "libs", "loadtest", "services", "tests")
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("*.md"),
        *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")),
    )
    if "node_modules" not in page.parts
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
IS_NOT_READ = (
    cyclopts.UnknownOptionError,
    cyclopts.UnknownCommandError,
    cyclopts.UnusedCliTokensError,
)
"""The errors of a command line that has what there is not; a placeholder for a number is none."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """What stands between backquotes in a page's lines."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands(page: Path) -> Iterator[str]:
    """The command lines of a page, in its blocks and in its lines, without what comes before the
    program: variables, `kubectl exec … --`, a directory."""
    blocks = [body for kind, body in BLOCK.findall(page.read_text()) if kind in {"sh", ""}]
    lines = [
        line for body in blocks for line in re.split(r"\n|;|&&|\|", re.sub(r"\\\n", " ", body))
    ]
    for text in (*lines, *spans(page)):
        shown = re.sub(r"[][…]", " ", text.partition("#")[0]).strip(" \\")
        shown = re.sub(r"^.* -- ", "", shown)
        yield re.sub(r"^(?:[A-Z_]+=\S+ +)*(?:\S*/bin/)?", "", shown)


def refused(app: cyclopts.App, tokens: list[str]) -> str:
    """Why a command line is none of the program's; empty: it is one."""
    try:
        app.parse_args(tokens, print_error=False, exit_on_error=False)
    except IS_NOT_READ as error:
        return str(error)
    except cyclopts.CycloptsError:
        pass  # something is left out, or a word stands for a number
    return ""


def refused_program(command: str) -> str | None:
    """Why one of our programs would not take a command line; None: it is another program's."""
    program, *tokens = shlex.split(command)
    if program == "phaseloom":
        return refused(application(), tokens)
    if program.startswith("python") and tokens[:2] == ["-m", "loadtest"]:
        return refused(benches.app, tokens[2:])
    if program.startswith("python") and tokens and tokens[0].startswith("examples/"):
        return _refused_example(*tokens)
    if program == "pytest":
        return _refused_tests(tokens)
    return None


def _refused_example(file: str, *tokens: str) -> str:
    if not (ROOT / file).is_file():
        return f"there is no {file}"
    sources = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    options = [token for token in tokens if token.startswith("--")]
    unknown = [
        option
        for option in options
        if f'"{option}"' not in sources
        and option.removeprefix("--no-").removeprefix("--").replace("-", "_") not in sources
    ]
    return " ".join(unknown)


def _refused_tests(tokens: list[str]) -> str:
    """Why pytest would find nothing: a file or a test that is not there, words of `-k` that no
    test has in its name."""
    targets = [token for token in tokens if token.startswith("tests/")]
    for target in targets:
        file, _, name = target.partition("::")
        if not (ROOT / file).exists() or name not in _source(ROOT / file):
            return f"there is no {target}"
    if "-k" in tokens:
        sources = "".join(_source(ROOT / target) for target in targets or ["tests"])
        for word in re.findall(r"\w+", tokens[tokens.index("-k") + 1]):
            if word not in {"and", "or", "not"} and word not in sources:
                return f"no test has {word}"
    return ""


@cache
def _source(path: Path) -> str:
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return "".join(f"{file.stem}\n{file.read_text()}" for file in files)


@each_page
def test_commands_of_a_page_are_read_by_their_programs(page: Path) -> None:
    wrong = [
        f"{one}: {why}"
        for one in {*commands(page)}
        if _is_ours(one) and (why := refused_program(one))
    ]
    assert wrong == []


def _is_ours(command: str) -> bool:
    return (
        re.match(r"phaseloom [a-z]|python3? (-m loadtest|examples/)|pytest ", command) is not None
    )


def test_every_kind_of_command_is_found() -> None:
    found = {one for page in PAGES for one in commands(page) if _is_ours(one)}
    programs = [one.split()[0] for one in found]
    assert programs.count("phaseloom") > 50
    assert programs.count("pytest") > 4
    assert programs.count("python") > 8


def test_targets_of_make_are_there_and_take_their_arguments() -> None:
    wrong = []
    for command in sorted({one for page in PAGES for one in commands(page)}):
        if not re.match(r"make [a-z.]", command) or re.search(r"SUBJECT|NAME", command):
            continue
        told = subprocess.run(
            ["make", "-n", *shlex.split(command)[1:]],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        if told.returncode:
            wrong.append(f"{command}: {told.stderr}")
        lines = told.stdout.replace("\\\n", " ")
        for line in re.findall(r"^\S*/bin/(.+)$", lines, re.MULTILINE):
            if _is_ours(line) and "pytest" not in line and (why := refused_program(line)):
                wrong.append(f"{command}: {why}")
    assert wrong == []


@each_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.resolve())):
            broken.append(link)
    assert broken == []


@cache
def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    anchors: set[str] = set()
    for line in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return anchors


@each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """By their path from the repository's root or from the page, or by its end: in a service's
    README `core/limits.py` is that service's."""
    home = page.parent if page.parent.parent.name == "services" else ROOT
    every = [*_files(home), *_files(ROOT / "libs")]
    missing = []
    for span in spans(page):
        shown = re.fullmatch(r"((?:[\w.*-]+/)*[\w.-]+\.(?:py|ts|sbatch|yml|toml))(?:::\w+)?", span)
        whole = re.fullmatch(rf"((?:{'|'.join(FOLDERS)})/[\w./*-]+)", span)
        if not (found := shown or whole) or re.search(r"NAME|/X/", span):
            continue
        name = found[1].rstrip("/")
        if not any(f"/{path}".endswith(f"/{name}") for path in every) and not [*ROOT.glob(name)]:
            missing.append(span)
    assert missing == []


@cache
def _files(folder: Path) -> list[str]:
    """The files in a folder, as paths from the root; of the root, those in its folders."""
    folders = [ROOT / name for name in FOLDERS] if folder == ROOT else [folder]
    return [
        str(path.relative_to(ROOT))
        for one in folders
        for path in one.rglob("*")
        if "node_modules" not in path.parts
    ]


@each_page
def test_mesh_files_of_a_page_have_settings_that_there_are(page: Path, tmp_path: Path) -> None:
    for kind, body in BLOCK.findall(page.read_text()):
        if kind == "toml" and "[mesh" in body:
            file = tmp_path / "mesh.toml"
            file.write_text(body)
            config.load(MeshConfig, "mesh", {}, file=file)


@each_page
def test_variables_of_a_page_are_settings(page: Path) -> None:
    variables = {*re.findall(r"\bPHASELOOM_[A-Z_]*[A-Z]\b(?!_)", page.read_text())}
    unknown = {name for name in variables if name not in settings() and name not in _composed()}
    assert unknown == set()


@cache
def settings() -> set[str]:
    """PHASELOOM_<SECTION>_<FIELD> of every struct that `config.load` is called with."""
    trees = [
        ast.parse((ROOT / path).read_text())
        for path in _files(ROOT)
        if path.startswith(("libs/", "services/")) and path.endswith(".py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    structs = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = {"PHASELOOM_CONFIG"}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"load", "config.load"}:
            kind, section, *_ = [*node.args, None, None]
            if isinstance(kind, (ast.Name, ast.Attribute)) and isinstance(section, ast.Constant):
                name = ast.unparse(kind).rpartition(".")[2]
                prefix = f"PHASELOOM_{section.value}_".upper() if section.value else "PHASELOOM_"
                found |= {prefix + field.upper() for field in _fields(structs, name)}
    return found


def _fields(structs: dict[str, ast.ClassDef], name: str) -> Iterator[str]:
    for base in structs[name].bases:
        if isinstance(base, ast.Name) and base.id in structs:
            yield from _fields(structs, base.id)
    for node in structs[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@cache
def _composed() -> str:
    """The compose files, which have variables of their own."""
    return "".join(path.read_text() for path in ROOT.glob("docker-compose*.yml"))


@each_page
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    """A promise that names its proof names one that can be run."""
    missing = []
    for file, name in re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", page.read_text()):
        found = [*(ROOT / "tests").rglob(file)]
        if not found or (name and not any(f"def {name}" in _source(path) for path in found)):
            missing.append(f"{file}::{name}")
    assert missing == []
