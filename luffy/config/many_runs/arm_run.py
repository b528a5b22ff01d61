"""One run among several: an arm of a comparison, or a point of a grid, with one seed."""

from collections.abc import Sequence
from dataclasses import dataclass

from luffy.config.experiment import ExperimentConfig, StageVisit, visits_of
from luffy.config.many_runs.grid import GridPoint
from luffy.config.settings import CONFIGURE
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.config.strict import FOR_IDENTITY, StrictModel

SHARED_NODES = ("prepare_data", "base", "evaluate_base")
"""The stages that all runs of a comparison have in common."""


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm with one seed."""

    arm: str
    seed: int
    config: ExperimentConfig
    point: GridPoint | None = None
    """What is tried; None: nothing, or what was chosen."""
    start: tuple[str, ...] = SHARED_NODES
    """The stages before it learns, in order."""

    @property
    def title(self) -> str:
        tried = f" ({self.point.text})" if self.point is not None and self.point.text else ""
        return f"{self.arm} {self.seed}{tried}"

    @property
    def folder(self) -> str:
        """Its name among the runs of one command."""
        return folder_of(self.arm, self.seed, self.point)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stages that the run needs, in order: no report, and no evaluation of earlier policies."""
        return (*self.start, *(visit.name for visit in learning_visits(self.config)), f"evaluate_{self.last}")

    @property
    def last(self) -> str:
        """The stage whose policy is the arm's result."""
        return [visit.name for visit in visits_of(self.config) if "policy" in STAGE_KINDS[visit.stage].provides][-1]


def folder_of(arm: str, seed: int, point: GridPoint | None = None) -> str:
    """`ArmRun.folder` of the run of `arm` with `seed` at `point`."""
    tried = "" if point is None else f".{point.number}"  # no arm has a dot in its name
    return f"{arm}{tried}-{seed}"


def learning_visits(config: ExperimentConfig) -> list[StageVisit]:
    """The stages after the base that make a policy, or the prompts or traces for one."""
    made = {"policy", "prompts", "traces"}
    return [
        visit
        for visit in visits_of(config)
        if visit.stage not in SHARED_NODES and made.intersection(STAGE_KINDS[visit.stage].provides)
    ]


def learns_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments that learn the same after the base."""
    return _settings(config, _learning(config))


def is_made_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments whose last policy, and its evaluation, are the same."""
    return _settings(config, ["prepare_data", "base", *_learning(config), "evaluate"])


def seeded(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    """The experiment in which everything after the base has that seed, named after it."""
    sections = {"sample": config.sample, "sft": config.sft, "rl": config.rl}
    own = {name: section.model_copy(update={"seed": seed}) for name, section in sections.items() if section is not None}
    return config.model_copy(update={"name": f"{config.name}.{seed}", **own})


def _learning(config: ExperimentConfig) -> list[str]:
    return [visit.stage for visit in learning_visits(config)]


def _settings(config: ExperimentConfig, stages: Sequence[str]) -> str:
    settings: list[StrictModel] = [CONFIGURE[stage](config) for stage in stages]
    if "sample" in stages:
        settings.append(config.expert_iteration)  # the weights that each round starts from
    return "\n".join(each.model_dump_json(context=FOR_IDENTITY) for each in settings)
