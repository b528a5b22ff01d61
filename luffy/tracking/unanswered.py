"""Advice for the case that most responses have no answer in a form that the grader can read."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from luffy.types import Outcome

UNREAD = (Outcome.NO_ANSWER, Outcome.UNPARSABLE)
_UNREAD_SHARES = tuple(f"reward/{outcome}_share" for outcome in UNREAD)
_TRUNCATED = "rollout/truncated_share"
MOST = 0.5
"""Share of the responses above which there is advice."""


def advice_on_responses(what: str, unread: float, truncated: float, limit: str) -> str | None:
    """What to check if most responses have no readable answer; None if they have one.

    `unread` and `truncated` are shares of the responses, and `limit` is the setting that cut them off.
    """
    if unread <= MOST:
        return None
    found = f"{what}: {100 * unread:.0f} % of the responses have no answer that the grader can read"
    if truncated > MOST:
        return f"{found}, and {100 * truncated:.0f} % were cut off; does the prompt ask for a box? Is {limit} too low?"
    return f"{found}; does the prompt ask for the form that it reads (for mathematics a box)?"


def advice_on_rollouts(steps: Sequence[Mapping[str, float]]) -> str | None:
    """The same for the rollouts of an RL run, given the metrics of its steps."""
    judged = [step for step in steps if all(name in step for name in (*_UNREAD_SHARES, _TRUNCATED))]
    if not judged:
        return None
    unread = fmean(sum(step[name] for name in _UNREAD_SHARES) for step in judged)
    truncated = fmean(step[_TRUNCATED] for step in judged)
    return advice_on_responses("rollouts", unread, truncated, "rl.max_response_tokens")
