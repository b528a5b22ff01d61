"""What to look at after a run: most responses could not be read, or most steps had no learning signal.

In an RL step without a signal every advantage is 0, or every group was dropped because of that. What else the objective
has, an entropy bonus above all, is then the whole gradient. AdamW normalises it and takes full-size steps, however
small it is.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from luffy.config.objective import ObjectiveConfig
from luffy.types import Outcome

UNREAD = (Outcome.NO_ANSWER, Outcome.UNPARSABLE)
_UNREAD_SHARES = tuple(f"reward/{outcome}_share" for outcome in UNREAD)
_TRUNCATED = "rollout/truncated_share"
_ZERO = "batch/zero_advantage_share"
_UPDATES = "batch/optimizer_steps"
_ENTROPY = "actor/entropy_on_policy"
_NONE_SOLVED, _ALL_SOLVED = "batch/solve_none", "batch/solve_all"
MOST = 0.5
"""Share of the responses, or of the steps, above which there is advice."""


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


def had_signal(step: Mapping[str, float]) -> bool | None:
    """Whether rewards taught the policy anything in a step, by its metrics; None for a row that is no RL step.

    Only for an objective that learns by advantages alone (`ObjectiveConfig.learns_by_advantage`).
    """
    if step.get(_UPDATES) == 0.0:
        return False
    return step[_ZERO] < 1.0 if _ZERO in step else None


def advice_on_signal(steps: Sequence[Mapping[str, float]], *, has_regularising_terms: bool) -> str | None:
    """What to do if most steps of an RL run had no signal; None if they had one."""
    judged = [step for step in steps if had_signal(step) is not None]
    silent = [step for step in judged if not had_signal(step)]
    if len(silent) <= MOST * len(judged):
        return None
    found = f"in {len(silent)} of {len(judged)} steps every advantage was 0, so rewards taught the policy nothing"
    entropies = [step[_ENTROPY] for step in judged if _ENTROPY in step]
    if has_regularising_terms and entropies:
        found += (
            "; its entropy and KL terms alone moved it (entropy per token went from "
            f"{entropies[0]:.2f} to {entropies[-1]:.2f} nats)"
        )
    none, all_of_them = (fmean(step.get(name, 0.0) for step in silent) for name in (_NONE_SOLVED, _ALL_SOLVED))
    if all_of_them > none:
        return f"{found}; most prompts were always solved: take harder ones, or stop earlier"
    return f"{found}; most prompts were never solved: begin with SFT, or take easier ones"


def advice_on_rl(objective: ObjectiveConfig, steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Lines of advice, given the metrics of all steps; none for a run without such findings."""
    found = [advice_on_rollouts(steps)]
    if objective.learns_by_advantage:
        found.append(advice_on_signal(steps, has_regularising_terms=objective.has_regularising_terms))
    return [text for text in found if text is not None]
