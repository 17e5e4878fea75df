"""Where an exception that nobody foresaw ends the work that it came from, and nothing else.

Only around work that leaves no books half changed: what does must end the process, whose next life
begins with what can be verified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phaseloom.common.contract.errors import InternalError, PhaseloomError, unforeseen
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import Metric

log = logging.getLogger(__name__)


@contextmanager
def contained(metric: Metric, part: str) -> Iterator[None]:
    """Makes a typed error of one that is none of ours, logs its traceback and counts it.

    Args:   metric: that counts by part. part: few values.
    Raises: PhaseloomError: as it came. InternalError: in place of any other exception.
    """
    try:
        yield
    except PhaseloomError:
        raise
    except Exception as error:
        log.exception("unforeseen, in a %s", part)
        metrics.count(metric, part=part)
        raise InternalError(unforeseen(error).message) from error
