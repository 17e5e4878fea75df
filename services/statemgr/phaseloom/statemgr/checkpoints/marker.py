"""The marker of a checkpoint: which operation wrote it, and its files' checksums."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES

MARKER_FILE = "operation.json"
BLOCK_BYTES = 1024 * 1024
_FIELD = b',"checksum":"'


class FileSums(msgspec.Struct, frozen=True):
    num_bytes: int
    block_bytes: int
    blocks: str
    """The xxh3-64 of each block of the file, in hex, concatenated."""

    def of_block(self, number: int) -> bytes:
        digits = 2 * CHECKSUM_BYTES
        return bytes.fromhex(self.blocks[number * digits : (number + 1) * digits])

    @property
    def is_whole(self) -> bool:
        if self.block_bytes <= 0 or self.num_bytes < 0:
            return False
        num_blocks = -(-self.num_bytes // self.block_bytes)
        return len(self.blocks) == 2 * CHECKSUM_BYTES * num_blocks


class Marker(msgspec.Struct, frozen=True):
    """The content of a checkpoint's `operation.json`."""

    operation_id: str
    result: SaveStateResult
    """The answer to the operation."""
    seq: int
    """The seq of the last mutating operation in the checkpoint."""
    number: int
    """Increases with each checkpoint of the deployment."""
    keep: int
    """The `keep` of the `save_state`; 0: later saves never remove the checkpoint."""
    files: dict[str, FileSums]
    model: str = ""
    """See `SavedCheckpoint.model`."""
    adapter: Adapter | None = None

    def encode(self) -> bytes:
        """Encode as JSON whose last field is a checksum of everything before it."""
        body = msgspec.json.encode(self)
        return body[:-1] + _signature(body)


def decode_marker(text: bytes) -> Marker:
    """Decode a marker file.

    Raises: ValueError: the text is not a marker, or its checksum does not match.
    """
    body = text[: -len(_signature(b""))] + b"}"
    if not text.endswith(_signature(body)):
        raise ValueError("its checksum does not match")
    try:
        marker = msgspec.json.decode(body, type=Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(sums.is_whole for sums in marker.files.values()):
        raise ValueError("checksums of some blocks are missing")
    return marker


def _signature(body: bytes) -> bytes:
    """The field that ends the JSON: the xxh3-128 of the body, in hex."""
    return _FIELD + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def superseded(markers: Iterable[tuple[str, Marker]], keep: int, needed: set[str]) -> list[str]:
    """The checkpoints to remove so that only the newest `keep` of the removable ones stay.

    Args: markers: (name, marker) of each checkpoint; those with a `keep` of 0 are not removable.
          needed: names that stay in any case; they count among the newest.
    """
    may_go = [(marker.number, name) for name, marker in markers if marker.keep]
    newest = sorted(may_go, reverse=True)
    return [name for _, name in newest[keep:] if name not in needed]
