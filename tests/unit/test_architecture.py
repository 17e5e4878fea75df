"""The house rules that a reviewer could overlook: who imports what, and what is registered."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import msgspec
import pytest

from phaseloom.scheduler.core import policies
from phaseloom.scheduler.core.policies.registry import ORDERING, PLACEMENT
from phaseloom.scheduler.core.state.node import Slot

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
WITH_NUMPY = {"gateway"}
WITHOUT_TORCH = [
    *(f"phaseloom.{service}.main" for service in SERVICES if service not in WITH_NUMPY),
    "phaseloom.worker.rank.process",
    "phaseloom.client",
    "phaseloom.cli.main",
]
WITH_HTTP = {"phaseloom.console.main"}
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
        for name in (
            "bus",
            "framing",
            "leases",
            "natsclient",
            "natsserver",
            "retry",
            "services",
            "serving",
        )
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
    if module.endswith(".main") and module not in WITH_HTTP:
        assert "aiohttp" not in loaded, "see phaseloom.common.process.tcponly"


@pytest.mark.parametrize("service", SERVICES)
def test_service_imports_common_and_itself_only(service: str) -> None:
    """The gateway is a controller, too, and has the controllers' library."""
    allowed = [f"phaseloom.{service}", "phaseloom.common"]
    if service == "gateway":
        allowed.append("phaseloom.client")
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


@pytest.mark.parametrize("folder", ["libs", "services"])
def test_product_imports_no_workshop(folder: str) -> None:
    """Benches, papers' scenarios and the GPU check use the product, never the reverse."""
    for file in sources(folder):
        for module in imports_of(file):
            assert not is_under(module, "loadtest"), (file, module)
            assert not is_under(module, "tests"), (file, module)


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "statemgr"])
def test_core_is_pure(service: str) -> None:
    """No clock, log, randomness, environment or I/O: the same input gives the same output.

    The state manager has its pure modules in the folders of its features: `STATEMGR_PURE`.
    """
    for file in sources("services", service, "phaseloom", service, "core"):
        check_pure(file)


def test_contract_is_pure() -> None:
    """The streams are described in the server's own words: of its client, data types only."""
    for file in sources("libs", "common", "phaseloom", "common", "contract"):
        check_pure(file, allowed="nats.js.api" if file.name == "streams.py" else None)


def check_pure(file: Path, *, allowed: str | None = None) -> None:
    for module in imports_of(file):
        if allowed is not None and is_under(module, allowed):
            continue
        assert module.partition(".")[0] not in IMPURE, (file, module)
        assert not any(is_under(module, name) for name in IO_OF_OURS), (file, module)


STATEMGR_PURE = (
    "records",
    "checkpoints.assembly",
    "checkpoints.marker",
    "disk.statefile",
    "transfer.assignment",
    "transfer.delta",
    "transfer.tensorslices",
)
"""The pure packages and modules of the state manager, which has no `core/`."""


def is_pure_in_statemgr(module: str) -> bool:
    return any(is_under(module, f"phaseloom.statemgr.{name}") for name in STATEMGR_PURE)


@pytest.mark.parametrize("name", STATEMGR_PURE)
def test_pure_module_of_the_state_manager_is_pure(name: str) -> None:
    """Pure modules may import one another, but no other module of the state manager."""
    path = ROOT / "services/statemgr/phaseloom/statemgr" / name.replace(".", "/")
    for file in sorted(path.rglob("*.py")) or [path.with_suffix(".py")]:
        check_pure(file)
        for module in imports_of(file):
            if is_under(module, "phaseloom.statemgr"):
                assert is_pure_in_statemgr(module), (file, module)


def test_parts_of_the_state_manager_do_not_know_the_node() -> None:
    """`main` wires: a component receives the parts that it uses, never all of them."""
    node = "phaseloom.statemgr.node.node"
    importers = {file.name for file in sources("services", "statemgr") if node in imports_of(file)}
    assert importers == {"main.py"}


def test_index_of_the_state_manager_is_written_at_one_place() -> None:
    """Whatever changes what is held passes through `Ledger.change`, which alone fixes the order."""
    root = ROOT / "services" / "statemgr"
    calls = [
        (file.name, ast.unparse(node))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._record")
    ]
    assert calls == [("ledger.py", "self._record()")]


