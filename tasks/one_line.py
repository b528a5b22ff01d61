"""Errors that luffy explains are one line in Prefect's logs, as on the terminal, without a traceback."""

import logging

from luffy.errors import LuffyError

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


class OneLine(logging.Filter):
    """Replaces the traceback of a `LuffyError` by its message; other failures keep theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, LuffyError):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


_ONE_LINE = OneLine()


def explain_in_one_line() -> None:
    """Install the filter for all runs of this process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_ONE_LINE)  # adding it again changes nothing
