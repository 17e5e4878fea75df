"""nats-py without websockets: a service that imports this module first starts in 0.2 s, not 0.3.

nats-py imports aiohttp for websockets wherever it is installed, which takes longer than all that a
service needs of it. Services speak plain TCP with the server. Whoever imports aiohttp later gets it
as usual.
"""

from __future__ import annotations

import sys

if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
