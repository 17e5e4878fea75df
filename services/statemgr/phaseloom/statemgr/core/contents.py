"""Bytes that are held once, whoever refers to them: the host copies of frozen ranks.

A *content* is immutable. It is found by what it is (BLAKE3 and length), not by who made it: ranks
whose state is equal refer to one content, and a rank that writes goes to another one, which leaves
the others' bytes untouched. It may also be the memory of a weights version.

Contents that are equal in part share that part: then a content is *composed*, of pieces of
extents that others hold, too, and of one that has what is its own. Nobody is anybody's base: an
extent stays while some content holds it, whoever made it.

Invariants (`validate`): every content has a user, and dies with its last one; users of different
tenants only share what the operator has registered as a frozen base, and no extent in which there
is anything else; what users of different jobs share cannot be written by any of them; content is in
host memory, on NVMe, or on its way between them, for all users alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import ContentState
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import MAX_PIECE_SOURCES
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.core.pieces import NOWHERE, Account, Pieces, Shared, account
from phaseloom.statemgr.core.residency import (
    ON_NVME,
    TRANSITIONS,
    InvalidTransition,
    Rank,
    State,
    Step,
    Wpg,
    is_spillable,
)

_HASH = re.compile(r"[0-9a-f]{64}")
_NOTHING = Shared(0, set())


def bases_of(configured: Mapping[str, list[str]]) -> dict[str, str]:
    """BLAKE3 → name, of what tenants may share.

    Raises: CallerError: something that is no hash, or one with two names.
    """
    names: dict[str, str] = {}
    for name, hashes in configured.items():
        for each in hashes:
            field = f"frozen_bases.{name}"
            if not _HASH.fullmatch(each):
                raise CallerError(
                    f"{each!r} is no BLAKE3 in hex",
                    field=field,
                    remedy="take the hash that `phaseloom state --json` tells of the content",
                )
            if names.setdefault(each, name) != name:
                raise CallerError(
                    f"{each} is {names[each]!r} already", field=field, remedy="give it one name"
                )
    return names


@dataclass(slots=True, eq=False)
class Content:
    number: int
    owner: DeploymentKey
    """Who made it; it may have left since."""
    applied: int
    """seq of the maker's state that these bytes are."""
    num_bytes: int
    table: TensorTable = field(repr=False)
    """The maker's layout."""
    digest: str
    """xxh3-128 in hex: what every load is verified by."""
    pieces: Pieces
    """Where it lies in host memory."""
    is_immutable: bool = False
    """No process has it mapped writable, or can."""
    version: VersionKey | None = None
    """The weights version whose memory it is, or was."""
    hash: str = ""
    """BLAKE3 in hex; empty: not known."""
    is_base: bool = False
    """Tenants share it: it was a registered base when they came to."""
    is_composed: bool = False
    """Some of its pieces lie in what was made for other contents."""
    is_compared: bool = False
    """What it has in common with the others that are here was looked for."""
    state: State = State.HOST
    users: list[Rank] = field(default_factory=list)

    @property
    def extent(self) -> int | None:
        """Whose beginning it is; None: it is on NVMe, or lies in several places."""
        return self.pieces.extent

    @property
    def extents(self) -> tuple[int, ...]:
        return self.pieces.extents

    def unplace(self) -> Pieces:
        """It is in host memory no more. Returns: where it lay."""
        pieces, self.pieces = self.pieces, NOWHERE
        self.is_composed = self.is_compared = False
        return pieces

    @property
    def extent_bytes(self) -> int:
        return self.num_bytes

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors

    @property
    def tenants(self) -> set[str]:
        return {rank.wpg.key.tenant for rank in self.users}

    @property
    def wpgs(self) -> list[Wpg]:
        return list(dict.fromkeys(rank.wpg for rank in self.users))

    @property
    def last_used(self) -> int:
        return max(wpg.last_used for wpg in self.wpgs)

    @property
    def next_use_s(self) -> float | None:
        """The earliest that is predicted of a user."""
        known = [wpg.next_use_s for wpg in self.wpgs if wpg.next_use_s is not None]
        return min(known, default=None)

    def __str__(self) -> str:
        return f"content {self.number} of {self.owner} at {self.applied}"


