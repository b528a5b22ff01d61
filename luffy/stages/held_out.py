"""Held-out accuracy of a policy in training, for the stages `sft` and `rl`.

With `keep_best`, the best measured weights become the stage's `model/`, which evaluations and later stages read: it is
the model that the stage hands on, not a by-product. The weights of the last step stay in RL's last checkpoint.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.cluster.local import RanksEngine
from luffy.config.environment import EnvironmentConfig, without_groups
from luffy.config.evaluation import HeldOutSettings
from luffy.config.execution import ExecutionConfig
from luffy.config.settings import RLSettings, SFTSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.registry import open_player
from luffy.errors import ConfigError, DataError
from luffy.evaluation.episode_client import EpisodeClient
from luffy.evaluation.evaluator import Evaluator
from luffy.evaluation.held_out_accuracy import OneVersionEngine, measure_suites, validation_metrics
from luffy.evaluation.model_clients import ModelClient, TokenModelClient
from luffy.evaluation.requests import Suite
from luffy.evaluation.suite_checks import check_suite
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.pipeline.reuse import complete_checkpoints
from luffy.rollout.engine import RolloutEngine
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.best_model import BestModel, Exporter
from luffy.stages.program import StageContext
from luffy.tracking.metrics import METRICS_FILE, metrics_until
from luffy.training.rank_calls import Ranks, call_everywhere
from luffy.training.supervised import SupervisedRank

FOLDER = "validation"
"""Results of each measured step, in the stage's directory."""
_FULL_BATCHES = 4
"""Batches of responses per call of an engine with continuous batching, where slots are idle only at the end of a
call."""


@dataclass(frozen=True, slots=True)
class HeldOutProblems:
    """The problems of a validation, checked to fit the context."""

    suites: tuple[Suite, ...]
    longest: int
    """Largest number of tokens of a prompt with its response."""


