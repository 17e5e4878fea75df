"""The committed page: it is of the sources beside it, small, fetches nothing, and holds a run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.recorder import Recorded
from phaseloom.cli.replay import make_replay
from phaseloom.common.contract.errors import CallerError
from phaseloom.console import page
from phaseloom.console.core.wire import Replay
from tests.support.runlog import shared

ROOT = Path(__file__).parents[3]
WEB = ROOT / "services" / "console" / "web"
MOST_SCRIPT_BYTES = 300_000
SOURCES = ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js")


def test_page_is_built_from_the_sources_that_are_there() -> None:
    """If this fails: `make console`, and commit what it has changed."""
    names = [*SOURCES, *(f"src/{file.name}" for file in (WEB / "src").iterdir())]
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    palette = files("phaseloom.common.observability") / "palette.json"
    found.update(palette.read_bytes())
    assert page.asset("sources.sha256").decode().strip() == found.hexdigest()


def test_script_is_small() -> None:
    assert len(page.compressed(page.SCRIPT)) <= MOST_SCRIPT_BYTES


def test_licences_of_the_packages_in_the_script_are_delivered() -> None:
    text = page.asset("LICENSES.txt").decode()
    for name in json.loads((WEB / "package.json").read_text())["dependencies"]:
        assert f"{name}\n\nThe MIT License" in text


@pytest.mark.parametrize("name", page.TYPES)
def test_page_fetches_nothing_from_elsewhere(name: str) -> None:
    text = page.asset(name).decode()
    urls = set(re.findall(r"https?://[\w./-]+", text))
    assert {url for url in urls if "www.w3.org" not in url} == set(), "names of XML's are no places"


def test_lock_file_names_no_place_that_packages_come_from() -> None:
    """Whoever builds the page gets the packages from the registry that is configured there."""
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    assert packages
    assert not [name for name, package in packages.items() if "resolved" in package]
    unpinned = [name for name, package in packages.items() if name and "integrity" not in package]
    assert not unpinned


def test_replay_is_one_file_with_the_whole_run_in_it(tmp_path: Path) -> None:
    run = shared().recorded()
    make_replay("a run", run, tmp_path / "replay.html")
    text = (tmp_path / "replay.html").read_text()
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "stylesheet" not in text.partition("<script")[0]
    found = re.search(r'<script type="text/plain" id="replay">([^<]*)</script>', text)
    assert found
    replay = msgspec.json.decode(gzip.decompress(base64.b64decode(found[1])), type=Replay)
    assert replay.title == "a run"
    ended = [one for one in run if type(one.event).__name__ == "OperationFinished"]
    assert len(replay.update.operations) == len(ended)
    assert text.count("</script>") == 2, "the script's own words end no script"


def test_replay_of_nothing_is_refused(tmp_path: Path) -> None:
    nothing: list[Recorded] = []
    with pytest.raises(CallerError, match="has no events to show"):
        make_replay("a run", nothing, tmp_path / "replay.html")
