"""A storm on one real state manager: everything at once, at random, against a model of the bytes.

Several deployments of two jobs (trainers of one and two ranks, one whose optimizer state is in host
memory, frozen ones) are switched, run, sealed, saved, loaded, synced and hinted by tasks side by
side, under budgets that are too small for all of it. Ranks die, the daemon is killed, and the disk
is full for a while. Whatever is refused, and whoever dies: what a rank has on its device is, byte
for byte, what the model says, no incarnation ends but those that were killed, and every
refusal is typed and says what to do.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phaseloom.common.contract.errors import Code, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_layout import Role, TensorSlot, host_start
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.readversions import load_version
from tests.support.statedaemon import Daemon, MiB, daemon, emptied

T = TypeVar("T")
Bytes = tuple[str, str]
"""Digests of a rank's heap, and of its state in host memory."""

_PIECE = 64 * 1024
_RECONNECT_S = 120.0
_FILE_BYTES = 512 * 1024
"""While the disk is full."""


class Actor:
    """One rank, in this process."""

    def __init__(self, member: Member, index: int) -> None:
        self.member = member
        self.index = index
        self.heap = Heap(member.heap_bytes)
        self.client: RankStateClient
        self._has_joined = False

    async def join(self, socket: Path, token: str) -> int:
        """The seq that it begins at."""
        member = self.member
        self.client = await RankStateClient.connect(
            *(socket, token),
            applied=lambda: member.seq,
            on_loaded=lambda: None,
            reconnect_s=_RECONNECT_S,
        )
        self._has_joined = True
        return await self.client.register_heap(
            self.heap, self.slots(), member.host_bytes, frozen=member.is_frozen
        )

    async def leave(self) -> None:
        if self._has_joined:
            await self.client.close()

    def slots(self) -> list[TensorSlot]:
        member, count = self.member, self.member.num_ranks
        size = member.heap_bytes
        part = {"global_shape": [count * size], "start": [self.index * size]} if count > 1 else {}
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [size], 0, size, **part)]
        if member.host_bytes:
            start, size = host_start(size), member.host_bytes
            slots.append(TensorSlot("m", Role.OPTIMIZER, "uint8", [size], start, size))
        return slots

    def write(self, draw: random.Random) -> None:
        """All of it, or a piece."""
        is_whole = draw.random() < 0.4
        for memory in self._memories():
            if is_whole:
                memory[:] = draw.randbytes(len(memory))
            else:
                start = draw.randrange(len(memory) - _PIECE)
                memory[start : start + _PIECE] = draw.randbytes(_PIECE)

    def bytes(self) -> Bytes:
        heap, *host = self._memories()
        return digest_of(heap), "".join(digest_of(memory) for memory in host)

    def _memories(self) -> list[memoryview]:
        host = [self.client.host_memory] if self.member.host_bytes else []
        return [self.heap.buffer, *host]


@dataclass(eq=False)
class Member:
    """A deployment, and what is known of it."""

    key: DeploymentKey
    heap_bytes: int
    devices: list[int]
    host_bytes: int = 0
    is_frozen: bool = False
    content: int = 0
    """What it begins with."""
    incarnation: int = 0
    seq: int = 0
    ranks: list[Actor] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever has it do something that the scheduler would not do beside something else."""
    is_killed: bool = False
    """One of its ranks was."""
    state: list[Bytes] = field(default_factory=list)
    committed: int = 0
    seals: dict[int, list[Bytes]] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    checkpoints: dict[str, list[Bytes]] = field(default_factory=dict)
    is_saving: bool = False
    is_sealing: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def policy(self) -> DeploymentKey:
        return DeploymentKey(self.key.tenant, self.key.job, "policy")


def cast() -> list[Member]:
    """Two jobs: their frozen ones may be equal to one another, and have the policy's layout."""

    def of(job: str, name: str) -> DeploymentKey:
        return DeploymentKey("acme", job, name)

    return [
        Member(of("sums", "policy"), 2 * MiB, [0]),
        Member(of("sums", "sampler"), 2 * MiB, [1], is_frozen=True, content=1),
        Member(of("sums", "reference"), 2 * MiB, [1], is_frozen=True, content=1),
        Member(of("sums", "critic"), MiB, [0], host_bytes=2 * MiB),
        Member(of("letters", "policy"), 9 * MiB, [0]),
        Member(of("letters", "reference"), 2 * MiB, [0], is_frozen=True, content=1),
        Member(of("letters", "critic"), MiB, [0, 1]),
        Member(of("letters", "judge"), MiB, [0, 1], is_frozen=True, content=2),
    ]


