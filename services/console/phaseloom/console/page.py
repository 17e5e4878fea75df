"""Serves the built front end from `static/`, as separate files or as one file with a recorded run.

The sources are in `services/console/web`; `make console` builds them. The built files are
committed, so neither a clone nor a wheel needs Node.
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from phaseloom.console.core.wire import Replay

PAGE, SCRIPT, STYLE = "index.html", "console.js", "console.css"
TYPES = {PAGE: "text/html", SCRIPT: "text/javascript", STYLE: "text/css"}
_SCRIPT_TAG = f'<script type="module" src="static/{SCRIPT}"></script>'
_STYLE_TAG = f'<link rel="stylesheet" href="static/{STYLE}">'
_REPLAY_ID = "replay"
"""Id of the element that holds a run. The script looks for it."""


@cache
def asset(name: str) -> bytes:
    """Return one built file of the page."""
    return (files(__package__) / "static" / name).read_bytes()


@cache
def compressed(name: str) -> bytes:
    return gzip.compress(asset(name), mtime=0)


def write_replay(replay: Replay, path: Path) -> None:
    """Write one self-contained page that shows a run: script, style and data included."""
    data = base64.b64encode(gzip.compress(msgspec.json.encode(replay), mtime=0)).decode()
    script, style = asset(SCRIPT).decode(), asset(STYLE).decode()
    # A script in a page ends at the first end tag, even inside a string.
    script = script.replace("</script", "<\\/script")
    page = asset(PAGE).decode()
    for tag in (_SCRIPT_TAG, _STYLE_TAG):
        assert page.count(tag) == 1, f"the page has {tag} once"
    page = page.replace(_STYLE_TAG, f"<style>{style}</style>")
    page = page.replace(
        _SCRIPT_TAG,
        f'<script type="text/plain" id="{_REPLAY_ID}">{data}</script>'
        f'<script type="module">{script}</script>',
    )
    path.write_text(page)
