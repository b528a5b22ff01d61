"""What a run will cost: a few steps of each stage by its real program, multiplied to the whole experiment.

Data and starting policy are made first, as the run makes them, and stay for the run. Every other stage runs with
shortened settings in a scratch folder, on those of its inputs that are finished, and its results are deleted. So
responses have the lengths, and the verdicts, that the present policy gives them, which training changes.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from luffy.config import ExperimentConfig
from luffy.config.evaluation import HeldOutSettings
from luffy.config.settings import (
    DifficultySettings,
    EvaluateSettings,
    RLSettings,
    SampleSettings,
    SFTSettings,
    StageSettings,
)
from luffy.data.parquet import read_prompts, suite_files, write_prompts
from luffy.errors import EXIT_INTERRUPTED, LuffyError
from luffy.pipeline.events import EVENTS_FILE, Event, EventReader
from luffy.pipeline.experiment import Experiment, ExperimentRun, StageObserver, open_experiment
from luffy.pipeline.gpus import detected_gpus, gpus_of_stage, own_gpus, trains_here
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.supervise import stage_command, supervise
from luffy.pipeline.workspace import Workspace
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics, training_rows
from luffy.tracking.step_times import StepTimes, step_times

MADE_FIRST = ("prepare_data", "base")
"""The stages that are made as the run makes them."""
_STEP, _VALIDATION = "perf/step_s", "perf/validation_s"
_MEMORY = {"perf/peak_memory_gib": "", "perf/peak_gpu_memory_gib": " on the GPU"}
Generation = EvaluateSettings | DifficultySettings | SampleSettings
"""Settings of the stages in which a finished model answers prompts."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one whole stage."""

    node: str
    seconds: float | None
    """None: unknown, for the reason in `words`."""
    words: str
    """What was measured, or why nothing was."""
    state: Literal["finished", "measured", "failed", "unknown"] = "unknown"
    gpus: int = 0
    """GPUs that it takes on this machine."""
    memory: str = ""
    """Peak memory in words; empty where the stage does not log it."""
    times: StepTimes | None = None
    """Where the time of the measured steps went; None for a stage that does not train."""

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.gpus * self.seconds / 3600


@dataclass(frozen=True, slots=True)
class Measured:
    """A program that has ended."""

    wall_s: float
    """From its start to its end."""
    rows: Sequence[MetricRow]
    progress: Sequence[Event]


@contextmanager
def open_bench(
    config: ExperimentConfig, workspace: Workspace, steps: int, observer: StageObserver
) -> Iterator["Bench"]:
    """Make data and starting policy, which `observer` watches; a second bench in the workspace waits for this one.

    Raises UserError or StageFailed where they cannot be made. `steps` is the number of steps to measure, at least 1.
    """
    workspace.prepare()
    folder = workspace.root / "bench"
    folder.mkdir(exist_ok=True)
    with stage_lock(folder):
        for left in folder.glob("scratch-*"):  # by a bench that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder) as name:
            experiment, scratch = open_experiment(config, workspace), Path(name)
            run = ExperimentRun(experiment, scratch / "run")  # its record is not one of the workspace's runs
            for stage in MADE_FIRST:
                run.execute(stage, observer)
            yield Bench(experiment, scratch, steps)


