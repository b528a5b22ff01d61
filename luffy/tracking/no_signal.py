"""RL steps without a learning signal: every advantage is 0, and there is no demonstration to learn from.

What else the objective has, an entropy bonus above all, is then the whole gradient, and AdamW makes full steps of it
however small it is.
"""

from collections.abc import Mapping, Sequence

_ZERO = "batch/zero_advantage_share"
_OFF_POLICY = "batch/off_policy_token_share"
_ENTROPY = "actor/entropy_on_policy"
_MOST = 0.5
"""Share of the steps above which there is advice."""


def had_signal(step: Mapping[str, float]) -> bool | None:
    """Whether a step had something to learn from, by its metrics; None for a step without an update.

    Only for an objective that learns by advantages (`ObjectiveConfig.learns_by_advantage`).
    """
    if _ZERO not in step:
        return None
    return step[_ZERO] < 1.0 or step.get(_OFF_POLICY, 0.0) > 0.0


def advice_on_signal(steps: Sequence[Mapping[str, float]]) -> str | None:
    """What to do if most updates of an RL run had no signal; None if they had one."""
    updates = [step for step in steps if had_signal(step) is not None]
    silent = sum(not had_signal(step) for step in updates)
    if silent <= _MOST * len(updates):
        return None
    entropies = [step[_ENTROPY] for step in updates if _ENTROPY in step]
    drift = f": entropy per token went from {entropies[0]:.2f} to {entropies[-1]:.2f} nats" if entropies else ""
    return (
        f"in {silent} of {len(updates)} steps every advantage was 0, since all rollouts of each prompt had the same "
        f"reward, and only regularising terms moved the policy{drift}; begin with SFT, take easier prompts, or use a "
        "method that learns from traces"
    )
