"""The Python interpreters of a node's ranks: which backend runs in which, and missing modules.

A runtime whose requirements conflict with the worker's has a separate environment
(`WorkerConfig.interpreters`). Ranks of all interpreters use the same agent and state manager, so
each environment must contain the same Phaseloom code; `Probe.code` compares it. As a program,
`python -m phaseloom.worker.agent.interpreters [--import] BACKEND...`, this module probes its own
interpreter and prints a `Probe` as JSON, for the agent and for `phaseloom doctor`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

import phaseloom.common
import phaseloom.worker
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.process.forkserver import ForkedProcess, ForkServer
from phaseloom.worker.agent import forkserver
from phaseloom.worker.backends import BACKENDS, RUNTIMES, backend_factory, missing_modules

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 60.0
_IMPORT_FLAG = "--import"


class Probe(msgspec.Struct, frozen=True):
    """The result of probing an interpreter for some backends."""

    code: str
    """The `code_digest` of the Phaseloom installed in the interpreter."""
    versions: dict[str, str]
    """The version of each distribution of the backends' runtimes."""
    missing: dict[str, str]
    """Backend → the reason why it does not run in the interpreter."""


class Interpreters:
    """A node's interpreters, each with a fork server that imports the runtimes at once."""

    def __init__(self, interpreters: Mapping[str, str], *, preload: bool) -> None:
        """Args: interpreters: backend → Python, for backends that do not run in this interpreter.
        preload: whether the servers import the runtimes before the first rank needs them."""
        self._python_of = {name: interpreters.get(name, sys.executable) for name in BACKENDS}
        for name in interpreters.keys() - BACKENDS.keys():
            log.error("interpreters: unknown backend %r", name)
        grouped: defaultdict[str, list[str]] = defaultdict(list)
        for name, python in self._python_of.items():
            grouped[python].append(name)
        self._backends_in = dict(grouped)
        self._servers = {
            python: ForkServer(
                forkserver.command(python, self._preloaded(python) if preload else []),
                "run `phaseloom doctor` on the node to see what the interpreter lacks",
            )
            for python in self._backends_in
        }

    def _preloaded(self, python: str) -> list[str]:
        names = self._backends_in[python]
        return [n for n in names if python != sys.executable or not missing_modules(n)]

    def backends(self) -> list[str]:
        """The available backends, sorted. Blocks for up to a second.

        A configured backend that does not run is logged with the reason.
        """
        available = []
        for python, names in self._backends_in.items():
            if python == sys.executable:
                available += [name for name in names if not missing_modules(name)]
                continue
            try:
                probed = probe(python, names)
            except ResourceError as error:
                log.error("%s: %s", ", ".join(names), error)
                continue
            missing = dict(probed.missing)
            if probed.code != code_digest():
                missing |= dict.fromkeys(names, "a different Phaseloom is installed there")
            for name, reason in missing.items():
                log.error("backend %s does not run in %s: %s", name, python, reason)
            available += [name for name in names if name not in missing]
        return sorted(available)

    async def fork(self, backend: str, config_json: str) -> ForkedProcess:
        """Start a rank in its backend's interpreter. Raises: ResourceError: it cannot be
        started."""
        server = self._servers[self._python_of.get(backend, sys.executable)]
        server.restart_if_dead()
        # The first fork waits for the server's imports.
        return await asyncio.to_thread(server.fork, config_json)

    def close(self) -> None:
        """End the fork servers; their ranks continue."""
        for server in self._servers.values():
            server.close()


def probe(python: str, backends: Sequence[str], *, imports: bool = False) -> Probe:
    """Probe another interpreter for some backends.

    Args:   imports: whether to import the runtimes, which takes seconds.
    Raises: ResourceError: the interpreter does not run or has no Phaseloom.
    """
    flags = [_IMPORT_FLAG] if imports else []
    command = [python, "-m", __spec__.name if __spec__ else __name__, *flags, *backends]
    try:
        completed = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
        # The probe is the last line, because imported runtimes may print to standard output.
        return msgspec.json.decode(completed.stdout.splitlines()[-1], type=Probe)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise ResourceError(
            f"{python} cannot run ranks: {str(output).strip()[-300:]}",
            field="interpreters",
            remedy="install this Phaseloom in its environment, or correct the path",
        ) from error


def code_digest() -> str:
    """The digest of the sources that the agent and ranks share."""
    digest = hashlib.sha256()
    for package in (phaseloom.common, phaseloom.worker):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _probe_here(backends: Sequence[str], *, imports: bool) -> Probe:
    missing: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in backends:
        absent = missing_modules(name)
        if absent:
            missing[name] = f"{', '.join(absent)} is not installed"
        for module in set(RUNTIMES.get(name, ())) - set(absent):
            for distribution in metadata.packages_distributions().get(module, []):
                versions[distribution] = metadata.version(distribution)
        if imports and not absent:
            try:
                backend_factory(name)
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {error}"
    return Probe(code_digest(), versions, missing)


if __name__ == "__main__":
    _names = [name for name in sys.argv[1:] if name != _IMPORT_FLAG]
    _probed = _probe_here(_names, imports=_IMPORT_FLAG in sys.argv[1:])
    sys.stdout.write(f"\n{msgspec.json.encode(_probed).decode()}\n")
