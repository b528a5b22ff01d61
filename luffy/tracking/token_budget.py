"""How many tokens a training stage has sampled and learned from, and whether that was enough."""

from collections.abc import Iterable, Mapping

from luffy.tracking.metrics import MetricRow

_SPENT = ("rollout/tokens_drawn", "batch/response_tokens")


class TokenBudget:
    """Counts sampled tokens and learned response tokens from the metrics of each step, so a resumed stage ends where an
    undisturbed one does.
    """

    def __init__(self, limit: int | None, logged: Iterable[MetricRow]) -> None:
        """`limit` None never ends a stage; `logged` are the metrics of the steps before its checkpoint."""
        self._limit = limit
        self._spent = sum(tokens_spent(row) for row in logged)

    @property
    def is_over(self) -> bool:
        """Whether the tokens so far reach the limit."""
        return self._limit is not None and self._spent >= self._limit

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add the tokens of one step."""
        self._spent += tokens_spent(metrics)


def tokens_spent(metrics: Mapping[str, float]) -> float:
    """Tokens that a step sampled and response tokens that it learned from."""
    return sum(metrics.get(name, 0.0) for name in _SPENT)