class Contents:
    """Every mutation goes through its methods; the shell moves the bytes."""

    def __init__(self, bases: Mapping[str, str]) -> None:
        """Args: bases: BLAKE3 → name, of what tenants may share."""
        self._bases = bases
        self._contents: dict[int, Content] = {}
        self._last = 0
        self._open: set[int] = set()
        """Extents of which tenants share something: there is nothing in them but what was
        registered."""
        self._lent: list[int] = []

    def add(
        self,
        rank: Rank,
        extent: int,
        version: VersionKey | None = None,
    ) -> Content:
        """What this rank's state is now, by its `applied` and `digest`; `attach` it."""
        self._last += 1
        content = Content(
            number=self._last,
            owner=rank.wpg.key,
            applied=rank.applied,
            num_bytes=rank.extent_bytes,
            table=rank.table,
            digest=rank.digest,
            pieces=Pieces.whole(extent, rank.extent_bytes),
            version=version,
        )
        self._contents[content.number] = content
        return content

    def adopt(self, content: Content, open_extents: Iterable[int] = ()) -> None:
        """One that the daemon before knew, without its users.

        Args: open_extents: as `open_of` said of it.
        """
        self._contents[content.number] = content
        self._last = max(self._last, content.number)
        self._open |= set(content.extents if content.is_base else open_extents)

    def attach(self, rank: Rank, content: Content) -> None:
        assert rank.content is None
        assert content.number in self._contents
        rank.content = content
        content.users.append(rank)

    def detach(self, rank: Rank) -> Content | None:
        """Returns the content where this was its last user: it is gone, free what it holds."""
        content = rank.content
        if content is None:
            return None
        rank.content = None
        content.users.remove(rank)
        if content.users:
            return None
        del self._contents[content.number]
        self._open &= {extent for each in self.all() for extent in each.extents}
        return content

    def is_known(self, content: Content) -> bool:
        return self._contents.get(content.number) is content

    def of_version(self, key: VersionKey, extent: int) -> Content | None:
        """The content that is the memory of this version."""
        return next(
            (c for c in self.all() if c.version == key and c.extent == extent),
            None,
        )

    def merge(self, content: Content, twin: Content) -> list[Rank]:
        """The users of `content` are users of its twin from now on. Returns them."""
        if len(content.tenants | twin.tenants) > 1:
            if not content.tenants <= twin.tenants:
                # Others of a tenant that has all of it now may refer to it.
                twin.is_compared = False
            twin.is_base = True
            self._open |= set(twin.extents)
        moved = list(content.users)
        for rank in moved:
            self.detach(rank)
            self.attach(rank, twin)
        return moved

    def twin(self, content: Content) -> Content | None:
        """Another content with the same bytes that its users may share, the oldest; None: none."""
        return next((c for c in self.all() if self._may_merge(c, content)), None)

    def _may_merge(self, first: Content, second: Content) -> bool:
        if first is second or not first.hash:
            return False
        is_equal = (first.hash, first.num_bytes) == (second.hash, second.num_bytes)
        is_shareable = first.is_immutable and second.is_immutable
        return is_equal and is_shareable and self._may_meet(first, second)

    def _may_meet(self, first: Content, second: Content) -> bool:
        if len(first.tenants | second.tenants) == 1:
            return True
        return self._is_registered(first) and self._is_registered(second)

    def _is_registered(self, content: Content) -> bool:
        """And there is nothing else in its memory: it was not composed before it was."""
        return content.hash in self._bases and not content.is_composed

    # --- equal in part ---

    def may_compose(self, content: Content) -> bool:
        """It can never change, is in host memory, and nobody else refers to its memory.

        What is registered stays in memory where there is nothing else: other tenants may come.
        """
        is_base = content.is_base or content.hash in self._bases
        return (
            self._is_source(content)
            and not is_base
            and not content.is_composed
            and content.extent is not None
            and self.holders(content.extent) == [content]
        )

    def sources_of(self, content: Content) -> list[Content]:
        """To whose memory it may refer: of two that could refer to each other the newer one does.
        The oldest first."""
        return [
            each
            for each in self.all()
            if each is not content
            and self._may_be_asked(content, each)
            and (each.number < content.number or not self.may_compose(each))
        ]

    def leaning(self, whole: Content) -> list[Content]:
        """Those that were compared before this one was here, and may refer to it: composed ones
        instead of what others have left to them."""
        if not self._is_source(whole) or whole.is_composed:
            return []
        is_never_composed = not self.may_compose(whole)
        held_whole = self._held_whole()

        def may_refer(content: Content) -> bool:
            if content.is_composed:
                return not held_whole.issuperset(content.extents)
            is_newer = is_never_composed or whole.number < content.number
            return is_newer and self.may_compose(content)

        return [each for each in self._compared_with(whole) if may_refer(each)]

    def may_lean(self, content: Content, whole: Content) -> bool:
        """As `leaning`, of a composed one."""
        is_between = content.is_composed and not whole.is_composed
        return is_between and content in self._compared_with(whole) and bool(self.left_to(content))

    def _compared_with(self, source: Content) -> list[Content]:
        """Those that could refer to its memory, but were compared with others only."""
        return [
            each
            for each in self.all()
            if each is not source
            and each.is_compared
            and self._is_source(each)
            and self._may_be_asked(each, source)
        ]

    def left_to(self, content: Content) -> list[int]:
        """Its extents to which no content refers whole."""
        held_whole = self._held_whole()
        return [extent for extent in content.extents if extent not in held_whole]

    def _held_whole(self) -> set[int]:
        return {extent for c in self.all() if not c.is_composed for extent in c.extents}

    def _is_source(self, content: Content) -> bool:
        is_here = self.is_known(content) and content.state is State.HOST
        return is_here and content.is_immutable and content.hash != ""

    def _may_be_asked(self, content: Content, source: Content) -> bool:
        is_allowed = self._is_registered(source) or len(content.tenants | source.tenants) == 1
        return is_allowed and self._is_source(source)

    @staticmethod
    def must_have_all(content: Content, source: Content) -> bool:
        """Whether it may refer only to what it has every tensor of: who refers to some of the
        memory is given all of it, and nobody of its tenant is known to have that."""
        return not content.tenants <= source.tenants

    def compose(self, content: Content, pieces: Pieces, sources: Iterable[Content]) -> Pieces:
        """It lies there from now on; hold each extent. Returns: where it lay, to give up.

        Args: sources: whose memory is some of that.
        """
        assert pieces.num_bytes == content.num_bytes
        for source in sources:
            if self._is_registered(source):
                self._open |= set(source.extents) & set(pieces.extents)
        before, content.pieces = content.pieces, pieces
        content.is_composed = True
        return before

    def move(self, content: Content, pieces: Pieces, extent: int, before: int) -> None:
        """The same bytes of an extent lie in another one from now on."""
        assert pieces.num_bytes == content.num_bytes
        content.pieces = pieces
        if before in self._open:
            self._open.add(extent)

    def holders(self, extent: int) -> list[Content]:
        """Who refers to something in it."""
        return [content for content in self.all() if extent in content.extents]

    def beside(self, content: Content) -> list[Content]:
        """The others that have some memory in common with it."""
        extents = set(content.extents)
        return [c for c in self.all() if c is not content and not extents.isdisjoint(c.extents)]

    def account(self) -> Account:
        """What of these contents is shared, by number."""
        return account([(content.number, content.pieces) for content in self.all()])

    def open_of(self, content: Content) -> list[int]:
        """Extents of it of which tenants share something."""
        return sorted(set(content.extents) & self._open)

    def place(self, content: Content, extent: int) -> None:
        """It lies there, and there alone."""
        content.pieces, content.is_composed = Pieces.whole(extent, content.num_bytes), False
        if content.is_base:
            self._open.add(extent)

    def lend(self, extent: int) -> None:
        """It is being filled, to be a content's."""
        self._lent.append(extent)

    def give_back(self, extent: int) -> None:
        self._lent.remove(extent)

    def all(self) -> list[Content]:
        """Oldest first."""
        return list(self._contents.values())

    def step(self, content: Content, step: Step) -> None:
        """Raises: InvalidTransition: the table does not have it."""
        following = TRANSITIONS.get((content.state, step))
        if following is None:
            raise InvalidTransition(f"{content} is {content.state}: no {step!r} from there")
        content.state = following

    def spillable(self, after_s: float | None = None) -> list[Content]:
        """Those that nothing needs now, as `Residency.spillable`; unordered."""
        return [
            content
            for content in self.all()
            if content.state is State.HOST
            and all(is_spillable(wpg) for wpg in content.wpgs)
            and (after_s is None or (content.next_use_s or math.inf) > after_s)
        ]

    def extents(self) -> list[int]:
        """Each as often as somebody holds it."""
        return self._lent + [extent for content in self.all() for extent in content.extents]

    def freed_by(self, leaving: Iterable[Content], num_holders: Callable[[int], int]) -> set[int]:
        """The extents that nobody holds any more, once these are in host memory no more.

        Args: num_holders: of an extent, whoever they are.
        """
        going = set(leaving)
        return {
            extent
            for extent, holders in self._by_extent().items()
            if going.issuperset(holders) and len(holders) == num_holders(extent)
        }

    def _by_extent(self) -> dict[int, list[Content]]:
        """As `holders`, of all that somebody refers to."""
        found: dict[int, list[Content]] = {}
        for content in self.all():
            for extent in content.extents:
                found.setdefault(extent, []).append(content)
        return found

    def nvme_used_bytes(self) -> int:
        """What is there in whole, or is being written there."""
        below = ON_NVME | {State.SPILLING}
        return sum(content.num_bytes for content in self.all() if content.state in below)

    def states(self, in_part: Mapping[int, Shared]) -> list[ContentState]:
        """Args: in_part: as `account` says."""
        return [
            ContentState(
                num_bytes=content.num_bytes,
                hash=content.hash,
                base=self._bases.get(content.hash, ""),
                users=sorted(str(rank.wpg.key) for rank in content.users),
                version=content.version,
                in_host=content.state not in ON_NVME,
                on_nvme=content.state in ON_NVME,
                model=content.users[0].model,
                shared_bytes=in_part.get(content.number, _NOTHING).num_bytes,
                shared_with=self._users_of(in_part.get(content.number, _NOTHING)),
            )
            for content in self.all()
        ]

    def _users_of(self, others: Shared) -> list[str]:
        users = (rank for number in others.numbers for rank in self._contents[number].users)
        return sorted({str(rank.wpg.key) for rank in users})

    def validate(self) -> None:
        """Raises: AssertionError: an invariant of this module does not hold."""
        for number, content in self._contents.items():
            assert content.number == number
            assert content.users, f"{content} has no user"
            assert all(rank.content is content for rank in content.users)
            assert len(set(content.users)) == len(content.users)
            assert content.digest, f"{content} is not whole"
            assert bool(content.pieces) is (content.state is not State.SPILLED), content
            assert content.pieces.num_bytes in {0, content.num_bytes}, f"{content} is in part"
            assert len(content.extents) <= MAX_PIECE_SOURCES, f"{content} is all over the place"
            jobs = {rank.wpg.key.job_key for rank in content.users}
            assert len(jobs) == 1 or content.is_immutable, f"{content} can be written by another"
            assert len(content.tenants) == 1 or content.is_base, f"{content} is shared"
        for extent, holders in self._by_extent().items():
            assert len(holders) == 1 or all(content.is_immutable for content in holders)
            tenants = {tenant for content in holders for tenant in content.tenants}
            assert len(tenants) == 1 or extent in self._open, f"extent {extent} is shared"
