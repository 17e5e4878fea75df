"""The calls of the Tinker API, under `/api/v1`."""

from phaseloom.gateway.tinker import retrieving, sampling, saving, sessions, training

routes = (
    *sessions.routes,
    *training.routes,
    *saving.routes,
    *sampling.routes,
    *retrieving.routes,
)
"""All routes of the Tinker API, for an aiohttp application."""
