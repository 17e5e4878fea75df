"""`make test-SUBJECT`: together the subjects have every test file, each once."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_file_is_of_one_subject() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (subjects,) = re.findall(r"^SUBJECTS := (.*)$", makefile, re.MULTILINE)
    services = " ".join(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
    subjects = subjects.replace("$(SERVICES)", services)
    found: Counter[Path] = Counter()
    for subject in subjects.split():
        command = ["make", "-n", f"test-{subject}"]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for pattern in re.findall(r"\btests/\S+", told):
            for path in ROOT.glob(pattern):
                found.update(path.rglob("test_*.py") if path.is_dir() else [path])
            assert [*ROOT.glob(pattern)], f"{subject}: there is no {pattern}"
    assert found == Counter((ROOT / "tests").rglob("test_*.py"))
