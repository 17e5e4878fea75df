"""nats-py without websockets: importing this module first cuts a service's start from 0.3 s to 0.2
s.

nats-py imports aiohttp for websockets if it is installed, which takes longer than all of nats-py's
other imports. Services use plain TCP. A later import of aiohttp works as usual.
"""

from __future__ import annotations

import sys

if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
