"""The loop of every stage that asks: what a record says, what runs at once, what is kept when a part fails; and its
answers on disk: what a kill leaves of them, and what other stages take over."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.answered_stage import number_in, stage_context
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits
from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import FormatGrader, JudgeGrader
from luffy.data.templates import render_prompts
from luffy.errors import ClusterError, DataError, EnvironmentFault
from luffy.evaluation.sample_files import SampleRecord
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.stages.answers import store as module
from luffy.stages.answers.asker import Asker, ResponseProgress, graded_records
from luffy.stages.answers.clients import ModelClient, Questions, Suite, TokenModelClient, check_suite, render_as_ids
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.types import FinishReason, Message, Outcome

TOKENIZER = tiny_tokenizer()
CONFIG = EvaluationConfig(
    decodings={"greedy": DecodingConfig(temperature=0.0), "sampled": DecodingConfig(temperature=1.0, num_samples=3)},
    max_response_tokens=32,
)
SUMS = Suite("sums", problems(12))
LONGEST = len(render_prompts(TOKENIZER, [problems(11)[10].messages])[0])
"""Tokens of the one prompt with a number of two digits."""
Script = Callable[[str, int], str]


def by_seed(prompt: str, seed: int) -> str:
    return f"\\boxed{{{seed % 1000}}}"


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


class Bench:
    """Asks a model in one stage's directory."""

    def __init__(self, folder: Path, grader: GraderPool) -> None:
        self.store = AnswerStore(folder / "answers.jsonl")
        self._grader = grader
        self.batches: list[int] = []

    def ask(
        self,
        client: ModelClient | Script,
        *suites: Suite,
        decoding: str = "greedy",
        batch_size: int = 4,
        config: EvaluationConfig = CONFIG,
        grader: GraderPool | None = None,
        calls_at_once: int = 1,
        limits: EpisodeLimits | None = None,
        tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    ) -> list[list[SampleRecord]]:
        """The records of each suite, answered by a client or a script."""
        if not isinstance(client, TokenModelClient):
            client = TokenModelClient(ScriptedEngine(tokenizer, client), tokenizer)
        render = render_as_ids(tokenizer)
        requests = [Questions.of_suite(suite, decoding, config, render, 7) for suite in suites]
        asker = Asker(client, grader or self._grader, batch_size, calls_at_once=calls_at_once, limits=limits)
        asker.ask(requests, self.store, lambda answers: self.batches.append(len(answers)))
        return [list(graded_records(request, self.store)) for request in requests]


@pytest.fixture
def bench(tmp_path, grader) -> Bench:
    return Bench(tmp_path, grader)


FORMAT = {"suites": {"sums": SuiteConfig(grader=FormatGrader())}}


@pytest.mark.parametrize(("config", "response", "found"), [
    ({}, "\\boxed{1}",
     {"uid": "p0", "prompt": "<|bos|>0 +1\n", "answer": "1", "ground_truth": "1", "outcome": "correct",
      "correct": True, "reason": "the same text or number", "finish_reason": "stop"}),
    ({}, "<think>1 + 1", {"answer": None, "outcome": "no_answer", "reason": "the reasoning is not closed"}),
    ({}, "1 " * 40, {"finish_reason": "length", "num_tokens": 32}),
    ({}, "\\boxed{1.0}", {"grader": "math", "outcome": "correct"}),
    (FORMAT, "<think>1</think>2", {"grader": "format", "outcome": "correct"}),
    # A response ends behind the first stop text, whether the engine looked for it or not, and is not cut off.
    ({"stop": ("reverse", " 3")}, "\\boxed{1} 2 3 4 reverse 5",
     {"response": "\\boxed{1} 2 3", "finish_reason": "stop", "correct": True}),
    ({"suites": {"sums": SuiteConfig(stop=("=",))}}, "1 =" + " 1" * 40, {"response": "1 =", "finish_reason": "stop"}),
    # A template asks in its own words, and opens what it opens.
    ({"template": "r1_zero"}, "1</think> <answer>\\boxed{1}</answer> 7",
     {"response": "<think>1</think> <answer>\\boxed{1}</answer>", "correct": True}),
])  # fmt: skip
def test_records_say_what_was_asked_answered_and_found(bench, config, response, found):
    ((record, *_),) = bench.ask(lambda prompt, seed: response, SUMS, config=CONFIG.model_copy(update=config))
    assert {name: getattr(record, name) for name in found} == found
    asked = "\nUser: 0 +1\nAssistant: <think>" if config.get("template") else "0 +1\n"
    assert record.prompt.endswith(asked)
    if record.finish_reason == "stop" and "template" not in config:
        end = 0 if config.get("stop") or "=" in record.response else 1
        assert record.num_tokens == len(TOKENIZER(record.response)["input_ids"]) + end


