"""Answers to requests that aiohttp cannot parse, which reach no handler or middleware.

aiohttp answers them in plain text. Here they get the form of the service's other errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

log = logging.getLogger(__name__)


def answer_malformed(runner: web.AppRunner, refuse: Callable[[str], web.Response]) -> None:
    """Let the server of a runner, which is set up, answer malformed requests with `refuse`.

    Args: refuse: reason → response.
    """

    class Connection(web.RequestHandler):
        __slots__ = ()

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            # Only the parser's errors have this status.
            if status != HTTPStatus.BAD_REQUEST:
                return super().handle_error(request, status, exc, message)
            reason = f"the request is malformed: {' '.join((message or '').split())}"
            log.info("%s: %s", request.remote, reason)
            response = refuse(reason)
            response.force_close()
            return response

    class Server(web.Server):
        def __call__(self) -> web.RequestHandler:
            connection = super().__call__()
            connection.__class__ = Connection
            return connection

    assert runner.server is not None
    runner.server.__class__ = Server
