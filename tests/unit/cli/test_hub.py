"""Models of the command line: directories, the Hub's cache, and downloads from a local Hub."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phaseloom.cli import hub as hub_module
from phaseloom.cli.hub import find_models
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import config
from tests.support.hubserver import COMMIT, Hub, serving_hub, tag_of
from tests.support.pretrained import save_model

PROGRAM = """
import sys, msgspec
from phaseloom.cli.hub import find_models
from phaseloom.common.contract.errors import PhaseloomError
try:
    found = find_models(sys.argv[1:], report=lambda line: print(line, file=sys.stderr))
    print(msgspec.json.encode({"found": found}).decode())
except PhaseloomError as error:
    print(msgspec.json.encode({"error": error.info}).decode())
"""
NAME = "Org/Tiny-1.5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("hub") / "tiny", torch.float32)
    (directory / "pytorch_model.bin").write_bytes(b"not read")
    return directory


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serving_hub(Hub({NAME: model}, gated="Org/gated")) as running:
        yield running


def environment(hub_url: str, home: Path, **more: str) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}
    return {**config.inherited(), "PATH": os.environ["PATH"], **own}


def run(hub_url: str, home: Path, *models: str, **more: str) -> dict[str, Any]:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models],
        env=environment(hub_url, home, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    answer: dict[str, Any] = msgspec.json.decode(completed.stdout.splitlines()[-1])
    return {**answer, "progress": completed.stderr}


def test_model_is_downloaded_once_and_then_found_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = run(hub.url, tmp_path, NAME)
    directory = Path(first["found"][NAME])
    assert directory == tmp_path / "hub" / "models--Org--Tiny-1.5" / "snapshots" / COMMIT
    names = {file.name for file in directory.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert any(name.endswith(".safetensors") for name in names)
    assert "pytorch_model.bin" not in names, "weights that nobody reads"
    assert "downloading" in first["progress"]
    assert "Fetching" in first["progress"]

    hub.requests.clear()
    again = run(hub.url, tmp_path, NAME, f"{NAME}:{COMMIT}")
    assert again["found"] == {NAME: str(directory), f"{NAME}:{COMMIT}": str(directory)}
    assert hub.requests == []


def test_interrupted_download_is_resumed(hub: Hub, model: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(model, large)
    # More than the 10 MiB that the client collects before it writes them.
    content = bytes(12 * 2**20) + bytes(range(256)) * (12 * 2**12)
    (large / "tokenizer.model").write_bytes(content)
    hub.models[NAME], hub.stalls = large, "tokenizer.model"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, NAME],
        env=environment(hub.url, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as killed:
        assert hub.is_stalling.wait(60)
        blobs = tmp_path / "hub" / "models--Org--Tiny-1.5" / "blobs"
        while sum(file.stat().st_size for file in blobs.glob(f"{tag_of(content)}*")) < 2**20:
            assert killed.poll() is None
        killed.kill()
    hub.goes_on.set()
    hub.requests.clear()
    offline = run(hub.url, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert offline["error"]["code"] == "UNAVAILABLE", "a part of a model is not used"

    resumed = run(hub.url, tmp_path, NAME)
    assert ("tokenizer.model", f"bytes={10 * 2**20}-") in [
        (name, span[: span.index("-") + 1]) for name, span in hub.downloaded() if span
    ]
    assert (Path(resumed["found"][NAME]) / "tokenizer.model").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("Org/none", "NOT_FOUND", ("is not a model of", "spelling", "HF_TOKEN")),
        ("Org/gated", "PERMISSION_DENIED", ("is gated", "accept its terms", "HF_TOKEN")),
        (f"{NAME}:v9", "NOT_FOUND", ("no revision 'v9'", "tag")),
        ("a--b", "INVALID_ARGUMENT", ("Hub id", "NAME=DIR")),
    ],
)
def test_failed_download_says_what_to_do(
    hub: Hub, tmp_path: Path, name: str, code: str, words: tuple[str, ...]
) -> None:
    error = run(hub.url, tmp_path, name)["error"]
    assert (error["code"], error["field"]) == (code, "--model")
    for word in (name.partition(":")[0], *words):
        assert word in error["message"] + error["remedy"]


def test_unreachable_hub_is_reported_with_a_remedy(hub: Hub, tmp_path: Path) -> None:
    error = run("http://127.0.0.1:9", tmp_path, NAME)["error"]
    assert error["code"] == "UNAVAILABLE"
    assert "http://127.0.0.1:9" in error["remedy"]
    assert "NAME=DIR" in error["remedy"]
    error = run(hub.url, tmp_path, NAME, HF_HUB_OFFLINE="1")["error"]
    assert error["code"] == "UNAVAILABLE"
    assert "HF_HUB_OFFLINE" in error["message"]
    assert hub.requests == []


def test_model_without_a_tokenizer_is_used_offline(hub: Hub, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    hub.models["Org/bare"] = bare
    found = run(hub.url, tmp_path, "Org/bare")["found"]
    assert run("http://127.0.0.1:9", tmp_path, "Org/bare")["found"] == found


def test_model_without_safetensors_is_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    for name, keeps in (("Org/pickled", ("config.json", "pytorch_model.bin")), ("Org/no", ("x",))):
        directory = tmp_path / name.partition("/")[2]
        directory.mkdir()
        (directory / "x").write_bytes(b"")
        for file in keeps[: 2 * (keeps != ("x",))]:
            shutil.copy(model / file, directory)
        hub.models[name] = directory
        error = run(hub.url, tmp_path, name)["error"]
        assert error["code"] == "FAILED_PRECONDITION"
        assert "safetensors" in error["remedy"]


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (errno.ENOSPC, Code.RESOURCE_EXHAUSTED, "free space"),
        (errno.EDQUOT, Code.RESOURCE_EXHAUSTED, "HF_HOME"),
        (errno.EACCES, Code.FAILED_PRECONDITION, "can write"),
    ],
)
def test_disk_without_room_is_reported_with_a_remedy(number: int, code: Code, word: str) -> None:
    described = hub_module._described(NAME, OSError(number, os.strerror(number)))
    assert described.info.code is code
    assert word in (described.info.remedy or "")


def test_directories_have_their_own_or_a_given_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    given = f"Org/x.y:z={model}"
    assert find_models([given, str(model)], lines.append) == {
        "Org/x.y:z": str(model),
        "tiny": str(model),
    }
    monkeypatch.chdir(model.parent)
    assert find_models(["./tiny", "tiny"], lines.append) == {"tiny": str(model)}
    assert lines == [], "nothing was downloaded"


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("../x=/", "'../x' is not a valid model name"),
        ("=/models", "'' is not a valid model name"),
        ("a/b/c", "'a/b/c' is not a valid model name"),
        ("x=/nowhere", "does not exist"),
        ("x=", "config.json"),
        ("/nowhere/model", "does not exist"),
    ],
)
def test_other_arguments_are_refused(
    argument: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CallerError, match=word) as refused:
        find_models([argument], print)
    assert refused.value.info.field == "--model"


def test_one_name_for_two_directories_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    with pytest.raises(CallerError, match="names two directories"):
        find_models([f"a={model}", f"a={tmp_path / 'copy'}"], print)
