"""Which stages a bench measures, and why not the others."""

from collections.abc import Sequence

from luffy.config import ExperimentConfig
from luffy.costs.workloads import record_name
from luffy.pipeline.chain.plan import StagePlan

_ELSEWHERE = "the engine openai generates on servers elsewhere, whose weights a bench would have to replace"
_NOT_TIMED = {
    "prepare_data": "it neither trains nor generates",
    "report": "it neither trains nor generates",
    "synthesize": "it generates with the teachers' models",
}


def choose(config: ExperimentConfig, plans: Sequence[StagePlan]) -> tuple[list[StagePlan], list[str]]:
    """The stages to measure of those that a run would make, and a line for each kind that cannot be.

    A kind is measured once, but for evaluations, whose policies answer at different lengths.
    """
    chosen: dict[str, StagePlan] = {}
    refusals: dict[str, str] = {}
    for plan in plans:
        stage = plan.node.stage
        if plan.action == "reuse":
            continue
        if (reason := _refusal(config, stage)) is not None:
            refusals.setdefault(stage, f"{stage}: not measured: {reason}")
        else:
            chosen.setdefault(record_name(plan.node), plan)
    return list(chosen.values()), list(refusals.values())


def _refusal(config: ExperimentConfig, stage: str) -> str | None:
    """Why a stage cannot be measured; None where it can."""
    generating = {
        "rl": config.rl,
        "evaluate": config.evaluation,
        "difficulty": config.measured_difficulty,
        "sample": config.sampled_traces,
    }
    if config.environment is not None and stage in generating:
        return "responses are episodes with an environment, whose tools and turns are not known beforehand"
    if stage == "base" and config.model.architecture is None:
        return "it trains nothing"
    section = generating.get(stage)
    if section is not None and section.engine == "openai":
        return _ELSEWHERE
    return _NOT_TIMED.get(stage)
