"""What happens when Prefect fails: a line in the log. It is a view, and no fault of it may end or delay a training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def tolerating_prefect(what: str, level: int = logging.DEBUG) -> Iterator[list[Exception]]:
    """Log any error raised inside as `what` and go on; yields a list that then holds the error."""
    faults: list[Exception] = []
    try:
        yield faults
    except Exception as error:
        faults.append(error)
        logger.log(level, "%s: %s", what, error, exc_info=level == logging.DEBUG)
