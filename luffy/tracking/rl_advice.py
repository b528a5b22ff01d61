"""What to look at after an RL run in which most rollouts could not be read, or most steps had no learning signal."""

from collections.abc import Mapping, Sequence

from luffy.config.objective import ObjectiveConfig
from luffy.tracking.no_signal import advice_on_signal
from luffy.tracking.unanswered import advice_on_rollouts


def advice_on_rl(objective: ObjectiveConfig, steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Lines of advice, given the metrics of all steps; none for a run without such findings."""
    found = [advice_on_rollouts(steps)]
    if objective.learns_by_advantage:
        found.append(advice_on_signal(steps, has_regularising_terms=objective.has_regularising_terms))
    return [text for text in found if text is not None]
