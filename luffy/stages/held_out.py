"""Held-out accuracy of a policy in training, for the stages `sft` and `rl`, and early stopping.

With `keep_best`, the best measured weights become the stage's `model/`, which evaluations and later stages read: it is
the model that the stage hands on, not a by-product. The weights of the last step stay in RL's last checkpoint.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from luffy.cluster.local import RanksEngine
from luffy.config.environment import without_groups
from luffy.config.evaluation import DECODING, MEASURES, HeldOutSettings, KeepBestConfig
from luffy.config.settings import RLSettings, SFTSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import CheckpointError, ConfigError, DataError, LuffyError
from luffy.evaluation.results import EvaluationResults, ResultRow, read_results, tally_cells, write_results
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.pipeline.reuse import complete_checkpoints
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.asker import Asker, graded_records
from luffy.stages.answers.clients import FULL_BATCHES, Questions, Suite, check_suite, open_client, render_as_ids
from luffy.stages.answers.store import AnswerStore
from luffy.stages.program import StageContext
from luffy.stages.training_span import Exporter
from luffy.tracking.metrics import METRICS_FILE, MetricRow, metrics_until
from luffy.training.ranks import Ranks, call_everywhere
from luffy.training.supervised import SupervisedRank

FOLDER = "validation"
"""Results of each measured step, in the stage's directory."""
BEST_FOLDER = "best"
_INCOMING = "incoming"
OpenAsker = Callable[[RolloutEngine], Asker]
"""An asker of an engine's model; responses are sampled and graded as in an evaluation."""


def read_problems(
    settings: RLSettings | SFTSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Questions, ...], int]:
    """The requests of each suite in the prepared data, and the largest number of tokens of a prompt with its response.

    DataError for problems that do not fit the stage's model.
    Warns if the weights are chosen by suites that evaluations also report.
    """
    held_out = settings.validation
    assert held_out is not None
    schedule, protocol, tokens = held_out.schedule, held_out.protocol, held_out.protocol.max_response_tokens
    if schedule.keep_best is not None and schedule.suites:
        context.events.message(
            f"{'rl' if isinstance(settings, RLSettings) else 'sft'}.validation.keep_best chooses the step by "
            f"{', '.join(schedule.suites)}: the evaluation of this model on the same problems is biased upwards; use "
            "source: validation"
        )
    folder = context.inputs["held_out"]
    suites = []
    for path in ((folder if schedule.source else folder / "suites") / f"{name}.parquet" for name in schedule.names):
        if not path.is_file():
            raise DataError(f"{path}: missing; the validation has no problems to measure")
        suites.append(Suite(path.stem, read_prompts(path)[: schedule.max_problems]))
    room = context_length(read_shape(context.inputs["model"] / "model"))
    prompt = max(check_suite(suite, tokenizer, tokens, None, protocol.template_of(suite.name)) for suite in suites)
    if room is not None and prompt + tokens > room:
        raise DataError(
            f"validation: the longest prompt has {prompt} tokens, and the model's context of {room} less {tokens} of "
            f"the response leaves {room - tokens}; lower validation.max_response_tokens"
        )
    render = render_as_ids(tokenizer)
    requests = tuple(Questions.of_suite(suite, DECODING, protocol, render, settings.seed) for suite in suites)
    return requests, prompt + tokens


