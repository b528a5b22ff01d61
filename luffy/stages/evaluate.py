"""Evaluates a model on all suites and decodings: graded responses, and accuracies with confidence intervals.

Run: python -m luffy.stages.evaluate --config DIR/config.yaml --out DIR

Writes samples.jsonl.zst, responses.json, results.json, summary.md and summary.html (with plots). Each batch of graded
responses is saved in answers.jsonl, so a killed evaluation continues with the batch it was at and ends with the same
bytes; that file is removed once samples.jsonl.zst is complete. Responses of an endpoint are saved one by one, too, in
paid_answers.jsonl, which stays.

Responses that an earlier evaluation sampled from the same model in the same way are reused and only graded again.
`responses.json` has for each suite and decoding a hash of everything its responses depend on (the model's files,
engine, generation code, sampling, prompts, seeds). A finished evaluation in the same workspace with an equal hash has
exactly the responses that would be sampled. Graders, confidence level and other suites are not part of the hash.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from luffy.config.evaluation import EvaluationConfig
from luffy.config.settings import EvaluateSettings
from luffy.config.stage_kinds import ASKING_ROOMS, PLAYING_ROOMS
from luffy.config.strict import FOR_IDENTITY
from luffy.data.parquet import read_prompts, suite_files
from luffy.data.prompt_templates import is_chat, stops_of
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.evaluation.results import RESULTS_FILE, Cell, ResultRow, SamplingProtocol, advice_on, write_counted
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, read_samples_of, write_sample_records
from luffy.files import write_atomic
from luffy.grading.pool import GraderPool
from luffy.json_text import parse_json
from luffy.pipeline.identity import ASKING, code_of
from luffy.pipeline.manifest import consumed_digest, read_manifest
from luffy.report.evaluation_page import PAGE_FILE, SUMMARY_FILE, by_decoding, write_summaries
from luffy.rollout.text_endpoint import CHAT, TEXT, TextEndpoint, read_endpoint
from luffy.stages.answers.asker import Asker, ResponseProgress, graded, graded_records, open_asker, open_graders
from luffy.stages.answers.clients import (
    FULL_BATCHES,
    Questions,
    Render,
    Suite,
    check_problems,
    check_suite,
    render_as_ids,
)
from luffy.stages.answers.paid import PaidEndpoint, TextClient, open_paid, render_as_text
from luffy.stages.answers.store import ANSWERS_FILE, AnswerStore, ModelAnswer, siblings
from luffy.stages.program import StageContext, StageResult, main
from luffy.types import FinishReason

logger = logging.getLogger(__name__)
RESPONSES_FILE = "responses.json"
OUTPUTS = (SAMPLES_FILE, RESPONSES_FILE, RESULTS_FILE, SUMMARY_FILE, PAGE_FILE)
_NODE_PREFIX = "evaluate_"
_REGRADING_BATCH = 1024


def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
    """Evaluate the upstream model with the protocol shared by all checkpoints of the chain."""
    model = context.inputs["model"] / "model"
    endpoint = read_endpoint(model)
    requests, longest = read_requests(settings, context.inputs["data"], model if endpoint is None else None)
    evaluation = ModelEvaluation(context.out, requests, settings, context.inputs["model"])
    total = evaluation.num_responses
    progress = ResponseProgress(context, total, done=total - evaluation.num_left)
    evaluation.adopt(context, progress)
    if evaluation.num_left:
        with ExitStack() as stack:
            if endpoint is None:
                engine, left = settings.evaluation.engine, evaluation.num_left
                asker, _ = stack.enter_context(open_asker(settings, engine, context, longest, progress, left))
            else:
                server, environment = context.execution.server, settings.environment
                paths = tuple({CHAT if is_chat(each.protocol.template) else TEXT: None for each in requests.values()})
                paid = stack.enter_context(closing(open_paid(context.out)))
                # ConfigError for a server without the paths that the templates need.
                connected = stack.enter_context(closing(TextEndpoint.connect(endpoint, server, paths)))
                grader, judges = stack.enter_context(open_graders(settings.grading, context, settings.evaluation))
                client = TextClient(environment, PaidEndpoint(connected, paid), judges)
                # Batches are large: each ends with fewer and fewer requests under way.
                batch_size = FULL_BATCHES * server.concurrency * len(server.urls)
                limits = None if environment is None else environment.limits
                asker = Asker(client, grader, batch_size, limits=limits)
            progress.begin()
            evaluation.ask(asker, progress)
    rows = evaluation.write(context.node.removeprefix(_NODE_PREFIX))
    for decoding, found in by_decoding(rows).items():
        if (advice := advice_on(found)) is not None:
            context.events.message(f"{decoding}, {advice}")
    metrics = {f"accuracy/{row.decoding}/{row.suite}": row.accuracy for row in rows}
    return StageResult(OUTPUTS, metrics, total - progress.graded)


class ModelEvaluation:
    """The evaluation of one model in a folder: its answers, and once all of them are there, `OUTPUTS`.

    `stage` is the directory of the stage that made the model; `variant` distinguishes several models of one stage.
    """

    def __init__(
        self,
        folder: Path,
        requests: Mapping[Cell, Questions],
        settings: EvaluateSettings,
        stage: Path,
        variant: str = "",
    ) -> None:
        self._folder = folder
        self._requests = requests
        self._settings = settings
        self._digests = _digests(requests, settings, stage, variant)
        self.num_responses = sum(len(request.samples) for request in requests.values())
        folder.mkdir(exist_ok=True)
        for leftover in (path for name in OUTPUTS for path in folder.glob(f".{name}.*")):
            leftover.unlink()  # left by a kill during writing; it may be as large as all responses
        self._store: AnswerStore | None = None
        """None: samples.jsonl.zst has all answers."""
        if not (folder / SAMPLES_FILE).exists():
            self._store = AnswerStore(folder / ANSWERS_FILE)

    @property
    def num_left(self) -> int:
        """Number of responses that are not there yet."""
        return sum(self._left().values())

    def adopt(self, context: StageContext, progress: ResponseProgress) -> None:
        """Take over what is left from earlier evaluations in the workspace, graded again.

        Damaged samples leave the remaining responses to be generated.
        """
        left = self._left()
        for folder, cells in _find_sampled(context.out, {cell: self._digests.get(cell, "") for cell in left}).items():
            try:
                with open_graders(self._settings.grading, context, self._settings.evaluation) as (grader, _):
                    for cell, records in groupby(
                        read_samples_of(folder), lambda record: (record.suite, record.decoding)
                    ):
                        if cell in cells:
                            assert self._store is not None
                            self._store.add(self._regraded(self._requests[cell], records, grader, progress))
                            context.events.message(f"{', '.join(cell)}: responses of {folder.name}, graded again")
            except DataError as error:
                logger.warning("responses are not adopted from %s: %s", folder, error)

    def ask(self, asker: Asker, progress: ResponseProgress) -> None:
        assert self._store is not None
        asker.ask([self._requests[cell] for cell in self._left()], self._store, progress.add)

    def write(self, checkpoint: str) -> tuple[ResultRow, ...]:
        """Write `OUTPUTS` from the answers, which are then deleted."""
        config, samples = self._settings.evaluation, self._folder / SAMPLES_FILE
        lines = [{"suite": suite, "decoding": how, "digest": digest} for (suite, how), digest in self._digests.items()]
        write_atomic(self._folder / RESPONSES_FILE, json.dumps(lines, indent=1) + "\n")
        if self._store is not None:
            write_sample_records(samples, *(graded_records(each, self._store) for each in self._requests.values()))
            self._store.close()
            self._store = None
        (self._folder / ANSWERS_FILE).unlink(missing_ok=True)
        protocols = {cell: protocol_of(config, *cell) for cell in self._requests}
        return write_counted(self._folder, checkpoint, config.confidence, protocols, write_summaries).rows

    def _left(self) -> dict[Cell, int]:
        if (store := self._store) is None:
            return {}
        requests = self._requests.items()
        left = {cell: sum(sample.key not in store for sample in request.samples) for cell, request in requests}
        return {cell: count for cell, count in left.items() if count}

    def _regraded(
        self, request: Questions, records: Iterator[SampleRecord], grader: GraderPool, progress: ResponseProgress
    ) -> Iterator[tuple[str, ModelAnswer]]:
        """Responses that were sampled before for an equal request; DataError where they are not its responses.

        All or none of a suite and decoding are adopted: what is left is batched as in a fresh run.
        """
        assert self._store is not None
        counted = progress.done, progress.graded, progress.correct
        try:
            for start in range(0, len(request.samples), _REGRADING_BATCH):
                samples = request.samples[start : start + _REGRADING_BATCH]
                found: dict[str, ModelAnswer] = {}
                for sample in samples:
                    record = next(records, None)
                    asked = sample.prompt.uid, sample.sample, sample.seed, sample.rendered.text
                    if record is None or (record.uid, record.sample, record.seed, record.prompt) != asked:
                        raise DataError(f"no response to sample {sample.sample} of problem {sample.prompt.uid}")
                    reason = FinishReason(record.finish_reason)
                    found[sample.key] = ModelAnswer(
                        record.response, record.num_tokens, reason, record.reply, measures=record.measures
                    )
                if left := [sample for sample in samples if sample.key not in self._store]:
                    answers = graded(grader, replace(request, samples=left), [found[sample.key] for sample in left])
                    progress.add_adopted(answers)
                    yield from zip((sample.key for sample in left), answers, strict=True)
        except DataError:  # none of them is adopted
            progress.done, progress.graded, progress.correct = counted
            raise


def _digests(
    requests: Mapping[Cell, Questions], settings: EvaluateSettings, stage: Path, variant: str
) -> dict[Cell, str]:
    """The hashes of all responses; none for a stage without a manifest, since its model is unknown."""
    manifest = read_manifest(stage)
    if manifest is None:
        return {}
    rooms = ASKING_ROOMS if settings.environment is None else (*ASKING_ROOMS, *PLAYING_ROOMS)
    code = [f"{room} {digest}" for room, digest in code_of(ASKING, rooms).items()]
    if settings.environment is not None:
        code.append(settings.environment.model_dump_json(context=FOR_IDENTITY))
    model = consumed_digest("model", manifest) + variant
    sampled_by = [model, settings.dtype, settings.evaluation.engine, *code]
    return {cell: request.digest(sampled_by, settings.seed) for cell, request in requests.items()}


def _find_sampled(stage: Path, wanted: Mapping[Cell, str]) -> dict[Path, list[Cell]]:
    """Finished, unmodified evaluations beside the stage's directory that have wanted digests, and the cells of each."""
    found: dict[Path, list[Cell]] = {}
    left = {cell: digest for cell, digest in wanted.items() if digest}
    for directory in siblings(stage) if left else ():
        for folder in (directory, *sorted(directory.glob("step_*"))):
            try:
                lines = parse_json((folder / RESPONSES_FILE).read_text(encoding="utf-8"))
                there = {(line["suite"], line["decoding"]): line["digest"] for line in lines}
            except (OSError, ValueError, LookupError, TypeError):
                continue  # not finished, or written by another version
            cells = [cell for cell, digest in left.items() if there.get(cell) == digest]
            manifest = read_manifest(directory) if cells else None
            if manifest is not None and not manifest.damaged(directory):
                found[folder] = cells
                left = {cell: digest for cell, digest in left.items() if cell not in cells}
    return found


