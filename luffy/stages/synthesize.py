"""Traces made by teachers: models that answer training prompts, whose correct answers SFT and RL learn from.

Run: python -m luffy.stages.synthesize --config DIR/config.yaml --out DIR

Each teacher of `synthesize.teachers` in turn, a model behind an endpoint or a model folder, is asked the prompts of
prepare_data that lack a usable trace (or all), the first sample of every prompt before the second. Every answer is
graded as the experiment grades and held to the rules for traces: length, completeness, decontamination.
With `synthesize.rewrite` the one teacher is the policy: it is asked every prompt as it is, and what it fails once more
with the expert's trace in the prompt; its answers then take the place of the experts'.
Writes the training data of prepare_data with the answers that are kept (train.parquet, sft.parquet,
rl_complement.parquet, validation.parquet, tokenizer/), card.json and card.md. SFT, `difficulty` and RL read this
directory in place of prepare_data's.

Answers are saved as they arrive, in paid_answers.jsonl (endpoints, one by one) and folder_answers.jsonl (model folders,
batch by batch): a killed stage asks only for the rest. With an environment an answer is an episode; an endpoint's turns
are saved one by one, so a killed episode goes on after the last of them. Answers of an endpoint are reused by every
stage of the workspace that asks for the same ones. They outlive changes of the training data.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from luffy.config.data import DataConfig, VerifiersSource
from luffy.config.environment import history_of
from luffy.config.settings import SynthesizeSettings
from luffy.data.kept_answers import kept_traces
from luffy.data.overlap import BenchmarkIndex
from luffy.data.parquet import iterate_prompts
from luffy.data.pass_rates import card_json
from luffy.data.row_filters import RowFilter, Rules
from luffy.data.sources import open_source
from luffy.data.splits import TRAIN, add_traces
from luffy.data.synthesis_card import SynthesisCard
from luffy.data.templates import load_tokenizer, prompt_lengths, render_prompts, with_opened_thinking
from luffy.data.tokenizer import adapt_tokenizer
from luffy.environments.registry import instructions_by_source
from luffy.errors import ConfigError, DataError
from luffy.files import write_atomic
from luffy.http_client import missing_key
from luffy.report.cards import card_markdown, synthesis_section
from luffy.rollout.text_endpoint import CHAT, TextEndpoint
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.asker import Asker, open_graders
from luffy.stages.answers.clients import SampleRequest, as_trace, open_client, open_generator, trace_of
from luffy.stages.answers.paid import open_paid
from luffy.stages.answers.store import AnswerStore
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.synthesis.ledger import Ledger, Usage
from luffy.stages.synthesis.rounds import Teacher, TeacherTurn, Work, take_turn, teacher_card, with_trace
from luffy.stages.synthesis.teachers import PaidTeacher
from luffy.training.model_folder import copy_tokenizer, model_folder
from luffy.types import Origin, Prompt, Trace

_FOLDER_ANSWERS = "folder_answers.jsonl"
_PAID_BATCH, _PAID_BATCH_IN_BUDGET = 32, 4
"""Questions per batch, as a multiple of those under way at once: a batch ends with fewer and fewer. A teacher that
exceeds `max_response_tokens` can overspend a budget by what one batch exceeds it."""


def run(settings: SynthesizeSettings, context: StageContext) -> StageResult:
    """Query the teachers and write the training data with the kept traces; DataError if there is nothing to query."""
    data, out = context.inputs["data"], context.out
    for name, server in context.execution.teachers.items():
        if complaint := missing_key(server, f"execution.teachers.{name}"):
            raise ConfigError(complaint)
    # Without their traces, which would take most of the memory; to be rewritten, each keeps its first correct one.
    wants_all, rewrites = settings.synthesize.prompts == "all", settings.synthesize.rewrite is not None
    prompts = []
    for prompt in iterate_prompts(data / TRAIN):
        if wants_all or not prompt.traces:
            right = tuple(trace for trace in prompt.traces if trace.verified and not trace.turns)
            prompts.append(replace(prompt, traces=right[:1] if rewrites else ()))
    if not prompts:
        raise DataError(
            "synthesize: no training prompt lacks a trace; set synthesize.prompts: all, or remove the section"
        )
    with _opened_work(settings, context) as work:
        turns = _ask_all(prompts, work)
        traces_of = partial(_kept_traces, turns, work)
        written = add_traces(out, data, traces_of, settings.data, settings.seed, rewrites=rewrites)
    copy_tokenizer(data / "tokenizer", out / "tokenizer")
    config, limit = settings.synthesize, settings.synthesize.budget
    asked = {uid for turn in turns for uid in turn.verdicts}
    taught = {prompt.uid for prompt in prompts if any(turn.usable(prompt.uid) for turn in turns)}
    in_vain = asked - taught
    card = SynthesisCard(
        prompts=sum(1 for _ in iterate_prompts(data / TRAIN)),
        asked_about=len(prompts),
        given=len(taught),
        without=tuple(prompt.uid for prompt in prompts if prompt.uid in in_vain),
        never_asked=tuple(prompt.uid for prompt in prompts if prompt.uid not in asked),
        train_rows=written.train_rows,
        sft_rows=written.sft_rows,
        max_tokens=limit.max_tokens if limit else None,
        max_cost=limit.max_cost if limit else None,
        teachers={turn.title: teacher_card(turn, config.teachers[turn.name], written) for turn in turns},
        origins=dict(sorted(written.origins.items())),
    )
    write_atomic(out / "card.json", card_json(card))
    write_atomic(out / "card.md", card_markdown(synthesis_section(card)))
    for store in work.stores.values():
        if store.num_adopted:
            context.events.message(f"reuses {store.num_adopted} answers that earlier stages got")
    if not taught:
        context.events.message("no prompt got a trace: no answer was correct and usable (card.md)")
    resumed = sum(store.num_resumed for store in work.stores.values())
    metrics = {
        "prompts/asked": float(card.asked_about - len(card.never_asked)),
        "prompts/given_a_trace": float(card.given),
        "prompts/never_asked": float(len(card.never_asked)),
        "tokens": float(card.num_tokens),
    }
    metrics |= {f"pass_rate/{name}": teacher.pass_rate for name, teacher in card.teachers.items()}
    metrics |= {f"traces/{origin}": float(count) for origin, count in card.origins.items()}
    metrics |= {} if card.cost is None else {"cost": card.cost}
    return StageResult((*written.files, "tokenizer", "card.json", "card.md"), metrics, resumed)


@contextmanager
def _opened_work(settings: SynthesizeSettings, context: StageContext) -> Iterator[Work]:
    """The graders, the rules for traces, the stores and the budget."""
    data, config, out = context.inputs["data"], settings.synthesize, context.out
    tokenizer = load_tokenizer(data / "tokenizer")
    environment = settings.environment
    rules = Rules(None, settings.data.max_trace_tokens, history=history_of(environment))
    row_filter = RowFilter(tokenizer, rules, _benchmarks(settings.data, data, settings.seed))
    ledger = Ledger({name: teacher.price for name, teacher in config.teachers.items()}, config.budget)
    with (
        open_graders(settings.grading, context) as (grader, judges),
        closing(open_paid(out)) as of_endpoints,
        closing(AnswerStore(out / _FOLDER_ANSWERS)) as of_folders,
    ):
        stores = {True: of_endpoints, False: of_folders}
        instructions = {} if environment is None else instructions_by_source(environment)
        yield Work(settings, context, tokenizer, row_filter, grader, stores, ledger, judges, instructions)


def _ask_all(prompts: Sequence[Prompt], work: Work) -> list[TeacherTurn]:
    """Every teacher's turn, in their order; to rewrite, the policy's own answers, and then its answers with the
    expert's trace in the prompt for the rest."""
    config, turns = work.settings.synthesize, list[TeacherTurn]()

    def is_solved(prompt: Prompt) -> bool:
        return any(turn.usable(prompt.uid) for turn in turns)

    if (rewrite := config.rewrite) is not None:
        ((name, teacher_config),) = config.teachers.items()
        work.total = len(prompts) * (teacher_config.num_samples + rewrite.num_samples)
        asked = [*prompts, *(with_trace(each, rewrite) for each in prompts if each.traces)]
        with _opened_teacher(name, asked, work) as teacher:
            for origin in (Origin.OWN, Origin.REWRITTEN):
                left = [p for p in prompts if origin is Origin.OWN or (p.traces and not is_solved(p))]
                turns.append(take_turn(teacher, left, origin))
        return turns
    work.total = len(prompts) * sum(teacher.num_samples for teacher in config.teachers.values())
    for name in config.teachers:
        left = [p for p in prompts if not (config.cascade and is_solved(p))]
        if not left:
            turns.append(TeacherTurn(name, 0))
            continue
        with _opened_teacher(name, left, work) as teacher:
            turns.append(take_turn(teacher, left))
    return turns