class HeldOut:
    """Measures a policy in training and, with `keep_best`, keeps the best weights.

    `engine_at(step)` returns the engine with exactly the weights after that many steps, which it keeps until the next
    call. `last_step` is measured, whatever the interval; `export` writes the current weights. Measurements up to the
    newest checkpoint, from which the stage resumes, are read from its metrics.
    """

    def __init__(
        self,
        settings: HeldOutSettings,
        requests: Sequence[Questions],
        engine_at: Callable[[int], RolloutEngine],
        open_asker: OpenAsker,
        out: Path,
        last_step: int,
        export: Exporter,
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._engine_at = engine_at
        self._open_asker = open_asker
        self._out = out
        self._last_step = last_step
        self._export = export
        start = max(complete_checkpoints(out), default=0)
        history = metrics_until(out / METRICS_FILE, start)
        best = settings.schedule.keep_best
        self._best = None if best is None else BestModel(out, best, export, history)

    @property
    def is_over(self) -> bool:
        """Whether `patience` measurements in a row brought no new best."""
        patience = self._settings.schedule.patience
        return patience is not None and self._best is not None and self._best.num_later >= patience

    def measure(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Metrics of the current weights, after `step` steps; empty where that step is not to be measured.

        `last`: training ends with this step, earlier than planned.
        """
        if step % self._settings.schedule.every and step != self._last_step and not last:
            return {}
        began = time.perf_counter()
        asker = self._open_asker(OneVersionEngine(self._engine_at(step), step))
        confidence = self._settings.protocol.confidence
        rows = measure_suites(asker, self._requests, confidence, self._out / FOLDER, step)
        metrics = validation_metrics(rows, step)
        if self._best is not None:
            self._best.observe(step, metrics)
        return metrics | {"perf/validation_s": time.perf_counter() - began}

    def export(self, folder: Path) -> None:
        """Write the best measured weights, or the current ones without `keep_best`."""
        if self._best is None:
            self._export(folder)
        else:
            self._best.hand_on(folder)


class BestModel:
    """Keeps the best measured weights in the stage directory `out`, as model folders without optimizer states.

    Which step is best follows from the measurements alone, so that a run that was killed finds the same one; `history`
    are metrics of steps before. A folder of a better step replaces older ones only when a checkpoint stands between
    them: a killed run goes back to its newest checkpoint, and needs the best weights up to there.
    """

    def __init__(self, out: Path, config: KeepBestConfig, export: Exporter, history: Iterable[MetricRow]) -> None:
        self._out = out
        self._metric = f"val/{config.metric}"
        self._sign = 1.0 if config.mode == "max" else -1.0
        self._export = export
        self._values = {int(row["step"]): row[self._metric] for row in history if self._metric in row}

    def observe(self, step: int, metrics: MetricRow) -> None:
        """Record the measurement of the current weights, and keep them if they are the best so far."""
        self._values[step] = metrics[self._metric]
        if self.step == step:
            incoming = self._out / BEST_FOLDER / _INCOMING
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.parent.mkdir(exist_ok=True)
            self._export(incoming)
            shutil.rmtree(self._folder(step), ignore_errors=True)
            incoming.replace(self._folder(step))
        newest = max(complete_checkpoints(self._out), default=0)
        saved = [step for step in self._values if step <= newest]
        kept = {self._folder(step) for step in self._values if step > newest and step >= self.step}
        kept |= {self._folder(self._best(saved))} if saved else set()
        for folder in (self._out / BEST_FOLDER).glob("step_*"):
            if folder not in kept:
                shutil.rmtree(folder)

    @property
    def step(self) -> int:
        """The best step so far, the earliest of equals."""
        return self._best(self._values)

    @property
    def num_later(self) -> int:
        """Number of measurements since the best one."""
        return sum(step > self.step for step in self._values) if self._values else 0

    def hand_on(self, folder: Path) -> None:
        """Copy the best weights to `folder`; CheckpointError if they were deleted."""
        source = self._folder(self.step)
        if not source.is_dir():
            raise CheckpointError(f"{source}: the best weights are gone; delete {self._out} to train again")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)

    def _best(self, steps: Iterable[int]) -> int:
        return max(sorted(steps), key=lambda step: self._sign * self._values[step])

    def _folder(self, step: int) -> Path:
        return self._out / BEST_FOLDER / f"step_{step:06d}"


class OneVersionEngine:
    """Passes requests to an engine, and checks that one version of the weights sampled all tokens.

    Stop texts are left to the client, which cuts responses after them: engines for rollouts do not read text.
    """

    def __init__(self, engine: RolloutEngine, version: int) -> None:
        self._engine = engine
        self._version = version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order; LuffyError where other weights sampled a token."""
        completions = self._engine.generate(requests, replace(params, stop=()))
        versions = {version for completion in completions for version in completion.weight_versions}
        if versions - {self._version}:
            raise LuffyError(f"a validation of version {self._version} was answered by versions {sorted(versions)}")
        return completions

    def close(self) -> None:
        """Nothing to free: the engine belongs to the stage."""


def measure_suites(
    asker: Asker, requests: Sequence[Questions], confidence: float, folder: Path, step: int
) -> tuple[ResultRow, ...]:
    """One row per suite, saved in `folder` with the step, so that a resumed stage does not sample again.

    Batches that a killed attempt had graded are not generated again either.
    """
    finished = folder / f"step_{step:06d}.json"
    folder.mkdir(parents=True, exist_ok=True)
    store = AnswerStore(folder / f"{finished.stem}.answers.jsonl")
    if not finished.exists():
        asker.ask(requests, store, lambda batch: None)
        tallies = tally_cells(record for request in requests for record in graded_records(request, store))
        rows = tuple(tally.row(confidence) for tally in tallies.values())
        write_results(finished, EvaluationResults(checkpoint=f"step {step}", confidence=confidence, rows=rows))
    store.remove()
    return read_results(finished).rows


def validation_metrics(rows: Sequence[ResultRow], version: int) -> dict[str, float]:
    """Metrics of the weights of `version`: mean accuracy over suites, and the results of each suite."""
    metrics = {"val/accuracy": fmean(row.accuracy for row in rows), "val/weight_version": float(version)}
    for row in rows:
        low, high = row.interval
        values = {name: float(getattr(row, name)) for name in MEASURES}
        values |= {"accuracy_low": low, "accuracy_high": high, "num_problems": float(row.num_problems)}
        metrics |= {f"val/{row.suite}/{name}": value for name, value in values.items()}
    return metrics


def open_for_rl(
    settings: RLSettings,
    context: StageContext,
    requests: Sequence[Questions],
    engine_at: Callable[[int], RolloutEngine],
    export: Exporter,
    graders: GraderPool,
    judges: Judges,
    tokenizer: PreTrainedTokenizerBase,
) -> HeldOut:
    """The validation of `rl`, with the stage's own engine, graders and judges."""
    execution, batch_size = context.execution, context.execution.rollout_batch_size
    if settings.rl.engine == "openai":  # several batches per call where the engine batches continuously
        batch_size = FULL_BATCHES * execution.server.concurrency * len(execution.server.urls)
    elif settings.rl.engine == "vllm" or settings.cluster == "ray":
        batch_size = FULL_BATCHES * execution.vllm.max_num_seqs * execution.ray.engines
    open_asker = _askers(settings, tokenizer, settings.lanes, judges, graders, batch_size)
    assert settings.validation is not None
    return HeldOut(settings.validation, requests, engine_at, open_asker, context.out, settings.rl.steps, export)


def open_for_sft(
    settings: SFTSettings, context: StageContext, steps: int, stack: ExitStack
) -> Callable[[Ranks[SupervisedRank]], HeldOut]:
    """A function from ranks to the validation of `sft` on these ranks; its graders close with `stack`.

    Raises ConfigError where the data leave fewer steps than the interval, DataError for problems that do not fit.
    """
    validation = settings.validation
    assert validation is not None
    if complaint := validation.schedule.complaint_about_length(steps):
        raise ConfigError(f"sft.validation.{complaint}")
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    requests, _ = read_problems(settings, context, tokenizer)
    own, cache = validation.protocol.own_graders, context.out / JUDGE_CACHE
    pool = GraderPool.configured(context.execution.grader_workers, validation.grading, cache, own)
    graders, batch_size = stack.enter_context(pool), context.execution.rollout_batch_size
    judges = stack.enter_context(closing(Judges(cache)))
    open_asker = _askers(settings, tokenizer, 0, judges, graders, batch_size)

    def measuring(ranks: Ranks[SupervisedRank]) -> HeldOut:
        def export(folder: Path) -> None:
            call_everywhere(ranks, SupervisedRank.export, folder)

        engine_at = partial(RanksEngine, ranks, batch_size)
        return HeldOut(validation, requests, engine_at, open_asker, context.out, steps, export)

    return measuring


def _askers(
    settings: RLSettings | SFTSettings,
    tokenizer: PreTrainedTokenizerBase,
    lanes: int,
    judges: Judges,
    graders: GraderPool,
    batch_size: int,
) -> OpenAsker:
    environment = without_groups(settings.environment)  # an evaluation has no groups
    limits = None if environment is None else environment.limits
    client_of = open_client(environment, tokenizer, lanes, judges)
    return lambda engine: Asker(
        client_of(engine), graders, batch_size, second_grade=False, finishes=True, limits=limits
    )