def read_problems(
    settings: HeldOutSettings, data: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> HeldOutProblems:
    """The suites in the prepared `data`, for the model in that folder; DataError for problems that do not fit it."""
    schedule, tokens = settings.schedule, settings.protocol.max_response_tokens
    folder = data if schedule.source is not None else data / "suites"
    suites = [_suite(folder / f"{name}.parquet", schedule.max_problems) for name in schedule.names]
    template_of, room = settings.protocol.template_of, context_length(read_shape(model))
    prompt = max(check_suite(suite, tokenizer, tokens, None, template_of(suite.name)) for suite in suites)
    if room is not None and prompt + tokens > room:
        raise DataError(
            f"validation: the longest prompt has {prompt} tokens, and the model's context of {room} less {tokens} of "
            f"the response leaves {room - tokens}; lower validation.max_response_tokens"
        )
    return HeldOutProblems(tuple(suites), prompt + tokens)


def _suite(path: Path, most: int | None) -> Suite:
    if not path.is_file():
        raise DataError(f"{path}: missing; the validation has no problems to measure")
    return Suite(path.stem, read_prompts(path)[:most])


class HeldOut:
    """Measures a policy in training and, with `keep_best`, keeps the best weights.

    `engine_at(step)` returns the engine with exactly the weights after that many steps, which it keeps until the next
    call. `last_step` is measured, whatever the interval; `export` writes the current weights. Measurements up to the
    newest checkpoint, from which the stage resumes, are read from its metrics.
    """

    def __init__(
        self,
        settings: HeldOutSettings,
        problems: HeldOutProblems,
        engine_at: Callable[[int], RolloutEngine],
        evaluator: Callable[[RolloutEngine], Evaluator],
        out: Path,
        last_step: int,
        export: Exporter,
    ) -> None:
        self._settings = settings
        self._problems = problems
        self._engine_at = engine_at
        self._evaluator = evaluator
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
        evaluator = self._evaluator(OneVersionEngine(self._engine_at(step), step))
        confidence = self._settings.protocol.confidence
        rows = measure_suites(evaluator, self._problems.suites, confidence, self._out / FOLDER, step)
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


def open_for_rl(
    settings: RLSettings,
    context: StageContext,
    problems: HeldOutProblems,
    engine_at: Callable[[int], RolloutEngine],
    export: Exporter,
    graders: GraderPool,
    judges: Judges,
    tokenizer: PreTrainedTokenizerBase,
) -> HeldOut:
    """The validation of `rl`, with the stage's own engine, graders and judges."""
    validation = settings.validation
    assert validation is not None
    _warn_of_chosen_suites(validation, "rl", context)
    lanes, batch_size = settings.lanes, _batch_size(settings, context.execution)
    player = _player(settings.environment, tokenizer, lanes, judges)
    made = _evaluators(validation, player, tokenizer, graders, settings.seed, batch_size)
    return HeldOut(validation, problems, engine_at, made, context.out, settings.rl.steps, export)


def open_for_sft(
    settings: SFTSettings, context: StageContext, steps: int, stack: ExitStack
) -> Callable[[Ranks[SupervisedRank]], HeldOut]:
    """A function from ranks to the validation of `sft` on these ranks; its graders close with `stack`.

    Raises ConfigError where the data leave fewer steps than the interval, DataError for problems that do not fit.
    """
    validation = settings.validation
    assert validation is not None
    try:
        validation.schedule.check_length(steps)
    except ValueError as error:
        raise ConfigError(f"sft.validation.{error}") from None
    _warn_of_chosen_suites(validation, "sft", context)
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    problems = read_problems(validation, context.inputs["held_out"], model, tokenizer)
    own, cache = validation.protocol.own_graders, context.out / JUDGE_CACHE
    graders = GraderPool.configured(context.execution.grader_workers, validation.grading, cache, own)
    stack.enter_context(graders)
    batch_size = context.execution.rollout_batch_size
    player = _player(settings.environment, tokenizer, 0, stack.enter_context(closing(Judges(cache))))
    made = _evaluators(validation, player, tokenizer, graders, settings.seed, batch_size)

    def measuring(ranks: Ranks[SupervisedRank]) -> HeldOut:
        def export(folder: Path) -> None:
            call_everywhere(ranks, SupervisedRank.export, folder)

        engine_at = partial(RanksEngine, ranks, batch_size)
        return HeldOut(validation, problems, engine_at, made, context.out, steps, export)

    return measuring


def _player(
    environment: EnvironmentConfig | None, tokenizer: PreTrainedTokenizerBase, lanes: int, judges: Judges
) -> EpisodePlayer | None:
    """Plays the episodes of an evaluation, which has no groups; None: a response is a single turn."""
    alone = without_groups(environment)
    return None if alone is None else open_player(alone, tokenizer, lanes, judges)


def _evaluators(
    settings: HeldOutSettings,
    player: EpisodePlayer | None,
    tokenizer: PreTrainedTokenizerBase,
    graders: GraderPool,
    seed: int,
    batch_size: int,
) -> Callable[[RolloutEngine], Evaluator]:
    """A function that makes an evaluator for an engine; responses are sampled and graded as in an evaluation."""
    limits = None if player is None else player.limits

    def evaluator(engine: RolloutEngine) -> Evaluator:
        client: ModelClient = TokenModelClient(engine, tokenizer)
        if player is not None:
            client = EpisodeClient(engine, tokenizer, player)
        return Evaluator(
            client, graders, settings.protocol, seed, batch_size, second_grade=False, is_whole=True, limits=limits
        )

    return evaluator


def _batch_size(settings: RLSettings, execution: ExecutionConfig) -> int:
    """Number of responses per call of RL's engine: several batches where it batches continuously."""
    if settings.rl.engine == "openai":
        return _FULL_BATCHES * execution.server.concurrency * len(execution.server.urls)
    if settings.rl.engine == "vllm" or settings.cluster == "ray":
        return _FULL_BATCHES * execution.vllm.max_num_seqs * execution.ray.engines
    return execution.rollout_batch_size


def _warn_of_chosen_suites(settings: HeldOutSettings, stage: str, context: StageContext) -> None:
    """Log a warning if the weights are chosen by suites that evaluations also report."""
    schedule = settings.schedule
    if schedule.keep_best is not None and schedule.suites:
        context.events.message(
            f"{stage}.validation.keep_best chooses the step by {', '.join(schedule.suites)}: the evaluation of this "
            "model on the same problems is biased upwards; use source: validation"
        )