def test_records_come_problem_by_problem_and_say_what_the_data_says_of_each(bench):
    choice = {"subfield": "Number Theory", "options": ["1", "2", "3"], "confidential": True}
    extra = [{"subject": "Algebra", "level": 5}, choice, {}]
    prompts = [replace(prompt, extra_info=info) for prompt, info in zip(problems(3), extra, strict=True)]
    prompts[2] = replace(prompts[2], data_source="GPQA-main")
    (records,) = bench.ask(by_seed, Suite("sums", prompts), decoding="sampled")
    assert [(record.uid, record.sample) for record in records] == [(f"p{i}", n) for i in range(3) for n in range(3)]
    said = [(record.subject, record.level, record.num_options, record.confidential) for record in records[::3]]
    assert said == [("Algebra", "5", None, False), ("Number Theory", None, 3, True), (None, None, None, True)]


def test_a_box_in_opened_reasoning_is_no_answer_and_a_judge_that_cannot_be_reached_ends_the_evaluation(bench):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "<think>"
    ((record, *_),) = bench.ask(lambda prompt, seed: "\\boxed{1}", SUMS, tokenizer=tokenizer)
    assert (record.outcome, record.response) == ("no_answer", "<think>\\boxed{1}")
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    config = CONFIG.model_copy(update={"suites": {"more": SuiteConfig(grader=judge)}})
    with pytest.raises(ClusterError, match=r"4 of 4 responses have no verdict \(judge: http://127"):
        bench.ask(lambda prompt, seed: "it is 3", Suite("more", problems(12)), config=config)


def test_a_batch_is_graded_while_the_next_one_is_generated(bench):
    """The second batch is not given out before the first one is in grading: neither could wait for the other."""
    grading, generating = threading.Event(), threading.Event()

    class Grader(GraderPool):
        def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
            grading.set()
            assert generating.wait(PATIENCE_S)
            return super().grade(requests)

    def answered(prompt: str, seed: int) -> str:
        if len(engine.requests) > 6:
            assert grading.wait(PATIENCE_S)
            generating.set()
        return by_seed(prompt, seed)

    engine = ScriptedEngine(TOKENIZER, answered)
    with Grader(1, PATIENCE_S) as grader:
        (records,) = bench.ask(TokenModelClient(engine, TOKENIZER), SUMS, batch_size=6, grader=grader)
    assert [record.uid for record in records] == [f"p{i}" for i in range(12)]