TOLD = frozenset({Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.ABORTED})
"""What a call may be refused with that has done nothing wrong."""


class Storm:
    def __init__(self, d: Daemon, draw: random.Random, members: list[Member]) -> None:
        self.d = d
        self.draw = draw
        self.members = members
        self.epoch = 0
        self.is_disk_full = False
        self.num_kills = 0
        """Of the daemon, and of ranks: what was under way then may be refused."""
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self._launching = asyncio.Lock()
        self._tasks: asyncio.TaskGroup

    # --- the storm ---

    async def blow(self, num_actions: int, num_tasks: int = 3) -> None:
        """Raises: AssertionError: something is not as the model says."""
        for member in self.members:
            await self._live(member)
        left = iter(range(num_actions))

        async def act() -> None:
            for _ in left:
                await self._act()

        async with asyncio.TaskGroup() as self._tasks:
            for _ in range(num_tasks):
                self._tasks.create_task(act())

    async def _act(self) -> None:
        member = self.draw.choice(self.members)
        actions: list[tuple[int, Callable[[Member], Awaitable[None]]]] = [
            (30, self._visit),
            (6, self._leave),
            (10, self._seal),
            (6, self._save),
            (5, self._load),
            (8, self._publish),
            (8, self._sync),
            (6, self._hint),
            (3, self._drop_version),
            (2, self._kill_rank),
            (2, self._kill_daemon),
            (2, self._forget),
            (3, self._toggle_disk),
        ]
        weights, works = zip(*actions, strict=True)
        (work,) = self.draw.choices(works, weights)
        await work(member)

    def _tell(self, member: Member, what: str) -> None:
        self.story.append(f"{member.key.job}.{member.key.deployment}@{member.seq}: {what}")

    async def _try(
        self, member: Member, what: str, call: Awaitable[T], told: Set[Code] = TOLD
    ) -> T | None:
        """None: refused, as may be."""
        kills, incarnation = self.num_kills, member.incarnation
        self._tell(member, what)
        try:
            result = await call
        except PhaseloomError as error:
            self._tell(member, f"{what} was refused: {error}")
            self.counts[f"{what}, refused"] += 1
            is_over = member.is_killed or member.incarnation != incarnation
            gone = {Code.NOT_FOUND} if is_over else set()
            self._judge(f"{what} of {member.key}", error, kills, told | gone)
            return None
        except RuntimeError:
            if not member.is_killed:
                raise
            return None  # it was to do something itself, and its thread is gone
        self.counts[what] += 1
        return result

    def _judge(self, what: str, error: PhaseloomError, kills: int, told: Set[Code]) -> None:
        code = error.info.code
        assert code in told, f"{what}: {error}"
        if code is Code.RESOURCE_EXHAUSTED:
            assert error.info.remedy, f"{what}: {error} says not what to do"
        elif code in TOLD:
            is_lost = any(member.is_killed for member in self.members)
            # What was asked just after the kill is told so before the next daemon is there.
            is_away = self.num_kills > kills or self._launching.locked()
            excused = is_lost or is_away or self.is_disk_full
            assert excused, f"{what}: {error}"

    @asynccontextmanager
    async def _holding(self, members: Iterable[Member]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for member in sorted(members, key=lambda each: each.key):
                await stack.enter_async_context(member.lock)
            yield

    # --- lives ---

    async def _live(self, member: Member) -> None:
        """Its next incarnation, from its seal where it has one."""
        member.incarnation += 1
        member.is_killed = False
        member.ranks = [Actor(member, index) for index in range(member.num_ranks)]
        tokens = [f"{member.key} {member.incarnation} {i}" for i in range(member.num_ranks)]
        self._tell(member, f"begins incarnation {member.incarnation} from {member.committed}")
        await self.d.agent.register_wpg(
            tokens, member.key, member.incarnation, member.devices, member.committed
        )
        for actor, token in zip(member.ranks, tokens, strict=True):
            if not await self._join(member, actor, token):
                await self._end(member)
                return
        if member.committed:
            member.state = member.seals[member.committed]
        else:
            member.state = [actor.bytes() for actor in member.ranks]
            for actor in member.ranks:
                if not await self._commit(member, actor):
                    await self._end(member)
                    return

    async def _join(self, member: Member, actor: Actor, token: str) -> bool:
        seq = await self._try(member, "join", actor.join(self.d.socket, token))
        if seq is None:
            return False
        assert seq == member.committed
        if seq:
            member.seq = seq
        else:
            fresh = random.Random(f"{member.content} {actor.index}")
            actor.heap.buffer[:] = fresh.randbytes(len(actor.heap.buffer))
        return True

    async def _commit(self, member: Member, actor: Actor) -> bool:
        self._tell(member, "commit")
        member.seq = max(member.seq, 1)
        done = await self._try(member, "commit", _done(actor.client.commit_initial(member.seq)))
        return done is not None

    async def _end(self, member: Member) -> None:
        for actor in member.ranks:
            await actor.leave()
        member.is_killed = True

    async def _is_alive(self, member: Member) -> bool:
        """Its lock is held."""
        if member.is_killed:
            for actor in member.ranks:
                await actor.leave()
            if self.draw.random() < 0.7:
                await self.d.agent.drop_wpg(member.key, member.incarnation)
            await self._live(member)
            return not member.is_killed
        for actor in member.ranks:
            closed = actor.client.closed
            assert not closed.done(), f"{member.key} was lost: {closed.result()}"
        return True

    async def _kill_rank(self, member: Member) -> None:
        # What dies while no daemon is there is waited for, for long: other tests have it.
        is_there = not self._launching.locked()
        if member.ranks and not member.is_killed and is_there:
            self._tell(member, "KILLED")
            member.is_killed = True
            self.num_kills += 1
            await self.draw.choice(member.ranks).leave()
            self.num_kills += 1

    async def _forget(self, member: Member) -> None:
        """Its job ends, whatever is under way for it; then there is one of the same name."""
        async with member.lock:
            if member.is_killed or self._launching.locked():
                return
            self._tell(member, "ENDED")
            member.is_killed = True
            self.num_kills += 1
            member.committed, member.seals, member.versions = 0, {}, {}
            await self.d.agent.drop_wpg(member.key, member.incarnation, forget=True)
            self.num_kills += 1

    async def _kill_daemon(self, member: Member) -> None:
        if self._launching.locked():
            return
        async with self._launching:
            await asyncio.sleep(self.draw.random() * 0.05)
            self._tell(member, "THE DAEMON IS KILLED")
            self.num_kills += 1
            await self.d.relaunch()
            self._limit_files()
            self.num_kills += 1

    # --- what is done ---

    async def _visit(self, member: Member) -> None:
        """Bring it in, look, and run it."""
        beside = [m for m in self.members if set(m.devices) & set(member.devices)]
        async with self._holding(beside):
            if not await self._switch_in(member, beside):
                return
            for _ in range(self.draw.randrange(3)):
                if not member.is_frozen or self.draw.random() < 0.2:
                    self._run(member)
        await asyncio.sleep(0)

    async def _switch_in(self, member: Member, beside: list[Member]) -> bool:
        if not await self._is_alive(member):
            return False
        self.epoch += 1
        displaced = [each.key for each in beside if each is not member]
        some = self.draw.random() < 0.8
        call = self.d.agent.switch_in(
            member.key, member.incarnation, self.epoch, displaced if some else []
        )
        if await self._try(member, "switch in", call) is None:
            return False
        self._look(member)
        return not member.is_killed

    def _look(self, member: Member) -> None:
        """It is on its device: is it what it was?"""
        if member.is_killed:
            return
        found = [actor.bytes() for actor in member.ranks]
        assert found == member.state, f"{member.key} holds something else"

    def _run(self, member: Member) -> None:
        for actor in member.ranks:
            actor.write(self.draw)
        member.seq += 1
        member.state = [actor.bytes() for actor in member.ranks]
        self._tell(member, "ran")

    async def _is_resident(self, member: Member) -> bool:
        states = (await self.d.agent.status()).deployments
        return any(s.deployment == member.key and s.resident for s in states)

    async def _leave(self, member: Member) -> None:
        async with member.lock:
            if await self._is_alive(member):
                self.epoch += 1
                call = self.d.agent.switch_out(member.key, member.incarnation, self.epoch)
                await self._try(member, "switch out", call)

    async def _hint(self, member: Member) -> None:
        if not member.is_killed and member.ranks:
            in_s = self.draw.choice([None, 0.1, 1.0, 5.0])
            call = self.d.agent.prefetch(member.key, member.incarnation, in_s)
            await self._try(member, "hint", _done(call))

    async def _seal(self, member: Member) -> None:
        async with member.lock:
            if member.is_sealing or not await self._is_alive(member):
                return
            seq, state, incarnation = member.seq, member.state, member.incarnation
            call = self.d.agent.prepare_seal(member.key, incarnation, seq)
            if await self._try(member, "prepare", _done(call)) is None:
                return
            # The deployment runs on while it is written.
            member.is_sealing = True
            versions = [each for each in member.versions if self.draw.random() < 0.3]
            self._tasks.create_task(self._write(member, incarnation, seq, state, versions))
            await asyncio.sleep(0)

    async def _write(
        self, member: Member, incarnation: int, seq: int, state: list[Bytes], versions: list[int]
    ) -> None:
        durability = self.draw.choice([Durability.NODE, Durability.NODE, Durability.HOST])
        call = self.d.agent.write_seal(
            *(member.key, incarnation, seq, versions),
            committed=member.committed,
            durability=durability,
        )
        seals = member.seals
        told = {*TOLD, Code.NOT_FOUND} if versions else TOLD
        # A snapshot of host memory is lost in a kill of the daemon: it is prepared again.
        told = {*told, Code.FAILED_PRECONDITION} if member.host_bytes else told
        sealed = await self._try(member, "seal", call, told)
        member.is_sealing = False
        if sealed is None:
            return
        self._tell(member, f"sealed {seq}: {sealed.num_bytes}")
        if member.incarnation == incarnation and member.seals is seals and seq > member.committed:
            seals[seq] = state
            member.committed = seq

    async def _save(self, member: Member) -> None:
        async with member.lock:
            if member.is_saving or not await self._is_alive(member):
                return
            name = f"c{member.seq}-{len(self.story)}"
            leader, state = member.ranks[0], member.state
            taking = leader.client.take_snapshot(f"op {name}", name, member.seq)
            if await self._try(member, "snapshot", _done(taking)) is None:
                return
            member.is_saving = True
            self._tasks.create_task(self._write_checkpoint(member, leader, name, state))
            await asyncio.sleep(0)

    async def _write_checkpoint(
        self, member: Member, leader: Actor, name: str, state: list[Bytes]
    ) -> None:
        call = leader.client.write_checkpoint(f"op {name}", name, "{}", 0)
        if await self._try(member, "save", call) is not None:
            member.checkpoints[name] = state
        member.is_saving = False

    async def _load(self, member: Member) -> None:
        beside = [m for m in self.members if set(m.devices) & set(member.devices)]
        async with self._holding(beside):
            if not member.checkpoints or not await self._switch_in(member, beside):
                return
            name = self.draw.choice(list(member.checkpoints))
            kills = self.num_kills
            read = await self._try(member, "load", member.ranks[0].client.read_checkpoint(name))
            if member.is_killed:
                return
            found = [actor.bytes() for actor in member.ranks]
            if read is None:
                # Who is asked again after a kill may find no room, and have been loaded before.
                either = [member.state, member.checkpoints[name]]
                assert found in either[: 1 + (self.num_kills > kills)], f"{member.key}: in part"
            else:
                assert found == member.checkpoints[name], f"{member.key} loaded something else"
            if found != member.state or read is not None:
                member.seq += 1
                member.state = found

    async def _publish(self, member: Member) -> None:
        if member.key.deployment != "policy":
            return
        beside = [m for m in self.members if set(m.devices) & set(member.devices)]
        async with self._holding(beside):
            if not await self._switch_in(member, beside):
                return
            self._run(member)
            actor, seq = member.ranks[0], member.seq
            call = actor.client.versions.create(VersionKey(member.key, seq), actor.slots())
            made = await self._try(member, "publish", call)
            if made is not None:
                # What an earlier incarnation published at this seq stays. Elsewhere work that is
                # done again comes to the same bits; here it does not.
                earlier = [] if made.is_new else [member.versions.get(seq)]
                assert made.digest in [member.state[0][0], *earlier]
                member.versions[seq] = made.digest

    async def _sync(self, member: Member) -> None:
        policy = next((m for m in self.members if m.key == member.policy), None)
        if not member.is_frozen or policy is None or policy.heap_bytes != member.heap_bytes:
            return
        beside = [m for m in self.members if set(m.devices) & set(member.devices)]
        async with self._holding(beside):
            if not await self._switch_in(member, beside) or not policy.versions:
                return
            seq = self.draw.choice(list(policy.versions))
            expected = policy.versions[seq]
            actor, key = member.ranks[0], VersionKey(policy.key, seq)
            call = load_version(actor.client, key, [], actor.slots())
            digest = await self._try(member, "sync", call, {*TOLD, Code.NOT_FOUND})
            if digest is None:
                if not member.is_killed:
                    self._look(member)
                return
            assert digest == expected
            member.seq += 1
            member.state = [actor.bytes()]
            assert member.state[0][0] == expected
            await self._try(member, "hold", _done(actor.client.versions.hold(key, member.seq)))

    async def _drop_version(self, member: Member) -> None:
        if member.versions:
            seq = self.draw.choice(list(member.versions))
            del member.versions[seq]
            key = VersionKey(member.key, seq)
            await self._try(member, "drop", _done(self.d.agent.drop_versions([key])))

    async def _toggle_disk(self, member: Member) -> None:
        self.is_disk_full = not self.is_disk_full and self.draw.random() < 0.5
        self._tell(member, f"the disk is {'full' if self.is_disk_full else 'free'}")
        if not self._launching.locked():
            self._limit_files()

    def _limit_files(self) -> None:
        if self.d.process.returncode is None:
            pid = self.d.pid
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            limit = _FILE_BYTES if self.is_disk_full else hard
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))

    # --- the end ---

    async def calm(self) -> None:
        """All that is there is what it should be; once it is dropped, nothing is left."""
        self.is_disk_full = False
        self._limit_files()
        for member in self.members:
            for each in self.members:
                if each.ranks and not each.is_killed:
                    self.epoch += 1
                    call = self.d.agent.switch_out(each.key, each.incarnation, self.epoch)
                    await self._try(each, "switch out", call)
            async with member.lock:
                if member.committed or not member.is_killed:
                    await self._switch_in(member, [])
        for member in self.members:
            for actor in member.ranks:
                await actor.leave()
            await self.d.agent.drop_wpg(member.key, member.incarnation, forget=True)
        await emptied(self.d)


@asynccontextmanager
async def storm(directory: Path, seed: int) -> AsyncIterator[Storm]:
    draw = random.Random(seed)
    members = cast()
    host_bytes = draw.choice([28, 34, 44, 80]) * MiB
    async with daemon(
        directory,
        reconnect_s=_RECONNECT_S,
        RESUME_TIMEOUT_S="30",
        devices=[12 * MiB, 4 * MiB],
        host_bytes=host_bytes,
        NVME_BYTES=str(draw.choice([6, 16, 200]) * MiB),
        CHECKPOINT_ROOT=str(directory / "checkpoints"),
        CHECKPOINT_FILE_BYTES=str(MiB),
    ) as d:
        yield Storm(d, draw, members)


async def _done(call: Awaitable[None]) -> bool:
    await call
    return True
