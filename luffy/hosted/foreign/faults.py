"""Exceptions of an environment, each with one line for the other side."""


class Unusable(Exception):
    """The environment cannot be used here; the message is one line for the user."""


class TaskFault(Exception):
    """There is no such task, or it has changed; the message is one line for the user."""


class EpisodeFault(Exception):
    """The environment failed in one episode."""


def line_of(error: BaseException) -> str:
    """Type, message and cause of an exception in one line."""
    cause = f" ({line_of(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{cause}"
