"""These tests run in an interpreter that has Megatron-core, which few have."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import megatron

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "megatron":
            item.add_marker(pytest.mark.megatron)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not HAS_MEGATRON:
                item.add_marker(pytest.mark.skip(reason=megatron.MISSING_HERE))
