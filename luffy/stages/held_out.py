"""Held-out accuracy of a policy in training, for the stages `sft` and `rl`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import DECODING, MEASURES
from luffy.config.settings import RLSettings, SFTSettings
from luffy.data.parquet import read_prompts
from luffy.errors import DataError, LuffyError
from luffy.evaluation.results import EvaluationResults, ResultRow, read_results, tally_cells, write_results
from luffy.grading.judge import Judges
from luffy.grading.pool import GraderPool
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.asker import Asker, graded_records
from luffy.stages.answers.clients import FULL_BATCHES, Questions, Suite, check_suite, open_client, render_as_ids
from luffy.stages.answers.store import AnswerStore
from luffy.stages.program import StageContext

FOLDER = "validation"
"""Results of each measured step, in the stage's directory."""


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
    prompt = max(
        check_suite(suite, tokenizer, tokens, room, protocol.template_of(suite.name), "validation") for suite in suites
    )
    render = render_as_ids(tokenizer)
    requests = tuple(Questions.of_suite(suite, DECODING, protocol, render, settings.seed) for suite in suites)
    return requests, prompt + tokens


@dataclass(frozen=True, slots=True)
class OneVersionEngine:
    """Passes requests to an engine, and checks that one version of the weights sampled all tokens.

    Stop texts are left to the client, which cuts responses after them: engines for rollouts do not read text.
    """

    engine: RolloutEngine
    version: int

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order; LuffyError where other weights sampled a token."""
        completions = self.engine.generate(requests, replace(params, stop=()))
        versions = {version for completion in completions for version in completion.weight_versions}
        if versions - {self.version}:
            raise LuffyError(f"a validation of version {self.version} was answered by versions {sorted(versions)}")
        return completions


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


def measurer(
    settings: RLSettings | SFTSettings,
    context: StageContext,
    requests: Sequence[Questions],
    tokenizer: PreTrainedTokenizerBase,
    graders: GraderPool,
    judges: Judges,
) -> Callable[[int, RolloutEngine], dict[str, float]]:
    """A function from a step, and the engine with the weights after it, to the validation's metrics.

    Responses are sampled and graded as in an evaluation.
    """
    assert settings.validation is not None
    confidence, execution = settings.validation.protocol.confidence, context.execution
    environment = settings.environment
    limits = None if environment is None else environment.limits
    batch_size, lanes = execution.rollout_batch_size, 0
    engine_name = settings.rl.engine if isinstance(settings, RLSettings) else settings.sft.engine
    if isinstance(settings, RLSettings):
        lanes = settings.lanes
        engine_name = "vllm" if (engine_name, settings.cluster) == ("cluster", "ray") else engine_name
    # Several batches per call where the engine batches continuously.
    if engine_name == "vllm":
        batch_size = FULL_BATCHES * execution.vllm.max_num_seqs * execution.ray.engines
    client_of = open_client(environment, tokenizer, lanes, judges)

    def metrics(step: int, engine: RolloutEngine) -> dict[str, float]:
        client = client_of(OneVersionEngine(engine, step))
        asker = Asker(client, graders, batch_size, finishes=True, limits=limits)
        return validation_metrics(measure_suites(asker, requests, confidence, context.out / FOLDER, step), step)

    return metrics
