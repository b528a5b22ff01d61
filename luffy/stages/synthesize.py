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

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.config.answers import RewriteConfig
from luffy.config.data import DataConfig, VerifiersSource
from luffy.config.environment import history_of
from luffy.config.settings import SynthesizeSettings
from luffy.data.kept_answers import kept_traces
from luffy.data.overlap import BenchmarkIndex
from luffy.data.parquet import iterate_prompts
from luffy.data.row_filters import RowFilter, Rules
from luffy.data.sources import open_source
from luffy.data.splits import TRAIN, WrittenData, add_traces, prompts_without_their_traces
from luffy.data.synthesis_card import SynthesisCard, TeacherCard, write_synthesis_card
from luffy.data.templates import load_tokenizer, prompt_lengths
from luffy.data.tokenizer import adapt_tokenizer
from luffy.environments.registry import instructions_by_source, open_player, open_text_player
from luffy.environments.trace_replay import EnvironmentReplayer
from luffy.errors import ConfigError, DataError
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.http_client import missing_key
from luffy.pipeline.reuse import PAID_ANSWERS
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.clients import open_generator
from luffy.stages.answers.paid import earlier_paid
from luffy.stages.answers.store import AnswerStore
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.synthesis.ledger import Ledger
from luffy.stages.synthesis.rounds import (
    AnswerAssessor,
    TeacherTurn,
    graded_answer,
    take_turn,
    teacher_card,
    with_trace,
)
from luffy.stages.synthesis.teachers import Desk, EndpointTeacher, FolderTeacher, Teacher
from luffy.training.model_folder import copy_tokenizer, model_folder
from luffy.types import Origin, Prompt, Trace

logger = logging.getLogger(__name__)
_FOLDER_ANSWERS = "folder_answers.jsonl"


def run(settings: SynthesizeSettings, context: StageContext) -> StageResult:
    """Query the teachers and write the training data with the kept traces; DataError if there is nothing to query."""
    data, out = context.inputs["data"], context.out
    for name, server in context.execution.teachers.items():
        if complaint := missing_key(server, f"execution.teachers.{name}"):
            raise ConfigError(complaint)
    prompts = list(_prompts(data, settings))
    if not prompts:
        raise DataError(
            "synthesize: no training prompt lacks a trace; set synthesize.prompts: all, or remove the section"
        )
    with _opened_work(settings, context) as work:
        turns = _ask_all(prompts, work)
        taught = frozenset(prompt.uid for prompt in prompts if any(turn.usable(prompt.uid) for turn in turns))
        traces = _KeptTraces(turns, work, taught)
        rewrites = settings.synthesize.rewrite is not None
        written = add_traces(out, data, traces.of, settings.data, settings.seed, rewrites=rewrites)
    copy_tokenizer(data / "tokenizer", out / "tokenizer")
    card = _card(prompts, turns, taught, written, work)
    write_synthesis_card(out, card)
    for store in work.stores.values():
        if store.num_adopted:
            context.events.message(f"reuses {store.num_adopted} answers that earlier stages got")
    if not taught:
        context.events.message("no prompt got a trace: no answer was correct and usable (card.md)")
    resumed = sum(store.num_resumed for store in work.stores.values())
    return StageResult((*written.files, "tokenizer", "card.json", "card.md"), _metrics(card), resumed)


@dataclass(slots=True)
class _Work:
    """State shared by the turns of all teachers."""

    settings: SynthesizeSettings
    context: StageContext
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    row_filter: RowFilter
    grader: GraderPool
    stores: Mapping[bool, AnswerStore]
    """The answers of teachers behind an endpoint (True) and of teachers in a model folder (False)."""
    ledger: Ledger
    judges: Judges
    """Judges for the measures of episodes that need one."""
    answered: int = 0
    total: int = 0
    """Upper bound on the number of questions."""

    def store_of(self, name: str) -> AnswerStore:
        return self.stores[self.settings.synthesize.teachers[name].endpoint is not None]

    def progress(self, count: int) -> None:
        self.answered += count
        self.context.events.progress(self.answered, self.total)


