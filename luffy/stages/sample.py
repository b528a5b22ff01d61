"""The policy, or teachers, answer the training prompts; correct answers become traces.

Run: python -m luffy.stages.sample --config DIR/config.yaml --out DIR

Answers are graded as RL grades; with an environment an answer is an episode, and its trace has many turns.

The policy gives `sample.num_samples` responses to every prompt of prepare_data's train.parquet (`answer_prompts`, as
for the stage `difficulty`). Writes pass_rates.parquet (one row per prompt), sampled.parquet (the prompts with a correct
and complete answer, shortest prompts first, with the traces that `sample.keep` chooses), tokenizer/, card.json and
card.md. The SFT after it reads this directory in place of prepare_data's.

Each of `sample.teachers` in turn, a model behind an endpoint or a model folder, is asked the prompts that lack a usable
trace (or all), the first sample of every prompt before the second; its answers also have to meet the rules for traces:
length, completeness, decontamination. With `sample.rewrite` the one teacher is the policy: it is asked every prompt as
it is, and what it fails once more with the expert's trace in the prompt; its answers then take the place of the
experts'. Writes the training data of prepare_data with the answers that are kept (train.parquet, sft.parquet,
rl_complement.parquet, validation.parquet, tokenizer/), card.json and card.md. SFT, `difficulty` and RL read this
directory in place of prepare_data's.

Graded answers are in answers.jsonl, batch by batch: a killed stage asks only for the rest. Those of an endpoint are
saved as they arrive, in paid_answers.jsonl, turn by turn in an episode, before they are graded; every stage of the
workspace that asks for the same ones reuses them. They outlive changes of the training data.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.config.answers import RewriteConfig, SampleConfig
from luffy.config.data import DataConfig, VerifiersSource
from luffy.config.environment import history_of
from luffy.config.evaluation import SuiteProtocol
from luffy.config.settings import SampleSettings
from luffy.config.starts import fill_slots
from luffy.data.answer_cards import (
    CARD_FILE,
    RATES_FILE,
    KeptCount,
    TaughtCard,
    TeacherCard,
    card_json,
    is_text,
    kept_traces,
    sample_card,
    summarise_rates,
    write_pass_rates,
)
from luffy.data.overlap import BenchmarkIndex
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.prompt_templates import OWN
from luffy.data.row_filters import Rejection, RowFilter, Rules, with_instructions
from luffy.data.sources import open_source
from luffy.data.splits import TRAIN, add_traces
from luffy.data.templates import load_tokenizer, render_prompts, with_opened_thinking
from luffy.data.tokenizer import adapt_tokenizer
from luffy.environments.registry import instructions_by_source
from luffy.errors import ConfigError, DataError
from luffy.files import write_atomic
from luffy.http_client import missing_key
from luffy.pipeline.manifest import read_manifest
from luffy.report.cards import card_markdown, sample_section, taught_section
from luffy.rollout.text_endpoint import CHAT, TextEndpoint
from luffy.seeds import derive_seed
from luffy.stages.answers.asker import Asker, ModelToAsk, ResponseProgress, open_asker, open_graders
from luffy.stages.answers.clients import FULL_BATCHES, Questions, RenderedPrompt, SampleRequest, sample_key, trace_of
from luffy.stages.answers.paid import PaidEndpoint, TextClient, open_paid
from luffy.stages.answers.store import ANSWERS_FILE, AnswerStore, ModelAnswer
from luffy.stages.policy_answers import AnsweredPrompts, answer_prompts, kept_answer, longest_of, without_text
from luffy.stages.program import StageContext, StageResult, main
from luffy.training.model_folder import copy_tokenizer, model_folder
from luffy.types import FinishReason, Message, Origin, Outcome, Prompt, Trace

_TRACES_FILE = "sampled.parquet"
_AUTHOR = "policy"
CHUNK = 32
"""Questions between two looks at a budget, whatever the concurrency: a stage that resumes asks the same ones."""
_MISSES = 8
"""So many questions in a row may fail at their endpoint."""
_BATCHES = 32
"""Questions per batch, as a multiple of those under way at once: a batch ends with fewer and fewer."""
_COUNTED_AT_ONCE = 512
"""Answers in memory at the same time."""
_UNGRADED = {
    FinishReason.LENGTH: "truncated",
    FinishReason.TURN_LENGTH: "truncated",
    FinishReason.TURNS: "out_of_turns",
    FinishReason.ENVIRONMENT_ERROR: "crashed",
    FinishReason.REFUSED: "refused",
    FinishReason.FAILED: "failed",
}
"""Outcomes of teachers' answers that no grade tells, by how they ended."""