class Within(ScriptedEngine):
    """Answers each call in a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(TOKENIZER, by_seed)
        self._context = context

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        with self._context():
            return super().generate(requests, params)


@pytest.mark.parametrize("calls_at_once", [1, 2])
def test_what_was_generated_before_the_engine_failed_is_kept_and_not_asked_for_again(bench, calls_at_once):
    answered = iter(range(2))

    @contextmanager
    def two_calls() -> Iterator[None]:
        if next(answered, None) is None:
            raise ClusterError("http://host:8000: no answer")
        yield

    failing = TokenModelClient(Within(two_calls), TOKENIZER)
    with pytest.raises(ClusterError, match="no answer"):
        bench.ask(failing, SUMS, decoding="sampled", batch_size=5, calls_at_once=calls_at_once)
    # Of two calls at once, the third may overtake the second, which then is the one that fails.
    assert bench.batches in ([[5, 5]] if calls_at_once == 1 else [[5, 5], [5]])
    engine = ScriptedEngine(TOKENIZER, by_seed)
    (records,) = bench.ask(TokenModelClient(engine, TOKENIZER), SUMS, decoding="sampled", batch_size=5)
    assert len(engine.requests) in (26, 31) and sum(bench.batches) == 36
    assert [record.response for record in records] == [by_seed("", record.seed) for record in records]


class OneFailsInEachCall(TokenModelClient):
    """Answers rightly, and says of the first answer that the environment failed afterwards."""

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        first, *others = super().generate(batch)
        return [replace(first, finish_reason=FinishReason.ENVIRONMENT_ERROR), *others]


def test_failures_of_the_environment_are_crashes_and_counted_over_the_suite_and_not_over_a_call(bench):
    """One in four is too much, but a single one is not; with the environment mended, the evaluation goes on."""
    limits = EpisodeLimits(max_failed_share=0.1)
    client = OneFailsInEachCall(ScriptedEngine(TOKENIZER, lambda p, seed: f"\\boxed{{{number_in(p) + 1}}}"), TOKENIZER)
    for _ in range(2):  # a resumed evaluation knows of the failures before it
        with pytest.raises(EnvironmentFault, match="failed in 4 of 16 episodes"):
            bench.ask(client, SUMS, decoding="sampled", limits=limits)
    assert bench.batches == [4] * 3
    (records,) = bench.ask(by_seed, SUMS, decoding="sampled", limits=limits)
    assert bench.batches == [4] * 9
    crashed = [record for record in records if record.outcome == "crashed"]
    assert [(record.correct, record.has_failed) for record in crashed] == [(False, True)] * 3


def test_calls_of_several_suites_run_at_once_and_their_results_come_in_order(tmp_path, grader):
    """The first three calls are those of three suites: none is answered before all have come, and no fourth comes."""
    together, free, one_at_a_time = threading.Barrier(3), threading.Semaphore(3), threading.Lock()

    @contextmanager
    def three_at_once() -> Iterator[None]:
        assert free.acquire(blocking=False)
        together.wait(PATIENCE_S)
        with one_at_a_time:
            yield
            free.release()

    suites = [Suite(name, problems(number)) for name, number in (("a", 1), ("b", 1), ("c", 1), ("d", 8))]
    found = []
    for engine, calls in ((ScriptedEngine(TOKENIZER, by_seed), 1), (Within(three_at_once), 3)):
        (tmp_path / str(calls)).mkdir()
        bench, client = Bench(tmp_path / str(calls), grader), TokenModelClient(engine, TOKENIZER)
        records = bench.ask(client, *suites, decoding="sampled", calls_at_once=calls)
        found.append((records, bench.batches, (tmp_path / str(calls) / "answers.jsonl").read_bytes()))
    assert found[0] == found[1]
    assert [{record.suite for record in cell} for cell in found[1][0]] == [{"a"}, {"b"}, {"c"}, {"d"}]
    assert found[1][1] == [3, 3, 3, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("prompts", "room", "template", "named"),
    [
        (problems(11), 32 + LONGEST, "own", ()),
        (problems(3), None, "own", ()),
        (problems(11), 31 + LONGEST, "own", ("suite sums", "1 of 11", f"{LONGEST} tokens")),
        (problems(3), 64, "r1_zero", ("suite sums", "3 of 3")),
        (problems(3), 64, None, ("suite sums", "no chat template")),
        (problems(2) * 2, 64, "own", ("suite sums", "2 rows repeat")),
        ([], 64, "own", ("suite sums", "no problems")),
    ],
)
def test_a_suite_that_cannot_be_evaluated_whole_is_refused(prompts, room, template, named):
    tokenizer = tiny_tokenizer()
    if template is None:
        tokenizer.chat_template = None
    if not named:
        longest = check_suite(Suite("sums", prompts), tokenizer, 32, room)
        assert longest == len(render_prompts(TOKENIZER, [prompts[-1].messages])[0])
        return
    with refused(*named, error=DataError):
        check_suite(Suite("sums", prompts), tokenizer, 32, room, template or "own")


def test_progress_counts_responses_while_their_call_runs_and_each_once(tmp_path: Path) -> None:
    context = stage_context("evaluate_sft", tmp_path, {})
    progress = ResponseProgress(context, total=20, done=4)
    progress.begin()
    told: list[tuple[int, dict[str, float]]] = []
    context.events.progress = lambda step, total, **metrics: told.append((step, metrics))
    for finished, tokens in ((0, 8), (3, 8), (5, 8)):
        progress.heard(finished, tokens)
    answer: Any = SimpleNamespace(num_tokens=3, outcome=Outcome.CORRECT)
    progress.add([answer] * 8)
    progress.heard(8, 8)
    progress.add([answer] * 8)
    assert [step for step, _ in told] == [4, 7, 12, 12, 20, 20]
    assert progress.tokens == 32 and all(metrics["tokens_per_s"] > 0 for _, metrics in told)
    assert "reward" not in told[2][1] and "reward" in told[3][1]


# Answers on disk.

GRADE = Grade(Outcome.WRONG, "1/3", "other value")
EPISODE = ModelAnswer(
    "guess\u2028 3", 4, FinishReason.TURNS, "", (Message("assistant", "3"), Message("tool", "higher")), {"turns": 1.0},
    (-0.1, -1e-300), 7, "a fault", GRADE, "math",
)  # fmt: skip


def answer(text: str, reason: FinishReason = FinishReason.STOP) -> ModelAnswer:
    return ModelAnswer(text, len(text), reason, prompt_tokens=3)


def stored(path: Path, *batches: dict[str, ModelAnswer], author: str = "") -> bytes:
    store = AnswerStore(path)
    for batch in batches:
        store.add(batch.items(), author)
    store.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


def test_a_kill_at_any_byte_leaves_whole_batches_and_the_rest_is_added_as_before(path):
    batches = [
        {"k1": answer("one\n\n\u2028"), "k2": EPISODE},
        {"k3": answer("zwölf"), "k4": answer("", FinishReason.FAILED)},
        {"k5": ModelAnswer(None, 4, FinishReason.LENGTH, grade=GRADE, grader="math")},
    ]
    ends = [len(stored(path, batch)) for batch in batches]
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        store = AnswerStore(path)
        kept = sum(end <= cut for end in ends)
        assert (store.num_resumed, len(store)) == (sum(map(len, batches[:kept])),) * 2
        for batch in batches[kept:]:
            assert not any(key in store for key in batch)
            store.add(batch.items())
        assert {key: store[key] for batch in batches for key in batch} == {k: v for b in batches for k, v in b.items()}
        store.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "torn",
    [
        *(b'{"uid": 3}\n', b"5\n", b'"abc"\n', b"[]\n", b"\0\0\0\n", b'{"key": "k2", "num_tokens": 3}\n\n'),
        b'{"key": "k2", "author": null, "text": "a", "num_tokens": "3", "end": "stop"}\n',
        b'{"key": "k2", "author": null, "text": 5, "num_tokens": 3, "end": "stop"}\n',
    ],
)
def test_a_line_that_is_no_answer_and_all_after_it_are_dropped(path, torn):
    whole = stored(path, {"k1": answer("one")})
    path.write_bytes(whole + torn + whole.replace(b"k1", b"k3"))
    store = AnswerStore(path)
    assert ("k1" in store, len(store)) == (True, 1)
    assert path.read_bytes() == whole


def test_a_batch_that_fails_leaves_those_before_and_after(path, monkeypatch):
    """By its iterator, or by a disk that becomes full."""

    def failing() -> Iterator[tuple[str, ModelAnswer]]:
        yield "k2", EPISODE
        raise DataError("another problem")

    def half(file: object, data: bytes) -> None:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    write = module._write
    whole = stored(path, {"k1": answer("one")})
    store = AnswerStore(path)
    with pytest.raises(DataError):
        store.add(failing())
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(module, "_write", half)
        store.add([("k2", answer("two"))])
    assert path.read_bytes() == whole
    store.add([("k3", answer("three"))])
    assert (store["k1"].text, store["k3"].text, "k2" in store) == ("one", "three", False)
    assert len(AnswerStore(path)) == 2


def test_answers_of_other_stages_are_adopted_and_those_that_did_not_come_are_not(tmp_path, path):
    other = tmp_path / "other.jsonl"
    failed, refused = answer("", FinishReason.FAILED), answer("", FinishReason.REFUSED)
    graded = ModelAnswer("", 0, FinishReason.ENVIRONMENT_ERROR, grade=GRADE, grader="math")
    stored(other, {"k1": answer("one"), "k2": failed, "k3": refused, "k4": graded, "k5": answer("not wanted")})
    store = AnswerStore(path, [tmp_path / "missing.jsonl", other])
    assert not store.has_answered("a")
    assert store.adopt(["k0", "k1", "k2", "k3", "k4"]) == [other]
    assert (store["k1"], store["k4"], len(store)) == (answer("one"), graded, 2)
    assert (store.num_adopted, store.num_resumed, store.adopt(["k1"])) == (2, 0, [])
    assert path.read_bytes().count(b"\n\n") == 1, "one commit, and so one fsync"


def test_who_has_answered_is_known_and_what_earlier_versions_wrote_is_read(path):
    stored(path, {"k1": answer("\ud800!")}, author="a")
    stored(path, {"k2": answer("", FinishReason.FAILED)}, author="b")
    store = AnswerStore(path)
    assert [store.has_answered(author) for author in "abc"] == [True, False, False]
    assert store["k1"].text == "?!"  # a lone surrogate
    path.unlink()
    line = stored(path, {"k": EPISODE})
    path.write_bytes(line.replace(b'"grade":', b'"second": ["no_answer", null, ""], "grade":'))
    assert AnswerStore(path)["k"] == EPISODE, "graded twice, it has its first grade"


def stale(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """As NFS answers after another machine has deleted the file."""
    raise OSError(errno.ESTALE, "Stale file handle")


def test_answers_of_a_stage_that_is_deleted_meanwhile_are_used_while_they_can_be_read(tmp_path, path, monkeypatch):
    other = tmp_path / "other" / "answers.jsonl"
    other.parent.mkdir()
    stored(other, {"k1": answer("one"), "k2": answer("two")})
    store = AnswerStore(path, [other, tmp_path / "deleted" / "answers.jsonl"])
    shutil.rmtree(other.parent)
    assert store.get("k2") == answer("two")
    monkeypatch.setattr(module.os, "pread", stale)
    assert (store.get("k1"), store.num_adopted) == (None, 1)
