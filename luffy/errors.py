"""The one exception family. A user's mistake is a `UserError`: one line on the terminal, exit code 2, no traceback.

To add one: subclass `UserError` when the person at the keyboard can fix it, `LuffyError` otherwise, and give it a
message that says what was found, where, what is allowed and what to do.
"""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_NO_SPACE = 73
"""`EX_CANTCREAT` of sysexits: a stage program met a full disk, on which it may have been unable to report the error."""
EXIT_TEMPORARY = 75
"""`EX_TEMPFAIL` of sysexits: a stage program failed for a reason that may have passed, or a scheduler's SIGTERM ended
it, or the run, cleanly. The same command continues."""
EXIT_INTERRUPTED = 130


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class LuffyError(Exception):
    """Base of every error raised on purpose by luffy."""

    exit_code = EXIT_FAILURE


class UserError(LuffyError):
    """A mistake that the user can fix; only the message is shown, without a traceback."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError, ValueError):
    """A configuration file or an override is wrong."""


class DataError(UserError, ValueError):
    """A data source is missing, unreadable or empty."""


class WorkspaceError(UserError):
    """The workspace cannot be used: read-only, full, or written by an incompatible version."""


class NoSpaceError(WorkspaceError):
    """The disk filled up while a stage program ran; its supervisor reports it with the exit code 2."""

    exit_code = EXIT_NO_SPACE


class StageFailed(LuffyError):
    """A stage program failed; carries its exit code, so that a user's mistake is still reported as one."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.temporary = temporary
        """Whether resuming at once may help: the stage was killed, or lost something it depends on."""

    @property
    def is_interruption(self) -> bool:
        """Whether the stage ended because it was asked to."""
        return self.exit_code in (EXIT_INTERRUPTED, EXIT_TEMPORARY)


class CheckpointError(LuffyError):
    """A checkpoint is incomplete, or does not belong to this run."""


class ClusterError(LuffyError):
    """A process of the cluster died or did not answer; the same command resumes the stage."""


class LostError(ClusterError):
    """A process, a machine or an endpoint is gone or silent, and may be back at the next attempt."""

    exit_code = EXIT_TEMPORARY


class EnvironmentFault(LuffyError):
    """An environment failed in too many episodes: a bug in it, or something that it needs is missing."""


class NumericalError(LuffyError):
    """Training produced a NaN or an infinity."""
