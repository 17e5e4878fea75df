"""Error boundaries: an unexpected exception ends only the work that raised it.

Use a boundary only around work that leaves no records half changed. An exception in any other work
must end the process, which then restarts from state that it can verify.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phaseloom.common.contract.errors import PhaseloomError, to_exception, unexpected_error
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import Metric

log = logging.getLogger(__name__)


@contextmanager
def error_boundary(metric: Metric, part: str) -> Iterator[None]:
    """Convert an unexpected exception of the block to a PhaseloomError, and log and count it.

    Args:   metric: the counter, with the label `part`.
            part: the kind of work, for the label; one of few values.
    Raises: PhaseloomError: raised by the block. ResourceError: the machine is short of something.
            InternalError: replaces any other exception.
    """
    try:
        yield
    except PhaseloomError:
        raise
    except Exception as error:
        log.exception("unexpected error in a %s", part)
        metrics.count(metric, part=part)
        raise to_exception(unexpected_error(error)) from error
