"""Several ranks of one deployment, each a real process, joined by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    OptimStep,
    OptimStepResult,
    Result,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.layouts import merge, split
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.model import parameter_shapes
from tests.support.saved import load_ranks, save_ranks
from tests.support.versions import assembled
from tests.unit.worker.backends.rank_child import (
    Answer,
    Call,
    Digest,
    Fill,
    Heaped,
    Offload,
    Publish,
    Score,
    Setup,
    Step,
    Sync,
    Train,
)

ROOT = Path(__file__).parents[4]


class Rank:
    """One process; closing kills it."""

    def __init__(self, spec: DeploymentSpec, ranks: RankGroup, warnings: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", warnings, "-m", "tests.unit.worker.backends.rank_child"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send(Setup(spec, ranks))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def send(self, message: Setup | Call) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message).decode() + "\n")
        self._process.stdin.flush()

    def receive(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the rank died"
        return msgspec.json.decode(line, type=Answer)


class Ranks:
    """Calls go to all ranks at once; work is split and results merged as a leader does."""

    def __init__(self, spec: DeploymentSpec, directory: Path, warnings: str = "error") -> None:
        """Args: warnings: what becomes of warnings in the ranks."""
        self._layout = spec.layout
        files = parameter_shapes(spec.model).files
        self._whole = plan(files, trainable=False).slots
        place = RankGroup(
            world_size=spec.layout.num_ranks,
            store_path=str(directory / "store"),
            node_directory=str(directory),
        )
        self.ranks = [
            Rank(spec, replace(place, rank=rank), warnings) for rank in range(place.world_size)
        ]
        first = [rank.receive() for rank in self.ranks]
        failed = [answer.error for answer in first if answer.error]
        assert not failed, failed
        self.slots: list[list[TensorSlot]] = [answer.slots for answer in first]
        self._config = first[0].config

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def send(self, rank: int, call: Call) -> None:
        self.ranks[rank].send(call)

    def receive(self, rank: int) -> Answer:
        return self.ranks[rank].receive()

    def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """One call to each rank, then one answer from each."""
        for rank, call in enumerate(calls):
            self.send(rank, call)
        answers = [self.receive(rank) for rank in range(len(calls))]
        failed = [answer.error for answer in answers if answer.error]
        assert not failed, failed
        return answers

    def forward(self, args: Forward) -> ForwardResult:
        shares = [split(args, self._layout, rank) for rank in range(len(self.ranks))]
        calls = [Score(share) for share in shares if isinstance(share, Forward)]
        result = self._merged("forward", calls)
        assert isinstance(result, ForwardResult)
        return result

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        shares = [split(args, self._layout, rank) for rank in range(len(self.ranks))]
        calls = [Train(share) for share in shares if isinstance(share, ForwardBackward)]
        result = self._merged("forward_backward", calls)
        assert isinstance(result, ForwardBackwardResult)
        return result

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        result = self._merged("optim_step", [Step(args) for _ in self.ranks])
        assert isinstance(result, OptimStepResult)
        return result

    def weights_sha256(self) -> str:
        (digest,) = {answer.digest for answer in self._all(Digest())}
        return digest

    def save(self, directory: Path) -> None:
        save_ranks(list(zip(self.slots, self.heaps(), strict=True)), self._config, directory)

    def load(self, directory: Path) -> None:
        sizes = [len(heap) for heap in self.heaps()]
        contents = load_ranks(list(zip(self.slots, sizes, strict=True)), directory)
        self.ask([Fill(bytes(content)) for content in contents])

    def publish(self) -> bytes:
        """What whoever needs everything makes of the ranks' parts."""
        parts = [answer.content for answer in self._all(Publish())]
        return assembled(parts, self.slots, self._whole)

    def sync(self, version: bytes) -> None:
        self._all(Sync(version))

    def heaps(self) -> list[bytes]:
        return [answer.content for answer in self._all(Heaped())]

    def offload_between_calls(self, *, is_on: bool) -> None:
        self._all(Offload(is_on))

    def _all(self, call: Call) -> list[Answer]:
        return self.ask([call for _ in self.ranks])

    def _merged(self, kind: str, calls: Sequence[Call]) -> Result:
        results = [answer.result for answer in self.ask(calls)]
        return merge(kind, [r for r in results if r is not None], self._layout)
