"""Which chains of stages make sense, by what the registry says of each stage."""

from collections.abc import Sequence
from functools import reduce

from luffy.config.experiment import ExperimentConfig
from luffy.config.stage_kinds import STAGE_KINDS, STAGE_ORDER

_START = ("prepare_data", "base")
"""What every chain starts with."""


def check_chain(config: ExperimentConfig) -> None:
    """Raise ValueError for stages in another order, without what they read, or without their sections."""
    policy = config.difficulty.policy if config.difficulty is not None else None
    expected = place_difficulty([stage for stage in STAGE_ORDER if stage in config.stages], policy)
    if config.stages != expected:
        raise ValueError(f"stages: must be in the order {', '.join(expected)}, each once")
    missing = [stage for stage in _START if stage not in config.stages]
    if missing:
        raise ValueError(f"stages: {', '.join(missing)} missing; every chain starts with {', '.join(_START)}")
    _check_roles(config)
    for stage in config.stages:
        for section in STAGE_KINDS[stage].sections:
            if reduce(getattr, section.split("."), config) is None:
                preset = "; method=NAME takes that of a preset" if section == "objective" else ""
                raise ValueError(f"{section}: missing; stage {stage} needs it{preset}")


def place_difficulty(stages: Sequence[str], policy: str | None) -> tuple[str, ...]:
    """The stages with `difficulty`, if they have it, directly after the one whose policy it measures."""
    others = [stage for stage in stages if stage != "difficulty"]
    if "difficulty" not in stages or policy not in others:
        return tuple(stages)
    place = others.index(policy) + 1
    return (*others[:place], "difficulty", *others[place:])


def _check_roles(config: ExperimentConfig) -> None:
    provided = set[str]()
    for stage in config.stages:
        kind = STAGE_KINDS[stage]
        for role in (*kind.inputs.values(), *kind.requires):
            if role not in provided:
                maker = next(name for name in STAGE_ORDER if role in STAGE_KINDS[name].provides)
                raise ValueError(f"stages: {stage} needs {maker} before it")
        provided.update(kind.provides)