@contextmanager
def _opened_work(settings: SynthesizeSettings, context: StageContext) -> Iterator[_Work]:
    """The graders, the rules for traces, the stores and the budget."""
    data, config, out = context.inputs["data"], settings.synthesize, context.out
    tokenizer = load_tokenizer(data / "tokenizer")
    environment, replays = settings.environment, settings.data.replay_traces
    rules = Rules(
        None,
        settings.data.max_trace_tokens,
        history=history_of(environment),
        requires_replay=replays == "reject",
    )
    replayer = EnvironmentReplayer(environment) if environment is not None and replays == "reject" else None
    row_filter = RowFilter(tokenizer, rules, _benchmarks(settings.data, data, settings.seed), replayer)
    ledger = Ledger({name: teacher.price for name, teacher in config.teachers.items()}, config.budget)
    with (
        GraderPool.configured(context.execution.grader_workers, settings.grading, out / JUDGE_CACHE) as grader,
        closing(AnswerStore(out / PAID_ANSWERS, earlier_paid(out))) as of_endpoints,
        closing(AnswerStore(out / _FOLDER_ANSWERS)) as of_folders,
        closing(Judges(out / JUDGE_CACHE)) as judges,
    ):
        stores = {True: of_endpoints, False: of_folders}
        yield _Work(settings, context, tokenizer, row_filter, grader, stores, ledger, judges)


def _ask_all(prompts: Sequence[Prompt], work: _Work) -> list[TeacherTurn]:
    """Every teacher's turn, in their order."""
    config, turns = work.settings.synthesize, list[TeacherTurn]()
    if config.rewrite is not None:
        return _rewrite_all(prompts, config.rewrite, work)
    work.total = len(prompts) * sum(teacher.num_samples for teacher in config.teachers.values())
    for name in config.teachers:
        left = [p for p in prompts if not (config.cascade and any(turn.usable(p.uid) for turn in turns))]
        if not left:
            turns.append(TeacherTurn(name, 0))
            continue
        assessor = AnswerAssessor(work.store_of(name), work.row_filter, work.grader)
        with _opened_teacher(name, left, work) as teacher:
            turn = take_turn(name, teacher, left, config, work.settings.seed, assessor)
        turn.used, turn.cost = work.ledger.used(name), work.ledger.cost(name)
        logger.info("%s: %d prompts with a usable answer", name, sum(bool(turn.usable(p.uid)) for p in left))
        turns.append(turn)
    return turns


def _rewrite_all(prompts: Sequence[Prompt], rewrite: RewriteConfig, work: _Work) -> list[TeacherTurn]:
    """The policy's own answers, then its answers with the expert's trace in the prompt for the rest."""
    config, turns = work.settings.synthesize, list[TeacherTurn]()
    ((name, teacher_config),) = config.teachers.items()
    work.total = len(prompts) * (teacher_config.num_samples + rewrite.num_samples)
    assessor = AnswerAssessor(work.store_of(name), work.row_filter, work.grader)
    asked = [*prompts, *(replace(each, messages=with_trace(each, rewrite)) for each in prompts if each.traces)]
    with _opened_teacher(name, asked, work) as teacher:
        for origin in (Origin.OWN, Origin.REWRITTEN):
            before, paid = work.ledger.used(name), work.ledger.cost(name)
            left = [p for p in prompts if not turns or (p.traces and not turns[0].usable(p.uid))]
            turn = take_turn(name, teacher, left, config, work.settings.seed, assessor, origin)
            turn.used, turn.cost = work.ledger.used(name) - before, work.ledger.cost(name) - paid
            turns.append(turn)
            logger.info("%s: %d prompts with a usable answer", turn.title, sum(bool(turn.usable(p.uid)) for p in left))
    return turns


@contextmanager
def _opened_teacher(name: str, asked: Sequence[Prompt], work: _Work) -> Iterator[Teacher]:
    """The teacher of that name, for these questions."""
    config, context = work.settings.synthesize.teachers[name], work.context
    environment = work.settings.environment
    instructions = instructions_by_source(environment) if environment is not None else {}
    desk = Desk(name, config, work.store_of(name), work.ledger, work.progress, environment, instructions)
    teacher: Teacher
    if config.endpoint is not None:
        player = open_text_player(environment, work.judges) if environment is not None else None
        teacher = EndpointTeacher(desk, context.execution.teachers[name], player)
    else:
        teacher = _folder_teacher(desk, asked, work)
    with closing(teacher):
        yield teacher


def _folder_teacher(desk: Desk, asked: Sequence[Prompt], work: _Work) -> FolderTeacher:
    config, context = desk.config, work.context
    assert config.path is not None
    folder = model_folder(config.path, f"synthesize.teachers.{desk.name}.path")
    tokenizer = adapt_tokenizer(str(folder), None, f"synthesize.teachers.{desk.name}.path")
    longest = max(prompt_lengths(tokenizer, [desk.messages(prompt) for prompt in asked])) + config.max_response_tokens
    room = context_length(read_shape(folder))
    if room is not None and longest > room:
        raise DataError(
            f"synthesize.teachers.{desk.name}: the longest prompt with an answer of {config.max_response_tokens} "
            f"tokens has {longest}, and the model's context is {room}; lower max_response_tokens or "
            "data.max_prompt_tokens"
        )
    generator = open_generator(config.engine, folder, config.dtype, longest, context)
    player = None
    if desk.environment is not None:
        player = open_player(desk.environment, tokenizer, generator.lanes, work.judges)
    return FolderTeacher(desk, generator.engine, tokenizer, work.tokenizer, generator.batch_size, context.key, player)