@contextmanager
def _opened_teacher(name: str, asked: Sequence[Prompt], work: Work) -> Iterator[Teacher]:
    config, environment = work.settings.synthesize.teachers[name], work.settings.environment
    if config.endpoint is None:
        with _opened_folder(name, asked, work) as teacher:
            yield teacher
        return
    server = work.context.execution.teachers[name]
    with closing(TextEndpoint.connect(config.endpoint, server, (CHAT,), f"execution.teachers.{name}")) as endpoint:
        paid = PaidTeacher(name, endpoint, work)
        batches = _PAID_BATCH if work.settings.synthesize.budget is None else _PAID_BATCH_IN_BUDGET
        asker = Asker(
            paid,
            None,
            batches * endpoint.concurrency,
            limits=None if environment is None else environment.limits,
            keep=lambda _, answer: answer if answer.has_failed else None,
        )
        # It tells of each new answer itself.
        yield Teacher(name, work, asker, paid.keyed, paid.most, lambda new: None, paid.finish)


@contextmanager
def _opened_folder(name: str, asked: Sequence[Prompt], work: Work) -> Iterator[Teacher]:
    """A teacher in a model folder; DataError where a question does not fit its context."""
    config, context, environment = work.settings.synthesize.teachers[name], work.context, work.settings.environment
    assert config.path is not None
    limits = None if environment is None else environment.limits
    setting, most = f"synthesize.teachers.{name}", config.max_response_tokens
    folder = model_folder(config.path, f"{setting}.path")
    tokenizer = adapt_tokenizer(str(folder), None, f"{setting}.path")
    longest = max(prompt_lengths(tokenizer, [work.messages(name, prompt) for prompt in asked])) + most
    room = context_length(read_shape(folder))
    if room is not None and longest > room:
        raise DataError(
            f"{setting}: the longest prompt with an answer of {most} tokens has {longest}, and the model's context is "
            f"{room}; lower max_response_tokens or data.max_prompt_tokens"
        )

    def keyed(samples: Sequence[SampleRequest]) -> list[SampleRequest]:
        """With the stage's key: the folder may have held other weights for other stages."""
        rendered = render_prompts(tokenizer, [sample.rendered.messages for sample in samples])
        keys = [
            hashlib.sha256(json.dumps([context.key, name, list(ids), sample.seed]).encode()).hexdigest()
            for sample, ids in zip(samples, rendered, strict=True)
        ]
        return [
            replace(sample, key=key, rendered=replace(sample.rendered, ids=tuple(ids)))
            for sample, key, ids in zip(samples, keys, rendered, strict=True)
        ]

    def most_used(sample: SampleRequest) -> Usage:
        once = len(sample.rendered.ids)
        return Usage(once if limits is None else limits.max_turns * (once + most), most)

    generator = open_generator(config.engine, folder, config.dtype, longest, work.total, context)
    with closing(generator.engine):
        client_of = open_client(environment, tokenizer, generator.lanes, work.judges, policy=work.tokenizer)
        asker = Asker(client_of(generator.engine), None, generator.batch_size, limits=limits, keep=as_trace)
        yield Teacher(name, work, asker, keyed, most_used, lambda answers: work.progress(len(answers)))


