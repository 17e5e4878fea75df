"""The calls of the Tinker API, under `/api/v1`."""

from phaseloom.gateway.tinker import retrieving, sampling, saving, sessions, training

routes = (
    *sessions.routes,
    *training.routes,
    *saving.routes,
    *sampling.routes,
    *retrieving.routes,
)
"""All of them, for an application of aiohttp."""
