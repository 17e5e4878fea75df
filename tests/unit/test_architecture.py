"""The house rules that a reviewer could overlook: who imports what, and what is registered."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from phaseloom.scheduler.core import ordering, placement

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
WITHOUT_TORCH = [
    "phaseloom.scheduler.main",
    "phaseloom.router.main",
    "phaseloom.profiler.main",
    "phaseloom.statemgr.main",
    "phaseloom.worker.main",
    "phaseloom.worker.rank.process",
    "phaseloom.client",
    "phaseloom.cli.main",
]
HEAVY = {"torch", "transformers", "numpy", "safetensors", "vllm", "megatron"}
IMPURE = {
    "aiofiles",
    "asyncio",
    "http",
    "logging",
    "mmap",
    "multiprocessing",
    "nats",
    "opentelemetry",
    "os",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "urllib",
    "uuid",
}
IO_OF_OURS = {
    "phaseloom.common.observability.metrics",
    "phaseloom.common.observability.telemetry",
    "phaseloom.common.process",
    *(
        f"phaseloom.common.transport.{name}"
        for name in ("bus", "framing", "leases", "natsclient", "natsserver", "services")
    ),
}


def imports_of(file: Path) -> Iterator[str]:
    """Absolute names of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*parts: str) -> list[Path]:
    found = sorted(ROOT.joinpath(*parts).rglob("*.py"))
    assert found, parts
    return found


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_process_imports_nothing_heavy(module: str) -> None:
    """What makes an idle mesh small: torch lives in ranks, and in the server they fork from."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("service", SERVICES)
def test_service_imports_common_and_itself_only(service: str) -> None:
    allowed = (f"phaseloom.{service}", "phaseloom.common")
    for file in sources("services", service):
        for module in imports_of(file):
            is_ours = is_under(module, "phaseloom") and module != "phaseloom"
            assert not is_ours or any(is_under(module, name) for name in allowed), (file, module)


def test_what_all_share_imports_no_service() -> None:
    for file in sources("libs", "common"):
        for module in imports_of(file):
            is_ours = is_under(module, "phaseloom") and module != "phaseloom"
            assert not is_ours or is_under(module, "phaseloom.common"), (file, module)


def test_client_imports_common_and_itself_only() -> None:
    for file in sources("libs", "client"):
        for module in imports_of(file):
            for service in SERVICES:
                assert not is_under(module, f"phaseloom.{service}"), (file, module)


def test_simulator_imports_the_schedulers_core_only() -> None:
    """It is a second shell of that core: of no service does it take anything else."""
    allowed = ("phaseloom.common", "phaseloom.simulator", "phaseloom.scheduler.core")
    for file in sources("libs", "simulator"):
        for module in imports_of(file):
            is_ours = is_under(module, "phaseloom") and module != "phaseloom"
            assert not is_ours or any(is_under(module, name) for name in allowed), (file, module)


@pytest.mark.parametrize("service", SERVICES)
def test_core_is_pure(service: str) -> None:
    """No clock, log, randomness, environment or I/O: the same input gives the same output."""
    for file in sources("services", service, "phaseloom", service, "core"):
        for module in imports_of(file):
            assert module.partition(".")[0] not in IMPURE, (file, module)
            assert not any(is_under(module, name) for name in IO_OF_OURS), (file, module)


def test_each_part_of_the_state_manager_imports_what_is_below_it() -> None:
    parts = ["core", "mesh", "disk", "node", "tiers", "versions", "seals", "checkpoints"]
    root = ROOT / "services" / "statemgr" / "phaseloom" / "statemgr"
    assert set(parts) == {path.parent.name for path in root.glob("*/*.py")}
    for number, part in enumerate(parts):
        allowed = [f"phaseloom.statemgr.{name}" for name in parts[: number + 1]]
        for file in sorted((root / part).rglob("*.py")):
            for module in imports_of(file):
                is_ours = is_under(module, "phaseloom.statemgr") and module != "phaseloom.statemgr"
                assert not is_ours or any(is_under(module, name) for name in allowed), (
                    file,
                    module,
                )


@pytest.mark.parametrize(
    ("package", "registered", "shared"),
    [
        (ordering, ordering.POLICIES, {"scene", "timeline"}),
        (placement, placement.POLICIES, {"view"}),
    ],
)
def test_every_policy_is_registered(
    package: ModuleType, registered: dict[str, object], shared: set[str]
) -> None:
    """One file a policy, called like it, and a function of that name in the registry."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules - shared == set(registered)
    for name, policy in registered.items():
        module = importlib.import_module(f"{package.__name__}.{name}")
        assert policy is vars(module)[name]