def _kept_traces(turns: Sequence[TeacherTurn], work: Work, uid: str) -> list[Trace]:
    """The new traces of a prompt, read from the stores only now.

    Those of the first teacher come first; of equal answers only the first teacher's is kept.
    """
    config, found, seen = work.settings.synthesize, list[Trace](), set[str]()
    for turn in turns:
        teacher, store, traces = config.teachers[turn.name], work.store_of(turn.name), []
        for verdict in turn.usable(uid):
            if verdict.text_hash not in seen:
                seen.add(verdict.text_hash)
                trace = trace_of(store[verdict.key], turn.name, teacher.model, teacher.decoding, turn.origin)
                text = trace.text if trace.turns else with_opened_thinking(trace.text)
                traces.append(replace(trace, text=text))
        found += kept_traces(traces, config.keep)
    return found


def _benchmarks(config: DataConfig, data: Path, seed: int) -> BenchmarkIndex:
    """All benchmark problems, as prepare_data indexed them."""
    index = BenchmarkIndex(config.decontamination.ngram, config.decontamination.overlap)
    for name, source in config.suites.items():
        if not (isinstance(source, VerifiersSource) and source.equal_prompts):
            index.add(name, iterate_prompts(data / "suites" / f"{name}.parquet"))
    for name, source in config.decontamination.benchmarks.items():
        rows = open_source(source, f"decontamination.benchmarks.{name}", seed).rows()
        index.add(name, (row for row in rows if isinstance(row, Prompt)))
    return index.finish()


if __name__ == "__main__":
    main("synthesize", run, defers_stop_requests=True)
