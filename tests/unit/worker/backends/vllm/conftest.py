"""These tests run in an interpreter that has vLLM, which few have."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import vllm

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "vllm":
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason=vllm.MISSING_HERE))