def run(settings: SampleSettings, context: StageContext) -> StageResult:
    """Sample and grade the training prompts and keep correct answers; DataError if there is nothing to ask, or none of
    the policy's is correct."""
    return (_ask_teachers if settings.sample.teachers else _ask_policy)(settings, context)


def _ask_policy(settings: SampleSettings, context: StageContext) -> StageResult:
    config, out, model = settings.sample, context.out, context.inputs["model"]
    with answer_prompts(settings, context) as answered:
        rates, kept = summarise_rates(answered.rates, config.num_samples), KeptCount()
        if not rates.ever_solved_share:
            found = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rates.outcomes.items() if count)
            raise DataError(
                f"sample: round {settings.round} produced no correct response to {rates.prompts} prompts x "
                f"{rates.num_samples} ({found}; {100 * rates.truncated_share:.0f} % ran into the limit), so there is "
                "nothing to learn from; take easier prompts or a stronger policy, or raise sample.num_samples or "
                "sample.max_response_tokens"
            )
        solved = _with_traces(answered, config, f"{model.parent.name}/{model.name}")
        write_prompts(out / _TRACES_FILE, kept.passing(solved))
    if not kept.traces:
        raise DataError(
            f"sample: none of the {rates.outcomes[Outcome.CORRECT]} correct responses is text that ended by itself "
            "within sample.max_response_tokens, so there is no trace to learn from; raise it"
        )
    write_pass_rates(out / RATES_FILE, answered.rates)
    manifest = read_manifest(model)
    card = sample_card(manifest.node if manifest else "policy", settings.round, config, rates, kept)
    copy_tokenizer(context.inputs["data"] / "tokenizer", out / "tokenizer")
    write_atomic(out / CARD_FILE, card_json(card))
    write_atomic(out / "card.md", card_markdown(sample_section([card])))
    metrics = {
        "prompts/solved": float(card.kept.prompts),
        "traces/kept": float(card.kept.traces),
        "traces/mean_tokens": card.kept.mean_tokens,
        "pass_rate": card.rates.mean_pass_rate,
        "truncated_share": card.rates.truncated_share,
    }
    outputs = (RATES_FILE, _TRACES_FILE, "tokenizer", CARD_FILE, "card.md")
    return StageResult(outputs, metrics, resumed_from=answered.resumed_from)


def _with_traces(answered: AnsweredPrompts, config: SampleConfig, model: str) -> Iterator[Prompt]:
    """The solved prompts, each with the traces that are kept; `model` is stage and key, the same in every workspace."""
    decoding = f"temperature {config.temperature:g}"
    for prompt in answered.shortest_first:
        kept = [each for each in answered.answers(prompt) if each.text is not None and is_text(each.text)]
        if kept:
            found = [trace_of(answer, _AUTHOR, model, decoding) for answer in kept]
            yield dataclasses.replace(prompt, traces=kept_traces(found, config.keep))