class Bench:
    """Measures the stages of one experiment whose data and starting policy are finished."""

    def __init__(self, experiment: Experiment, scratch: Path, steps: int) -> None:
        self._experiment = experiment
        self._execution = experiment.config.execution
        self._plans = {plan.node.name: plan for plan in experiment.plan()}
        self._scratch = scratch
        self._steps = steps
        self._has_gpus = bool(detected_gpus())

    def costs(self) -> Iterator[StageCost]:
        """The cost of each stage of the chain, in order, each as soon as it is measured.

        Stages of one kind with the same inputs, as evaluations of policies that have yet to be trained, are measured
        once.
        """
        known: dict[object, StageCost] = {}
        for plan in self._plans.values():
            inputs = {}
            for entry, provider in plan.node.inputs.items():
                # The newest finished result of the stages that lead there.
                source = self._plans[provider]
                while source.action != "reuse" and entry in source.node.inputs:
                    source = self._plans[source.node.inputs[entry]]
                inputs[entry] = source.directory
            kind = plan.node.stage, plan.action == "reuse" and plan.directory, *inputs.values()
            if kind in known:
                cost = replace(known[kind], node=plan.node.name, words=f"as {known[kind].node}")
            else:
                gpus = gpus_of_stage(self._experiment.config, plan.node.stage) if self._has_gpus else 0
                cost = replace(self._cost(plan, inputs), gpus=gpus)
            known.setdefault(kind, cost)
            yield cost

    def _cost(self, plan: StagePlan, inputs: Mapping[str, Path]) -> StageCost:
        name, settings = plan.node.name, plan.node.settings
        if plan.action == "reuse":
            return StageCost(name, finished_manifest(plan.directory).total_s, "finished", "finished")
        try:
            if isinstance(settings, SFTSettings | RLSettings):
                return self._training(plan, settings, inputs)
            if isinstance(settings, Generation):
                return self._generation(plan, settings, inputs)
        except LuffyError as failure:
            if failure.exit_code == EXIT_INTERRUPTED:
                raise
            return StageCost(name, None, f"not measured: {str(failure).splitlines()[0]}", "failed")
        return StageCost(name, None, "not measured: it neither trains nor generates with the policy")

    def _training(self, plan: StagePlan, settings: SFTSettings | RLSettings, inputs: Mapping[str, Path]) -> StageCost:
        """The first steps do not count: they are slower, or carry fewer partial rollouts; with rollouts ahead of the
        trainer the last ones generate nothing."""
        checkpoint, name = self._execution.checkpoint, plan.node.name
        if isinstance(settings, RLSettings):
            if settings.rl.engine == "openai":
                return StageCost(name, None, _ELSEWHERE)
            ahead = settings.rl.staleness_bound
            steps = self._steps + 1 + 2 * ahead
            measured = self._run(plan, shortened(settings, steps), inputs, save_every=steps)
            return training_cost(name, measured, ahead, settings.rl.steps, settings, checkpoint.rl_every)
        steps = self._steps + 1
        measured = self._run(plan, shortened(settings, steps), inputs, save_every=max(1, steps - 1))
        whole = settings.sft.steps
        # Their number may depend on traces that have yet to be made.
        if whole is None and self._plans[plan.node.inputs["data"]].action == "reuse":
            from luffy.data.splits import read_demonstrations  # loads transformers

            chosen = read_demonstrations(inputs["data"], settings.sft.num_traces, settings.seed)
            whole = settings.sft.num_steps(sum(len(prompt.traces) for prompt in chosen))
        return training_cost(name, measured, 0, whole, settings, checkpoint.sft_every)

    def _generation(self, plan: StagePlan, settings: Generation, inputs: Mapping[str, Path]) -> StageCost:
        data, folder = inputs["data"], self._scratch / "data"
        engine: str | None
        if isinstance(settings, EvaluateSettings):
            evaluation = settings.evaluation
            engine, files = evaluation.engine, suite_files(data, evaluation.only)
            samples = {
                name: sum(evaluation.protocol(name, decoding).num_samples for decoding in evaluation.decodings)
                for name in files
            }
        else:
            answers = settings.difficulty if isinstance(settings, DifficultySettings) else settings.sample
            engine, files = answers.engine, {"train": data / "train.parquet"}
            samples = {"train": answers.num_samples}
        if engine == "openai":
            return StageCost(plan.node.name, None, _ELSEWHERE)
        batch = self._execution.vllm.max_num_seqs if engine == "vllm" else self._execution.rollout_batch_size
        count, every = some_problems(data, files, samples, batch, folder)
        try:
            measured = self._run(plan, settings, {**inputs, "data": folder}, save_every=1)
        finally:
            shutil.rmtree(folder)
        busy_s = measured.progress[-1].time - measured.progress[0].time
        fixed_s, each_s = measured.wall_s - busy_s, busy_s / count
        words = f"{every:,} x {each_s:.3f} s a response ({count:,} measured) + {fixed_s:.1f} s once"
        return StageCost(plan.node.name, fixed_s + every * each_s, words, "measured")

    def _run(self, plan: StagePlan, settings: StageSettings, inputs: Mapping[str, Path], save_every: int) -> Measured:
        """Run the stage's program to its end; raises StageFailed. What it wrote is deleted."""
        out, config = self._scratch / plan.node.name, self._experiment.config
        out.mkdir()
        saves = {"sft_every": save_every, "rl_every": save_every}
        checkpoint = self._execution.checkpoint.model_copy(update=saves)
        whole = self._experiment.job(plan)  # its layers are compiled where the whole stage repays it
        job = whole.model_copy(
            update={
                "settings": settings,
                "inputs": {name: str(folder) for name, folder in inputs.items()},
                "extends": None,
                "execution": whole.execution.model_copy(update={"checkpoint": checkpoint}),
                "tracking": type(config.tracking)(),  # no record of it elsewhere
            }
        )
        write_job(out / JOB_FILE, job)
        gpus = gpus_of_stage(config, plan.node.stage)
        try:
            with own_gpus(gpus, fewer=trains_here(config, plan.node.stage)) as environment:
                began, command = time.monotonic(), stage_command(plan.node.stage, out)
                supervise(command, out, on_event=lambda event: None, environment=environment)
                wall_s = time.monotonic() - began
            progress = [event for event in EventReader(out / EVENTS_FILE).read() if event.kind == "progress"]
            return Measured(wall_s, read_metrics(out / METRICS_FILE), progress)
        finally:
            shutil.rmtree(out)


