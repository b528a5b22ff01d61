"""A bench of an experiment: each stage that trains or generates runs for a few steps, as it would run in the chain.

The programs are the real ones (`luffy.costs.measured_stage`), in child processes, on the cluster, engine and layout of
the settings. Only the times are kept, not the results.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from luffy.config.settings import (
    BaseSettings,
    DifficultySettings,
    EvaluateSettings,
    RLSettings,
    SampleSettings,
    SFTSettings,
    StageSettings,
)
from luffy.config.stage_names import StageName
from luffy.config.validation import HeldOutSettings
from luffy.costs.bench_inputs import (
    BenchInputs,
    SomeProblems,
    answering_as_evaluation,
    some_suites,
    some_training_prompts,
)
from luffy.costs.earlier_runs import earlier_length
from luffy.costs.held_out_times import measured_by, validation_of
from luffy.costs.readings import DEVICE_FILE, MeasuredRun, Reading, read_evaluation, read_training
from luffy.costs.response_lengths import Pace, write_pace
from luffy.costs.stage_times import bench_folder, write_times
from luffy.costs.workloads import Workload, record_name, this_machine, workload_of
from luffy.pipeline.chain.job import JOB_FILE, write_job
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import Experiment
from luffy.pipeline.machine.events import Event
from luffy.pipeline.machine.gpus import gpus_of_stage, no_turn, own_gpus
from luffy.pipeline.machine.supervise import supervise
from luffy.pipeline.machine.warm_start import WarmServer, can_start_warm
from luffy.pipeline.workspace import Workspace

PROGRAM = "luffy.costs.measured_stage"
_SCRATCH = ".scratch-"
_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a bench measures."""

    steps: int
    """Steps of RL after the first one; `base` and `sft` take twice as many."""
    response_tokens: float | None = None
    """Mean length of responses to assume; None: as `Bench` finds."""


@contextmanager
def scratch_folder(workspace: Workspace) -> Iterator[Path]:
    """A folder in the workspace that is deleted at the end; removes those that benches killed on this machine left."""
    folder, here = bench_folder(workspace), f"@{socket.gethostname()}"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_SCRATCH}*{here}-*"):
        owner = left.name.removeprefix(_SCRATCH).rpartition("-")[0]
        if owner.endswith(here) and not psutil.pid_exists(int(owner.removesuffix(here))):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}{here}-", dir=folder) as name:
        yield Path(name)


@contextmanager
def started_as_in_a_run(folder: Path) -> Iterator[None]:
    """Within the block, stages start as fast as those of a run: warm, on machines without a GPU."""
    with WarmServer(folder / "warm_server.log").use() if can_start_warm() else nullcontext():
        yield