def _ask_teachers(settings: SampleSettings, context: StageContext) -> StageResult:
    config, out, data = settings.sample, context.out, context.inputs["data"]
    assert settings.data is not None
    for name, server in context.execution.teachers.items():
        if complaint := missing_key(server, f"execution.teachers.{name}"):
            raise ConfigError(complaint)
    # Without their traces, which would take most of the memory; to be rewritten, each keeps its first correct one.
    wants_all, rewrites, prompts = config.prompts == "all", config.rewrite is not None, list[Prompt]()
    for prompt in iterate_prompts(data / TRAIN):
        if wants_all or not prompt.traces:
            right = tuple(trace for trace in prompt.traces if trace.verified and not trace.turns)
            prompts.append(dataclasses.replace(prompt, traces=right[:1] if rewrites else ()))
    if not prompts:
        raise DataError("sample: no training prompt lacks a trace; set sample.prompts: all, or remove sample.teachers")
    tokenizer, environment = load_tokenizer(data / "tokenizer"), settings.environment
    rules = Rules(None, settings.data.max_trace_tokens, history=history_of(environment))
    row_filter = RowFilter(tokenizer, rules, _benchmarks(settings.data, data, settings.seed))
    instructions = {} if environment is None else instructions_by_source(environment)
    most = sum(teacher.num_samples for teacher in config.teachers.values())
    most += 0 if config.rewrite is None else config.rewrite.num_samples
    with (
        closing(AnswerStore(out / ANSWERS_FILE)) as store,
        # Earlier versions asked teachers in a stage of their own.
        closing(open_paid(out, "synthesize")) as paid,
    ):
        progress = ResponseProgress(context, len(prompts) * most, len(store))
        teaching = _Teaching(settings, context, tokenizer, row_filter, instructions, store, paid, progress)
        teaching.ask_all(prompts)
        traces_of = teaching.kept_traces
        written = add_traces(out, data, traces_of, settings.data, settings.seed, rewrites=rewrites)
    copy_tokenizer(data / "tokenizer", out / "tokenizer")
    turns, limit = teaching.turns, config.budget
    asked = {uid for turn in turns for uid in turn.solved}
    taught = {prompt.uid for prompt in prompts if teaching.is_solved(prompt)}
    for turn in turns:
        author = turn.name if turn.origin is None else f"{turn.name}:{turn.origin}"
        turn.card.traces, turn.card.with_logprobs = written.traces[author], written.with_logprobs[author]
    card = TaughtCard(
        prompts=written.train_rows,
        asked_about=len(prompts),
        given=len(taught),
        without=tuple(prompt.uid for prompt in prompts if prompt.uid in asked - taught),
        never_asked=tuple(prompt.uid for prompt in prompts if prompt.uid not in asked),
        train_rows=written.train_rows,
        sft_rows=written.sft_rows,
        max_tokens=limit.max_tokens if limit else None,
        max_cost=limit.max_cost if limit else None,
        teachers={turn.title: turn.card for turn in turns},
        origins=dict(sorted(written.origins.items())),
    )
    write_atomic(out / CARD_FILE, card_json(card))
    write_atomic(out / "card.md", card_markdown(taught_section(card)))
    if teaching.paid.num_adopted:
        context.events.message(f"reuses {teaching.paid.num_adopted} answers that earlier stages got")
    if not taught:
        context.events.message("no prompt got a trace: no answer was correct and usable (card.md)")
    metrics = {
        "prompts/asked": float(card.asked_about - len(card.never_asked)),
        "prompts/given_a_trace": float(card.given),
        "prompts/never_asked": float(len(card.never_asked)),
        "tokens": float(card.num_tokens),
    }
    metrics |= {f"pass_rate/{name}": teacher.pass_rate for name, teacher in card.teachers.items()}
    metrics |= {f"traces/{origin}": float(count) for origin, count in card.origins.items()}
    metrics |= {} if card.cost is None else {"cost": card.cost}
    resumed = max(teaching.store.num_resumed, teaching.paid.num_resumed)
    return StageResult((*written.files, "tokenizer", CARD_FILE, "card.md"), metrics, resumed)