_ELSEWHERE = "not measured: its responses come from servers elsewhere, and would be asked for twice"


def shortened(settings: SFTSettings | RLSettings, steps: int) -> StageSettings:
    """The same stage with so many steps, and with its validation before the first and after the last of them."""
    validation: HeldOutSettings | None = settings.validation
    if validation is not None:
        at_the_ends = {"every": steps, "keep_best": None, "patience": None}
        validation = validation.model_copy(update={"schedule": validation.schedule.model_copy(update=at_the_ends)})
    if isinstance(settings, SFTSettings):
        sft = settings.sft.model_copy(update={"steps": steps, "epochs": None, "max_tokens": None})
        return settings.model_copy(update={"sft": sft, "validation": validation})
    # Steps in which the critic alone learns are few in a run, and would be all that is measured.
    critic = settings.rl.critic and settings.rl.critic.model_copy(update={"warmup_steps": 0})
    rl = settings.rl.model_copy(update={"steps": steps, "max_tokens": None, "critic": critic})
    return settings.model_copy(update={"rl": rl, "validation": validation})


def training_cost(
    node: str, measured: Measured, ahead: int, steps: int | None, settings: SFTSettings | RLSettings, save_every: int
) -> StageCost:
    """The cost of `steps` steps (None: unknown), with rollouts up to `ahead` steps ahead of the trainer.

    What remains of the program's time after its steps, its one checkpoint and its validations is spent once: start,
    loading, the excess of the first steps, export, hashes.
    """
    rows, save_s = training_rows(measured.rows), 0.0
    times = step_times(rows[1 + ahead : len(rows) - ahead], measured.rows)
    assert times is not None
    step_s = times.step_s
    validations = [row[_VALIDATION] for row in measured.rows if _VALIDATION in row]
    if len(measured.progress) >= 2:
        # The checkpoint comes before the last report of progress: the time between two reports, without the steps.
        before, last = measured.progress[-2:]
        between = [row for row in measured.rows if before.step < row["step"] <= last.step]
        spent = sum(row.get(_STEP, 0.0) + row.get(_VALIDATION, 0.0) for row in between)
        save_s = max(0.0, last.time - before.time - spent)
    fixed_s = max(0.0, measured.wall_s - len(rows) * step_s - save_s - sum(validations))
    peaks = {where: max(row.get(name, 0.0) for row in rows) for name, where in _MEMORY.items()}
    memory = ", ".join(f"{peak:.2f} GiB{where}" for where, peak in peaks.items() if peak)
    if steps is None:
        words = f"not known: steps of {step_s:.2f} s, but how many of them depends on traces that are yet to be made"
        return StageCost(node, None, words, memory=memory, times=times)
    # The last step of RL is followed by a checkpoint, that of SFT is not.
    saves = -(-steps // save_every) if isinstance(settings, RLSettings) else (steps - 1) // save_every
    parts = [(steps, step_s, "step"), (saves, save_s, "checkpoint")]
    if settings.validation is not None:
        every = settings.validation.schedule.every
        parts.append((1 + -(-steps // every), fmean(validations), "validation"))
    counted = " + ".join(f"{count:,} x {seconds:.2f} s a {what}" for count, seconds, what in parts if count)
    total = fixed_s + sum(count * seconds for count, seconds, _ in parts)
    return StageCost(node, total, f"{counted} + {fixed_s:.1f} s once", "measured", memory=memory, times=times)


def some_problems(
    data: Path, files: Mapping[str, Path], samples: Mapping[str, int], batch: int, folder: Path
) -> tuple[int, int]:
    """Link `data` in `folder`, with only so many problems of each of `files` that their responses fill a batch.

    `samples` is the number of responses to a problem of each file. Returns the number of responses, and that to all
    problems.
    """
    (folder / "suites").mkdir(parents=True)
    for path in data.iterdir():
        if path.name != "suites" and path not in files.values():
            (folder / path.name).symlink_to(path)
    count = every = 0
    for name, file in files.items():
        prompts = read_prompts(file)
        kept = prompts[: max(1, batch // samples[name])]
        write_prompts(folder / file.relative_to(data), kept)
        count += len(kept) * samples[name]
        every += len(prompts) * samples[name]
    return count, every
