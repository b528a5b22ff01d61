"""Checks of the order of stages in a chain, from the stage registry."""

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
                if section == "objective" and config.method is not None:
                    raise ValueError(
                        f"method: {config.method} has no objective, and stage {stage} needs one; "
                        f"choose another method, or a chain without {stage}"
                    )
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


def difficulty_has_its_policy_and_its_reader(config: ExperimentConfig) -> None:
    """`difficulty` measures a policy of the chain, for RL."""
    if "difficulty" in config.stages and "rl" not in config.stages:
        raise ValueError("stages: difficulty has no effect without rl, the only stage that reads its prompts")
    if config.measured_policy == "sft" and "sft" not in config.stages:
        raise ValueError("difficulty.policy: sft needs the stage sft in the chain; use base")


def complement_suits_rl(config: ExperimentConfig) -> None:
    """`data.rl: complement` has no traces and no measured difficulty."""
    if config.data.rl != "complement" or "rl" not in config.stages or config.objective is None:
        return
    if "difficulty" in config.stages:
        raise ValueError(
            "data.rl: complement has prompts that the stage difficulty does not measure; remove one of the two"
        )
    group = config.objective.group
    uses_traces = group.off_policy > 0 or group.hint is not None or group.anchor is not None
    if uses_traces or config.objective.interleaved_sft is not None:
        raise ValueError(
            "data.rl: complement has prompts without traces, from which the method learns; use train, or a method "
            "that learns from rollouts only (on_policy)"
        )


def rounds_sample_and_train(config: ExperimentConfig) -> None:
    """More than one round needs SFT."""
    if config.expert_iteration.rounds > 1 and "sample" in config.stages and "sft" not in config.stages:
        raise ValueError(
            f"expert_iteration.rounds {config.expert_iteration.rounds} has no effect without the stage sft, which "
            "learns from what a round has sampled; set it to 1 or add sft"
        )


def base_has_a_corpus(config: ExperimentConfig) -> None:
    """A base policy is trained here if and only if `model.architecture` describes it."""
    if config.model.architecture is not None and (config.base is None or config.data.corpus is None):
        raise ValueError("a base policy trained from scratch needs base (its training) and data.corpus (its text)")
    if config.model.architecture is None and (config.base is not None or config.data.corpus is not None):
        origin = next(name for name in ("path", "package", "endpoint") if getattr(config.model, name) is not None)
        raise ValueError(f"base and data.corpus have no effect with model.{origin}; remove them")