@dataclass(slots=True)
class _Turn:
    """What one teacher is asked, and what has come of it."""

    name: str
    card: TeacherCard
    origin: Origin | None = None
    """Origin of its answers where training data is rewritten."""
    solved: dict[str, bool] = field(default_factory=dict)
    """The prompts that were asked, by uid, and whether an answer was correct."""
    usable: dict[str, dict[bytes, str]] = field(default_factory=lambda: defaultdict(dict))
    """The answers that may become traces, by prompt in the order of sampling: hashes of their texts, which are equal
    where only spacing differs, and keys."""

    @property
    def title(self) -> str:
        return f"{self.name}, rewriting" if self.origin is Origin.REWRITTEN else self.name


@dataclass(slots=True)
class _Teaching:
    """The turns of all teachers, and what they share."""

    settings: SampleSettings
    context: StageContext
    policy: PreTrainedTokenizerBase
    row_filter: RowFilter
    """The rules for traces."""
    instructions: Mapping[str | None, str]
    """The environment's, by data source."""
    store: AnswerStore
    paid: AnswerStore
    progress: ResponseProgress
    turns: list[_Turn] = field(default_factory=list)
    missing: dict[str, ModelAnswer] = field(default_factory=dict)
    """Stand for answers that did not come, which a stage that resumes asks for again."""
    folders: dict[str, tuple[Path, PreTrainedTokenizerBase]] = field(default_factory=dict)
    """Folders of teachers without an endpoint, with their tokenizers."""

    def is_solved(self, prompt: Prompt) -> bool:
        return any(turn.usable.get(prompt.uid) for turn in self.turns)

    def ask_all(self, prompts: Sequence[Prompt]) -> None:
        """Every teacher's turn, in their order; to rewrite, the policy's own answers, and then its answers with the
        expert's trace in the prompt for the rest."""
        config = self.settings.sample
        for name, teacher in config.teachers.items():
            left = [prompt for prompt in prompts if not (config.cascade and self.is_solved(prompt))]
            with ExitStack() as stack:
                asker = stack.enter_context(self._opened(name, left)) if left else None
                for origin in (None,) if config.rewrite is None else (Origin.OWN, Origin.REWRITTEN):
                    if origin is Origin.REWRITTEN:
                        left = [prompt for prompt in left if prompt.traces and not self.is_solved(prompt)]
                    card = TeacherCard(teacher.model, teacher.decoding, teacher.max_response_tokens, len(left))
                    card.cost = None if teacher.price is None else 0.0
                    self.turns.append(_Turn(name, card, origin))
                    if asker is not None:
                        self._take_turn(self.turns[-1], left, asker)

    def _take_turn(self, turn: _Turn, prompts: Sequence[Prompt], asker: Asker) -> None:
        """Ask one teacher until the prompts or the budget are done."""
        config, teacher = self.settings.sample, self.settings.sample.teachers[turn.name]
        rewrite = config.rewrite if turn.origin is Origin.REWRITTEN else None
        num_samples = teacher.num_samples if rewrite is None else rewrite.num_samples
        # The names by which answers have been paid for, which are not to be paid for again.
        purpose = "synthesize" if rewrite is None else "rewrite"
        shown = dict(zip((prompt.uid for prompt in prompts), self._rendered(turn.name, prompts, rewrite), strict=True))

        def question(prompt: Prompt, sample: int) -> SampleRequest:
            key = sample_key(turn.title, "traces", prompt.uid, sample)
            seed = derive_seed(self.settings.seed, purpose, turn.name, prompt.uid, sample)
            return SampleRequest(key, dataclasses.replace(prompt, traces=()), shown[prompt.uid], sample, seed)

        protocol = SuiteProtocol(teacher.temperature, teacher.top_p, 1, OWN, (), None)
        samples = range(num_samples)
        for wave in ([sample] for sample in samples) if config.stop_when_kept else [samples]:
            left = [each for each in prompts if len(turn.usable.get(each.uid, ())) < config.keep.max_per_prompt]
            questions = [question(prompt, sample) for sample in wave for prompt in left]
            size = CHUNK if config.budget is not None else max(len(questions), 1)
            for start in range(0, len(questions), size):
                if config.budget is not None and config.budget.is_reached(*self._used):
                    later = (num_samples - wave[-1] - 1) * len(left)
                    turn.card.not_asked = len(questions) - start + later
                    return
                chunk = questions[start : start + size]
                asked = Questions(turn.title, "", protocol, teacher.max_response_tokens, chunk)
                asker.ask([asked], self.store, self.progress.add)
                for place in range(0, len(chunk), _COUNTED_AT_ONCE):
                    self._count(turn, chunk[place : place + _COUNTED_AT_ONCE])

    @property
    def _used(self) -> tuple[int, float]:
        """Tokens of all teachers, and their costs."""
        cards = [turn.card for turn in self.turns]
        return sum(card.prompt_tokens + card.num_tokens for card in cards), sum(card.cost or 0.0 for card in cards)

    def _count(self, turn: _Turn, samples: Sequence[SampleRequest]) -> None:
        card, price = turn.card, self.settings.sample.teachers[turn.name].price
        answers = [self.missing.get(sample.key) or self.store[sample.key] for sample in samples]
        right = [(each, answer) for each, answer in zip(samples, answers, strict=True) if answer.text is not None]
        traced = [dataclasses.replace(each.prompt, traces=(trace_of(answer, "", "", ""),)) for each, answer in right]
        rows = self.row_filter.judged(self.row_filter.normalised(traced), [[Outcome.CORRECT]] * len(traced))
        for (sample, answer), row in zip(right, rows, strict=True):
            assert answer.text is not None
            rejection = row.rejected_traces[0][1] if row.rejected_traces else row.reason
            if not is_text(answer.text):
                rejection = Rejection.TRACE_UNDECODED
            if rejection is not None:
                card.rejected[rejection.value] = card.rejected.get(rejection.value, 0) + 1
                continue
            text_hash = hashlib.blake2b(" ".join(answer.text.split()).encode(), digest_size=16).digest()
            turn.usable[sample.prompt.uid].setdefault(text_hash, sample.key)
        for sample, answer in zip(samples, answers, strict=True):
            outcome = _UNGRADED.get(answer.finish_reason) or answer.outcome.value
            card.outcomes[outcome] = card.outcomes.get(outcome, 0) + 1
            card.answers += answer.finish_reason is not FinishReason.FAILED
            card.correct += outcome == Outcome.CORRECT
            turn.solved[sample.prompt.uid] = turn.solved.get(sample.prompt.uid, False) or outcome == Outcome.CORRECT
            card.prompt_tokens += answer.prompt_tokens or 0
            card.num_tokens += answer.num_tokens
        card.questions, card.solved = card.questions + len(samples), sum(turn.solved.values())
        if price is not None:
            card.cost = price.of(card.prompt_tokens, card.num_tokens)

    @contextmanager
    def _opened(self, name: str, prompts: Sequence[Prompt]) -> Iterator[Asker]:
        """The teacher of that name; DataError where a question does not fit the context of a model folder."""
        settings, config, context = self.settings, self.settings.sample, self.context
        teacher, environment = config.teachers[name], settings.environment
        if teacher.endpoint is not None:
            server, setting = context.execution.teachers[name], f"execution.teachers.{name}"
            with (
                closing(TextEndpoint.connect(teacher.endpoint, server, (CHAT,), setting)) as endpoint,
                open_graders(settings.grading, context) as (grader, judges),
            ):
                served = PaidEndpoint(endpoint, self.paid, name, _MISSES)
                if environment is None:
                    served.watch = self.progress.heard
                client = TextClient(environment, served, judges, for_traces=True)
                size = endpoint.concurrency * (_BATCHES if environment is None else FULL_BATCHES)
                limits = None if environment is None else environment.limits
                self.progress.begin()
                yield Asker(client, grader, size, limits=limits, keep=self._keep)
            return
        setting, most, total = f"sample.teachers.{name}", teacher.max_response_tokens, self.progress.total
        folder, tokenizer = self._folder(name)
        asked = self._rendered(name, prompts)
        if config.rewrite is not None:
            asked += self._rendered(name, [prompt for prompt in prompts if prompt.traces], config.rewrite)
        longest = longest_of(setting, [len(each.ids) for each in asked], most, folder)
        model = ModelToAsk(folder, tokenizer, teacher.dtype, self.policy)
        with open_asker(settings, teacher.engine, context, longest, self.progress, total, model, self._keep) as (
            asker,
            _,
        ):
            self.progress.begin()
            yield asker

    def _keep(self, sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer | None:
        if answer.is_missing and not answer.has_failed:
            self.missing[sample.key] = without_text(sample, answer)
            return None
        return kept_answer(sample, answer)

    def _folder(self, name: str) -> tuple[Path, PreTrainedTokenizerBase]:
        """The folder and the tokenizer of a teacher without an endpoint."""
        if name not in self.folders:
            path, setting = self.settings.sample.teachers[name].path, f"sample.teachers.{name}.path"
            assert path is not None
            folder = model_folder(path, setting)
            self.folders[name] = folder, adapt_tokenizer(str(folder), None, setting)
        return self.folders[name]

    def _rendered(
        self, name: str, prompts: Sequence[Prompt], rewrite: RewriteConfig | None = None
    ) -> list[RenderedPrompt]:
        """The prompts as the teacher is asked them, and graders read them, under the policy's template; to `rewrite`,
        with their first trace.

        A system prompt of the teacher's own gets the environment's instructions, which the prompt's has.
        """
        teacher, shown = self.settings.sample.teachers[name], list[tuple[Message, ...]]()
        for prompt in prompts:
            *before, last = prompt.messages
            if rewrite is not None:
                slots = {"prompt": last.content, "trace": prompt.traces[0].text}
                last = dataclasses.replace(last, content=fill_slots(rewrite.template, slots))
            messages = (*before, last)
            if (system := teacher.system_prompt) is not None:
                others = tuple(message for message in messages if message.role != "system")
                messages = (Message("system", system), *others) if system else others
                if self.instructions:
                    asked = dataclasses.replace(prompt, messages=messages)
                    messages = with_instructions([asked], self.instructions)[0].messages
            shown.append(messages)
        ids = [()] * len(shown) if teacher.endpoint else map(tuple, render_prompts(self._folder(name)[1], shown))
        template = self.row_filter.template
        return [RenderedPrompt(template, *each) for each in zip(ids, shown, strict=True)]

    def kept_traces(self, uid: str) -> list[Trace]:
        """The new traces of a prompt, read from the store only now.

        Those of the first teacher come first; of equal answers only the first teacher's is kept.
        """
        found, seen = list[Trace](), set[bytes]()
        for turn in self.turns:
            teacher, traces = self.settings.sample.teachers[turn.name], list[Trace]()
            for text_hash, key in turn.usable.get(uid, {}).items():
                if text_hash not in seen:
                    seen.add(text_hash)
                    trace = trace_of(self.store[key], turn.name, teacher.model, teacher.decoding, turn.origin)
                    text = trace.text if trace.turns else with_opened_thinking(trace.text)
                    traces.append(dataclasses.replace(trace, text=text))
            found += kept_traces(traces, self.settings.sample.keep)
        return found


def _benchmarks(config: DataConfig, data: Path, seed: int) -> BenchmarkIndex:
    """All benchmark problems, as prepare_data indexed them."""
    index = BenchmarkIndex()
    for name, source in config.suites.items():
        if not (isinstance(source, VerifiersSource) and source.equal_prompts):
            index.add(name, iterate_prompts(data / "suites" / f"{name}.parquet"))
    for name, source in config.decontamination.benchmarks.items():
        rows = open_source(source, f"decontamination.benchmarks.{name}", seed).rows()
        index.add(name, (row for row in rows if isinstance(row, Prompt)))
    return index.finish()


if __name__ == "__main__":
    main("sample", run, defers_stop_requests=True)
