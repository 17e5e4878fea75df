"""Reports three steps to each tracker, in an environment that has them; `read` prints them as read
from the trackers' files."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from phaseloom.client.trackers import tracker

STEPS = [(0, {"reward": 0.0}), (1, {"reward": 0.5, "kl_k3:sum": 0.25}), (4, {"reward": 1.0})]
_BLOCK = 32_768
_HEADER = 7


def tensorboard(directory: Path) -> Iterator[tuple[int, str, float]]:
    from tensorboardX.proto.event_pb2 import Event

    (file,) = directory.iterdir()
    content, at = file.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        event = Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16
        yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)


def wandb(directory: Path) -> Iterator[tuple[int, str, float]]:
    """A file of LevelDB's log format, with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("offline-run-*/run-*.wandb")
    content, at, record = file.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, part = struct.unpack_from("<HB", content, at + 4)
        record += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if part not in (1, 4):  # neither a whole record nor the last part of one
            continue
        history = Record.FromString(record).history
        record = b""
        values = {item.key or item.nested_key[0]: item.value_json for item in history.item}
        for name, value in values.items():
            if not name.startswith("_"):
                yield int(values["_step"]), name, float(value)


def trackio(directory: Path) -> Iterator[tuple[int, str, float]]:
    with sqlite3.connect(directory / "curves.db") as database:
        for step, metrics in database.execute("select step, metrics from metrics order by step"):
            yield from ((step, name, value) for name, value in json.loads(metrics).items())


if __name__ == "__main__":
    if sys.argv[1] == "read":
        readers = {
            "tensorboard": tensorboard(Path("boards/first")),
            "wandb": wandb(Path("wandb")),
            "trackio": trackio(Path("trackio")),
        }
        print(json.dumps({name: [*values] for name, values in readers.items()}))
    else:
        logs = [tracker(target, "first") for target in sys.argv[1:]]
        for step, values in STEPS:
            for log in logs:
                log(step, values)
