"""The predicted time and GPU-hours of each stage that a run would make, from measurements alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luffy.config import ExperimentConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings
from luffy.costs.earlier_runs import earlier_times
from luffy.costs.held_out_times import measured_by, num_measurements, validation_of
from luffy.costs.stage_times import StageTimes, read_times
from luffy.costs.workloads import record_name, this_machine, workload_of
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.machine.gpus import detected_gpus, gpus_of_stage
from luffy.pipeline.workspace import Workspace

_SECONDS_AN_HOUR = 3600.0
FindTimes = Callable[[StagePlan], StageTimes | None]


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Predicted time and GPU-hours of one stage."""

    node: str
    seconds: float | None
    """None: no measurement applies."""
    gpus: int
    source: str
    """Where the time comes from; for a stage without a time, empty."""

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.gpus * self.seconds / _SECONDS_AN_HOUR


def forecast(config: ExperimentConfig, plans: Sequence[StagePlan], workspace: Workspace) -> list[StageForecast]:
    """The forecast of every stage, from `luffy bench` or from finished stages with the same workload."""
    return forecast_from(config, plans, known_times(config, plans, workspace))


def known_times(config: ExperimentConfig, plans: Sequence[StagePlan], workspace: Workspace) -> FindTimes:
    """Finds what the workspace knows about a stage: the newest bench of its workload, else an earlier stage."""
    nodes, machine = [plan.node for plan in plans], this_machine()

    def find(plan: StagePlan) -> StageTimes | None:
        workload = workload_of(config, nodes, plan.node, machine)
        measured = read_times(workspace, record_name(plan.node), workload.key)
        return measured or earlier_times(workspace, workload, plan.node.name)

    return find


def forecast_from(config: ExperimentConfig, plans: Sequence[StagePlan], find: FindTimes) -> list[StageForecast]:
    """The forecast of every stage from the times that `find` returns for those that would run."""
    has_gpus = bool(detected_gpus())
    return [_of_stage(config, plan, find, gpus_of_stage(config, plan.node.stage) if has_gpus else 0) for plan in plans]


def _of_stage(config: ExperimentConfig, plan: StagePlan, find: FindTimes, gpus: int) -> StageForecast:
    name = plan.node.name
    if plan.action == "reuse":
        return StageForecast(name, 0.0, gpus, "reused")
    times = find(plan)
    units = None if times is None else _units_left(plan, times)
    if times is None or units is None:
        return StageForecast(name, None, gpus, "")
    seconds, validation_s = times.seconds(units, _further_saves(config, plan, units)), _validation_s(plan, times, units)
    if validation_s is None:
        return StageForecast(name, seconds, gpus, f"{times.source} (without validation)")
    return StageForecast(name, seconds + validation_s, gpus, times.source)


def _validation_s(plan: StagePlan, times: StageTimes, units: int) -> float | None:
    """Seconds of all measurements of held-out accuracy; None where one of that kind has never been measured."""
    validation = validation_of(plan.node.settings)
    if validation is None:
        return 0.0
    if times.validation_s is None or times.validation != measured_by(validation):
        return None
    return times.validation_s * num_measurements(validation.schedule.every, plan.step, plan.step + units)


def _units_left(plan: StagePlan, times: StageTimes) -> int | None:
    """Steps or responses that the stage still has to make; None where their number is unknown."""
    total = times.num_units
    if isinstance(plan.node.settings, RLSettings):
        total = plan.node.settings.rl.steps
    elif isinstance(plan.node.settings, BaseSettings) and plan.node.settings.base is not None:
        total = plan.node.settings.base.steps
    if times.unit_s == 0:
        return 0
    return None if total is None else max(0, total - plan.step)


def _further_saves(config: ExperimentConfig, plan: StagePlan, units: int) -> int:
    """Checkpoints before the last step: RL writes one more there, `base` and `sft` do not."""
    checkpoint, settings = config.execution.checkpoint, plan.node.settings
    every = {RLSettings: checkpoint.rl_every, SFTSettings: checkpoint.sft_every, BaseSettings: checkpoint.base_every}
    return max(0, units - 1) // every[type(settings)] if type(settings) in every else 0
