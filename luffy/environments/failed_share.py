"""The share of episodes whose environment may fail before the stage ends (`environment.limits.max_failed_share`)."""

from collections.abc import Sequence

from luffy.config.environment import EpisodeLimits
from luffy.errors import EnvironmentFault
from luffy.types import FinishReason

FEWEST_EPISODES = 32
"""A running count is treated as at least this many episodes: one failure among the first few says little."""


def refuse_failures(reasons: Sequence[FinishReason], limits: EpisodeLimits) -> None:
    """Raise EnvironmentFault when the environment failed in more than the allowed share of these episodes."""
    _refuse(reasons.count(FinishReason.ENVIRONMENT_ERROR), len(reasons), len(reasons), limits)


class FailedShare:
    """Counts the episodes of a suite, or of a teacher, batch by batch."""

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._failed = 0
        self._episodes = 0

    def add(self, failed: Sequence[bool]) -> None:
        """Count a batch, given for each episode whether its environment failed.

        Raises EnvironmentFault when more than the allowed share of all episodes so far failed. A batch without
        failures never raises, so a resumed stage can continue once the environment is repaired.
        """
        self._failed += sum(failed)
        self._episodes += len(failed)
        _refuse(self._failed, self._episodes, max(self._episodes, FEWEST_EPISODES), self._limits)


def _refuse(failed: int, episodes: int, compared: int, limits: EpisodeLimits) -> None:
    if failed > limits.max_failed_share * compared:
        raise EnvironmentFault(
            f"the environment failed in {failed} of {episodes} episodes (the log has its exceptions); "
            f"allowed is a share of {limits.max_failed_share:g} (environment.limits.max_failed_share)"
        )
