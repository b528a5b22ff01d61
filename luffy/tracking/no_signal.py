"""RL steps without a learning signal: every advantage is 0, or every group was dropped because of that.

What else the objective has, an entropy bonus above all, is then the whole gradient. AdamW normalises it and takes
full-size steps, however small it is.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

_ZERO = "batch/zero_advantage_share"
_UPDATES = "batch/optimizer_steps"
_ENTROPY = "actor/entropy_on_policy"
_NONE_SOLVED, _ALL_SOLVED = "batch/solve_none", "batch/solve_all"
_MOST = 0.5
"""Share of the steps above which there is advice."""


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
    if len(silent) <= _MOST * len(judged):
        return None
    found = f"in {len(silent)} of {len(judged)} steps every advantage was 0, so rewards taught the policy nothing"
    entropies = [step[_ENTROPY] for step in judged if _ENTROPY in step]
    if has_regularising_terms and entropies:
        found += (
            "; its entropy and KL terms alone moved it (entropy per token went from "
            f"{entropies[0]:.2f} to {entropies[-1]:.2f} nats)"
        )
    if _mean(silent, _ALL_SOLVED) > _mean(silent, _NONE_SOLVED):
        return f"{found}; most prompts were always solved: take harder ones, or stop earlier"
    return f"{found}; most prompts were never solved: begin with SFT, or take easier ones"


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(step.get(name, 0.0) for step in steps)