@dataclass(frozen=True, slots=True)
class _KeptTraces:
    """The new traces of each prompt, read lazily from the stores."""

    turns: Sequence[TeacherTurn]
    work: _Work
    taught: frozenset[str]
    """Uids of the prompts that have any."""

    def of(self, uid: str) -> Sequence[Trace]:
        """The prompt's traces, those of the first teacher first; of equal answers only the first teacher's."""
        if uid not in self.taught:
            return ()
        config, found, seen = self.work.settings.synthesize, list[Trace](), set[str]()
        for turn in self.turns:
            teacher, store = config.teachers[turn.name], self.work.store_of(turn.name)
            fresh = [verdict for verdict in turn.usable(uid) if verdict.text_hash not in seen]
            seen.update(verdict.text_hash for verdict in fresh)
            answers = [
                graded_answer(store[verdict.key], turn.name, teacher.model, teacher.decoding, turn.origin)
                for verdict in fresh
            ]
            found += kept_traces(answers, config.keep)
        return found


def _card(
    prompts: Sequence[Prompt], turns: Sequence[TeacherTurn], taught: AbstractSet[str], written: WrittenData, work: _Work
) -> SynthesisCard:
    """The card of the stage; `taught` are the uids of the prompts that have a new trace."""
    config, data = work.settings.synthesize, work.context.inputs["data"]
    asked = {uid for turn in turns for uid in turn.verdicts}
    in_vain = asked - taught
    return SynthesisCard(
        prompts=sum(1 for _ in _all_prompts(data)),
        asked_about=len(prompts),
        given=len(taught),
        without=tuple(prompt.uid for prompt in prompts if prompt.uid in in_vain),
        never_asked=tuple(prompt.uid for prompt in prompts if prompt.uid not in asked),
        train_rows=written.train_rows,
        sft_rows=written.sft_rows,
        max_tokens=config.budget.max_tokens if config.budget else None,
        max_cost=config.budget.max_cost if config.budget else None,
        teachers={turn.title: _teacher_card(turn, written, work) for turn in turns},
        origins=dict(sorted(written.origins.items())),
    )


def _teacher_card(turn: TeacherTurn, written: WrittenData, work: _Work) -> TeacherCard:
    """The card of one turn; where data is rewritten, its traces are those of its origin."""
    key = turn.name if turn.origin is None else f"{turn.name}:{turn.origin}"
    traces, with_logprobs = written.traces.get(key, 0), written.with_logprobs.get(key, 0)
    return teacher_card(turn, work.settings.synthesize.teachers[turn.name], traces, with_logprobs)


def _prompts(data: Path, settings: SynthesizeSettings) -> Iterator[Prompt]:
    """The prompts to ask, without their traces, which would take most of the memory; with `rewrite`, each keeps its
    first correct trace."""
    wants_all, rewrites = settings.synthesize.prompts == "all", settings.synthesize.rewrite is not None
    for prompt in _all_prompts(data):
        if wants_all or not prompt.traces:
            right = tuple(trace for trace in prompt.traces if trace.verified and not trace.turns)
            yield replace(prompt, traces=right[:1] if rewrites else ())


def _all_prompts(data: Path) -> Iterator[Prompt]:
    """The training rows, and the prompts that lost their traces."""
    yield from iterate_prompts(data / TRAIN)
    yield from prompts_without_their_traces(data)


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


def _metrics(card: SynthesisCard) -> dict[str, float]:
    found = {
        "prompts/asked": float(card.asked_about - len(card.never_asked)),
        "prompts/given_a_trace": float(card.given),
        "prompts/never_asked": float(len(card.never_asked)),
        "tokens": float(card.num_tokens),
    }
    found |= {f"pass_rate/{name}": teacher.pass_rate for name, teacher in card.teachers.items()}
    found |= {f"traces/{origin}": float(count) for origin, count in card.origins.items()}
    return found if card.cost is None else {**found, "cost": card.cost}


if __name__ == "__main__":
    main("synthesize", run, defers_stop_requests=True)
