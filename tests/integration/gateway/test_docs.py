"""The table of docs/gateway.md against the SDK: each public method is served, or said not to be."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "client", ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient"]
)
def test_table_names_every_method_of_the_sdk(client: str) -> None:
    import tinker

    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{client}`")]
    methods = {
        name
        for name, value in inspect.getmembers(getattr(tinker, client), callable)
        if not name.startswith("_") and not name.endswith("_async")
    }
    named = set(re.findall(r"`(\w+)`", row))
    assert methods <= named