def protocol_of(config: EvaluationConfig, suite: str, decoding: str) -> SamplingProtocol:
    """How responses to the suite are sampled under the decoding, as results record it."""
    protocol = config.protocol(suite, decoding)
    return SamplingProtocol(
        template=protocol.template,
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        max_response_tokens=config.max_response_tokens,
        stop=(*stops_of(protocol.template), *protocol.stop),
        engine=config.engine,
    )


def read_requests(settings: EvaluateSettings, data: Path, model: Path | None) -> tuple[dict[Cell, Questions], int]:
    """What the model in that folder is asked, and the largest number of tokens of a prompt with its response.

    Suites come in the order of the configuration, which the data card keeps; `validation` comes last. Without a model
    (an endpoint's has an unknown tokenizer and context length) that number is 0. Raises DataError where there is no
    suite, or one has prompts that do not fit.
    """
    config, longest = settings.evaluation, 0
    files, card = suite_files(data, config.only), data / "card.json"
    if not files:
        raise DataError(f"{data / 'suites'}: no suite to evaluate; give at least one in data.suites")
    sources = parse_json(card.read_text(encoding="utf-8"))["sources"] if card.exists() else {}
    order = [name.removeprefix("suites.") for name in sources]
    names = sorted(files, key=lambda name: (order.index(name) if name in order else len(order), name))
    suites = [Suite(name, read_prompts(files[name])) for name in names]
    render: Render = render_as_text
    if model is None:
        for suite in suites:
            check_problems(suite, partial(render_as_text, template=config.template_of(suite.name)))
    else:
        tokenizer, most = load_tokenizer(model), config.max_response_tokens
        render = render_as_ids(tokenizer)
        room = parse_json((model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
        longest = most + max(
            check_suite(suite, tokenizer, most, room, config.template_of(suite.name)) for suite in suites
        )
    requests = {
        (suite.name, decoding): Questions.of_suite(suite, decoding, config, render, settings.seed)
        for decoding in config.decodings
        for suite in suites
    }
    return requests, longest


if __name__ == "__main__":
    main("evaluate", run, defers_stop_requests=True)
