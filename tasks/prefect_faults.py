"""Handling of failures of Prefect: a line in the log. Prefect is only a view and may not end or delay a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def tolerating_prefect(what: str, level: int = logging.DEBUG) -> Iterator[list[Exception]]:
    """Log any error raised in the block as `what` and go on; yields a list that receives the error."""
    faults: list[Exception] = []
    try:
        yield faults
    except Exception as error:  # its client, its server and the network in between raise anything
        faults.append(error)
        logger.log(level, "%s: %s", what, error, exc_info=level == logging.DEBUG)