@pytest.mark.parametrize(
    ("kind", "registered"),
    [("ordering", ORDERING), ("placement", PLACEMENT)],
)
def test_every_policy_is_registered(kind: str, registered: dict[str, object]) -> None:
    """One file a policy, called like it, and an object of that name in the registry."""
    found = {}
    for package in (f"{policies.__name__}.{kind}", f"{policies.__name__}.baselines.{kind}"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            policy = importlib.import_module(f"{package}.{module.name}")
            found[module.name] = vars(policy)[module.name]
    assert found == registered


# --- layers --------------------------------------------------------------------------------------

LAYERS: dict[str, list[tuple[str, ...]]] = {
    "phaseloom.common": [
        ("contract",),
        ("observability", "tensors", "text"),
        ("process",),
        ("transport",),
    ],
    "phaseloom.common.contract": [
        ("errors",),
        ("modelconfig", "sizes"),
        ("configcheck", "tenantlimits"),
        ("arrays", "codec", "ids", "specs", "state_layout"),
        ("agents", "commands", "operations"),
        ("api", "checks", "completions", "continuation", "events", "state_agent", "streaming"),
        ("checkpoints", "kinds", "streams"),
        ("state_rank",),
    ],
    "phaseloom.scheduler.core": [
        ("state",),
        ("operations", "devices", "planning"),
        ("durability", "policies"),
        ("wpgs",),
        ("dispatch", "placement"),
        ("jobs",),
        ("core", "validate"),
    ],
    "phaseloom.scheduler.core.planning": [
        ("chains", "nodes", "timeline"),
        ("weave",),
        ("groups",),
        ("admission",),
        ("sharing",),
    ],
    "phaseloom.scheduler.core.policies": [
        ("device_view", "sharing_view"),
        ("pairing",),
        ("multiplexing", "ordering", "placement"),
        ("baselines",),
        ("registry",),
    ],
    "phaseloom.gateway": [
        ("core", "encoding", "encryption", "futures", "models", "records"),
        ("tenants", "tokenizers"),
        ("replicas", "sampling"),
        ("http",),
        ("checkpoints",),
        ("openai", "tinker"),
        ("main",),
    ],
    "phaseloom.gateway.tinker": [
        ("requests",),
        ("calls",),
        ("sampling", "training"),
        ("saving", "sessions"),
        ("retrieving",),
    ],
    "phaseloom.console": [
        ("core",),
        ("page", "shell"),
        ("http",),
        ("main",),
    ],
    "phaseloom.console.core": [
        ("wire",),
        ("decisions",),
        ("view",),
    ],
    "phaseloom.statemgr": [
        ("records",),
        ("disk", "transfer"),
        ("node",),
        ("tiering",),
        ("handover", "versions"),
        ("checkpoints", "seals"),
        ("serving", "shell"),
        ("main",),
    ],
    "phaseloom.worker": [
        ("config", "core", "cuda"),
        ("state",),
        ("backends",),
        ("rank",),
        ("agent",),
        ("main", "measuring"),
    ],
}
"""Package → its children (packages and modules) in layers, the lowest first. A child imports only
from layers below its own: nothing of the layers above, and nothing of its neighbours."""
MAX_LAYERS = 8


@functools.cache
def graph_of(package: str) -> grimp.ImportGraph:
    """Every import in the package, those inside functions too."""
    return grimp.build_graph(package, cache_dir=None)


@pytest.mark.parametrize("package", LAYERS)
def test_packages_import_only_from_the_layers_below(package: str) -> None:
    layers = LAYERS[package]
    assert len(layers) <= MAX_LAYERS
    root = next(name for name in LAYERS if is_under(package, name))
    graph = graph_of(root)
    children = {name.rpartition(".")[2] for name in graph.find_children(package)}
    assert children == {child for layer in layers for child in layer}, "each child has its layer"
    found = graph.find_illegal_dependencies_for_layers(
        layers=[grimp.Layer(*layer) for layer in reversed(layers)], containers={package}
    )
    shortest = sorted(
        " -> ".join((*sorted(route.heads), *route.middle, *sorted(route.tails)))
        for dependency in found
        for route in dependency.routes
    )
    assert not shortest


@pytest.mark.parametrize(
    "package", [name for name in LAYERS if name.rpartition(".")[0] not in LAYERS]
)
def test_no_modules_import_one_another_in_a_circle(package: str) -> None:
    """Packages may be in order and their modules not: the sorter names the circle."""
    graph = graph_of(package)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()


# --- slots ---------------------------------------------------------------------------------------

SLOT_FIELDS = {field.name for field in msgspec.structs.fields(Slot)}
CHANGES = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def slots_of(function: ast.AST) -> set[str]:
    """Names of a function's variables that hold a slot: by their type, or by the house's habit."""
    named = {
        node.arg
        for node in ast.walk(function)
        if isinstance(node, ast.arg)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "Slot"
    }
    return {*named, "slot"}


def slot_writes(tree: ast.AST) -> Iterator[int]:
    """Lines in which a field of a slot is set, or what is in one is changed."""
    slots = slots_of(tree)

    def is_field(node: ast.AST) -> bool:
        while isinstance(node, ast.Subscript | ast.Attribute):
            if isinstance(node, ast.Attribute) and node.attr in SLOT_FIELDS:
                base = node.value
                is_call = isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute)
                if is_call and base.func.attr == "slot":  # type: ignore[attr-defined]
                    return True
                if isinstance(base, ast.Name) and base.id in slots:
                    return True
            node = node.value
        return False

    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                yield from (node.lineno for target in targets if is_field(target))
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield from [node.lineno] if is_field(target) else []
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in CHANGES:
                yield from [node.lineno] if is_field(value) else []


def test_slots_of_devices_are_changed_in_one_package_only() -> None:
    """Sharing a device in space will make it several: nobody else may count on there being one."""
    core = ROOT / "services" / "scheduler" / "phaseloom" / "scheduler" / "core"
    for file in sources("services", "scheduler"):
        if file.is_relative_to(core / "devices") or file == core / "state" / "node.py":
            continue
        tree = ast.parse(file.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert not [line for function in functions for line in slot_writes(function)], file
        reached = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "slots"]
        assert not reached or file == core / "validate.py", file


@pytest.mark.parametrize(
    "line",
    [
        "slot.running = ''",
        "slot.served[name] += 1",
        "devices.slot(node, 0).resident.append(name)",
        "slot.phase.kinds.append(kind)",
        "del slot.expected[name]",
    ],
)
def test_change_of_a_slot_is_seen(line: str) -> None:
    assert list(slot_writes(ast.parse(f"def work(slot: Slot) -> None:\n    {line}")))