class Bench:
    """Measures the stages of one experiment, in `scratch`, with the inputs in `inputs`."""

    def __init__(self, experiment: Experiment, scratch: Path, inputs: BenchInputs, options: BenchOptions) -> None:
        self._experiment = experiment
        self._plans = {plan.node.name: plan for plan in experiment.plan()}
        self._scratch = scratch
        self._inputs = inputs
        self._options = options
        self._machine = this_machine()
        self._evaluations: dict[tuple[Path, Pace], Reading] = {}

    def measure(self, plan: StagePlan) -> Reading:
        """Run the stage for a few steps; raises StageFailed."""
        settings = plan.node.settings
        if isinstance(settings, EvaluateSettings):
            return self._evaluation(plan, settings)
        if isinstance(settings, DifficultySettings | SampleSettings):
            return self._answers(plan, settings)
        return self._rl(plan, settings) if isinstance(settings, RLSettings) else self._supervised(plan, settings)

    def keep(self, plan: StagePlan, reading: Reading) -> None:
        """Keep the times for later plans of the same workload."""
        write_times(self._experiment.workspace, record_name(plan.node), self._workload(plan).key, reading.times)

    def _supervised(self, plan: StagePlan, settings: StageSettings) -> Reading:
        steps, inputs = 2 * self._options.steps + 1, {"data": self._inputs.data}
        if isinstance(settings, SFTSettings):
            inputs |= {"model": self._inputs.base, "held_out": self._inputs.data}
            shorter = {"steps": steps, "epochs": None, "max_tokens": None} | (
                {} if self._inputs.own_data else {"num_traces": None}
            )
            changed: StageSettings = settings.model_copy(
                update={"sft": settings.sft.model_copy(update=shorter), "validation": self._validation(settings, steps)}
            )
        else:
            assert isinstance(settings, BaseSettings) and settings.base is not None
            changed = settings.model_copy(update={"base": settings.base.model_copy(update={"steps": steps})})
        run = self._run(plan, changed, inputs, save_at=steps - 1)
        return read_training(
            run,
            plan.node.name,
            skipped=1,
            ahead=0,
            source=_now_words(),
            num_units=self._sft_steps(settings, run),
            validation=measured_by(validation_of(changed)),
        )

    def _validation(self, settings: SFTSettings | RLSettings, steps: int) -> HeldOutSettings | None:
        """The stage's own validation, before the first and after the last step; None where its problems are made up."""
        validation = settings.validation
        if validation is None or not self._inputs.own_data:
            return None
        at_the_ends = {"every": steps, "keep_best": None, "patience": None}
        return validation.model_copy(update={"schedule": validation.schedule.model_copy(update=at_the_ends)})

    def _sft_steps(self, settings: StageSettings, run: MeasuredRun) -> int | None:
        """Optimizer steps of the whole stage; None where the settings leave it to the data, which are not at hand."""
        if not isinstance(settings, SFTSettings):
            return None
        if settings.sft.steps is not None:
            return settings.sft.steps
        examples = run.facts(DEVICE_FILE).get("num_examples") if self._inputs.own_data else settings.sft.num_traces
        return None if examples is None else settings.sft.num_steps(examples)

    def _rl(self, plan: StagePlan, settings: RLSettings) -> Reading:
        ahead = settings.rl.max_staleness
        steps = self._options.steps + 1 + 2 * ahead
        rl = settings.rl.model_copy(
            update={
                "steps": steps,
                "max_tokens": None,
                # Steps in which the critic alone learns are too few to count, and would be all that is measured.
                "critic": settings.rl.critic and settings.rl.critic.model_copy(update={"warmup_steps": 0}),
            }
        )
        validation = self._validation(settings, steps)
        changed = settings.model_copy(update={"rl": rl, "validation": validation})
        inputs = {"data": self._inputs.prompts, "model": self._inputs.rl_start, "held_out": self._inputs.data}
        pace = self._pace(plan, natural=self._inputs.own_rl_start)
        run = self._run(plan, changed, inputs, save_at=_NEVER, pace=pace)
        return read_training(
            run,
            plan.node.name,
            skipped=1 + ahead,
            ahead=ahead,
            source=_now_words(),
            pace=pace,
            validation=measured_by(validation),
        )

    def _evaluation(self, plan: StagePlan, settings: EvaluateSettings) -> Reading:
        """Evaluations whose responses have the same lengths take equally long, and are measured once."""
        model, is_own = self._evaluated(plan)
        pace = self._pace(plan, natural=is_own)
        if (same := self._evaluations.get((model, pace))) is not None:
            return replace(same, node=plan.node.name, same_as=same.node)
        folder = Path(tempfile.mkdtemp(prefix="suites-", dir=self._scratch))
        some = some_suites(self._inputs.data, settings, self._full_batch(settings.evaluation.engine), folder)
        reading = self._generation(plan, settings, model, pace, some)
        self._evaluations[model, pace] = reading
        return reading

    def _answers(self, plan: StagePlan, settings: DifficultySettings | SampleSettings) -> Reading:
        """`difficulty` and `sample` answer training prompts as an evaluation answers those of a suite, so the program
        of `evaluate` is measured."""
        model, is_own = self._evaluated(plan)
        as_suite = answering_as_evaluation(settings)
        folder = Path(tempfile.mkdtemp(prefix="suites-", dir=self._scratch))
        num_samples = next(iter(as_suite.evaluation.decodings.values())).num_samples
        some = some_training_prompts(
            self._inputs.data, num_samples, self._full_batch(as_suite.evaluation.engine), folder
        )
        return self._generation(plan, as_suite, model, self._pace(plan, natural=is_own), some)

    def _generation(
        self, plan: StagePlan, settings: EvaluateSettings, model: Path, pace: Pace, some: SomeProblems
    ) -> Reading:
        run = self._run(
            plan, settings, {"data": some.data, "model": model}, save_at=_NEVER, pace=pace, program="evaluate"
        )
        every = some.every if self._inputs.own_data else None
        return read_evaluation(run, plan.node.name, some.num_responses, every, source=_now_words(), pace=pace)

    def _full_batch(self, engine: str) -> int:
        execution = self._experiment.config.execution
        return execution.vllm.max_num_seqs if engine == "vllm" else execution.rollout_batch_size

    def _evaluated(self, plan: StagePlan) -> tuple[Path, bool]:
        """The policy to evaluate: the stage's own where it is finished, else that of `base`; and whether it is its own.

        After RL alone the starting policy stands for its successor: nothing better is known.
        """
        policy = self._plans[plan.node.inputs["model"]]
        if policy.action == "reuse":
            return policy.directory, True
        taught = policy.node.stage == "sft" or "sft" in self._experiment.config.stages
        return self._inputs.base, self._inputs.own_base and not (taught and policy.node.stage != "base")

    def _pace(self, plan: StagePlan, *, natural: bool) -> Pace:
        """The lengths of responses: from the user's option, from earlier runs, from the policy itself, from the traces
        that SFT teaches before, or the limit."""
        if self._options.response_tokens is not None:
            mean = self._options.response_tokens
            return Pace("mean", f"{mean:g} tokens on average, as given by --response-tokens", mean)
        config = self._experiment.config
        earlier = earlier_length(self._experiment.workspace, self._workload(plan), plan.node.name)
        if earlier is not None:
            mean, where = earlier
            return Pace("mean", f"{mean:.0f} tokens on average, as in {where}", mean)
        if natural and self._inputs.own_data:
            return Pace("natural", "as long as the present policy's responses, which training changes")
        if "sft" in config.stages and plan.node.stage in ("rl", "evaluate") and self._inputs.own_data:
            return Pace("traces", "as long as the traces, which SFT teaches")
        return Pace(
            "bound", "all as long as max_response_tokens allows, an upper bound; --response-tokens sets another"
        )

    def _workload(self, plan: StagePlan) -> Workload:
        nodes = [other.node for other in self._plans.values()]
        return workload_of(self._experiment.config, nodes, plan.node, self._machine)

    def _run(
        self,
        plan: StagePlan,
        settings: StageSettings,
        inputs: dict[str, Path],
        save_at: int,
        pace: Pace | None = None,
        program: StageName | None = None,
    ) -> MeasuredRun:
        """The stage's program, or another one, with these settings."""
        config = self._experiment.config
        out = Path(tempfile.mkdtemp(prefix=f"{plan.node.name}-", dir=self._scratch))
        checkpoint = config.execution.checkpoint.model_copy(
            update={"base_every": save_at, "sft_every": save_at, "rl_every": save_at}
        )
        job = self._experiment.job(plan).model_copy(
            update={
                "stage": program or plan.node.stage,
                "settings": settings,
                "inputs": {name: str(folder) for name, folder in inputs.items()},
                "extends": None,
                "execution": config.execution.model_copy(update={"checkpoint": checkpoint}),
                "tracking": type(config.tracking)(),
            }
        )
        write_job(out / JOB_FILE, job)
        if pace is not None:
            write_pace(out, pace)
        return _supervised_run(out, gpus_of_stage(config, plan.node.stage))


def _supervised_run(out: Path, gpus: int) -> MeasuredRun:
    """Run the program of the job in `out` to its end, with that many GPUs of its own."""
    progress: list[tuple[int, float]] = []

    def note(event: Event) -> None:
        if event.kind == "progress":
            progress.append((event.step, event.time))

    command = [sys.executable, "-m", PROGRAM, "--config", str(out / JOB_FILE), "--out", str(out)]
    with own_gpus(gpus, no_turn, waiting=lambda what: None, stopped=lambda: False) as environment:
        began = time.monotonic()
        supervise(command, out, on_event=note, environment=environment)
        return MeasuredRun(out, time.monotonic() - began, progress)


def _now_words() -> str:
    return f"bench of {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC"
