"""The stage `sample` with teachers, whose endpoint answers as told: what is asked, kept, counted, limited, refused.

What it shares with other stages that ask is in `test_answering`.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.answered_stage import contents, number_in, stage_context, teaching
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.endpoint import CHAT, Answer, Endpoint, Reply, completion, mortal, refusal
from synthetic.stage_jobs import write_wide_model

from luffy.config import load_experiment
from luffy.config.answers import PriceConfig, SampleConfig, SpendingLimit
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.settings import SampleSettings
from luffy.data.answer_cards import TaughtCard, read_card
from luffy.data.parquet import read_prompts, write_prompts
from luffy.errors import LostError
from luffy.pipeline.resources import find_resources
from luffy.rollout.engine import Completion
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageResult
from luffy.stages.rl_components import tokenize_tasks
from luffy.stages.sample import run
from luffy.types import Message, Prompt, Trace

pytestmark = pytest.mark.usefixtures("shared_graders")
BENCHMARK = "what is one and one and one and one and one and one and one"


def says(text: str, **choice: Any) -> Answer:
    return lambda path, body: completion(text, **choice)


def asked_number(body: dict) -> int:
    return number_in(body["messages"][-1]["content"])


def right(path: str, body: dict) -> Reply:
    return completion(f"so \\boxed{{{asked_number(body) + 1}}}", num_tokens=5, prompt_tokens=10)


wrong = says("\\boxed{77}", num_tokens=5, prompt_tokens=10)


def by_prompt(answers: dict[int, Answer], others: Answer = right) -> Answer:
    return lambda path, body: answers.get(asked_number(body), others)(path, body)


@contextmanager
def served(answer: Answer, key: str | None = None) -> Iterator[Endpoint]:
    endpoint = Endpoint(answer, (CHAT,), key)
    try:
        yield endpoint
    finally:
        endpoint.close()


def teacher(**changes: object) -> dict[str, object]:
    return {"endpoint": {"name": "org/big"}, "max_response_tokens": 40, "num_samples": 2, **changes}


def settings(
    teachers: dict[str, dict] | None = None, data: dict[str, object] | None = None, **changes: object
) -> SampleSettings:
    return teaching(teachers or {"r1": teacher()}, data, ("test",), **changes)


def traces_in(out: Path, name: str = "train") -> dict[str, list[str]]:
    return {prompt.uid: [trace.author for trace in prompt.traces] for prompt in read_prompts(out / f"{name}.parquet")}


def card_in(out: Path) -> TaughtCard:
    return read_card(out / "card.json", TaughtCard)


class Bench:
    """Runs the stage in folders of its own on seven prompts: p0 has a trace, the others have none.

    Stages with other parents find no answers of one another.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.endpoint: Endpoint
        (self.data / "suites").mkdir(parents=True)
        first, *bare = problems(7)
        self.write([dataclasses.replace(first, traces=(Trace("\\boxed{1}", "human", True),)), *bare], bare)
        write_prompts(
            self.data / "suites" / "test.parquet", [Prompt("s0", "suite", (Message("user", BENCHMARK),), "7")]
        )
        tiny_tokenizer().save_pretrained(self.data / "tokenizer")

    def write(self, train: list[Prompt], complement: list[Prompt]) -> None:
        write_prompts(self.data / "train.parquet", train)
        write_prompts(self.data / "sft.parquet", [prompt for prompt in train if prompt.traces])
        write_prompts(self.data / "rl_complement.parquet", complement)

    def run(
        self, answer: Answer, config: SampleSettings | None = None, out: str = "o", **server: object
    ) -> StageResult:
        """With one teacher, which answers so; `endpoint` then has what it was asked."""
        config = config or settings()
        (name,) = config.sample.teachers
        with served(answer) as self.endpoint:
            return self.run_with(config, {name: self.endpoint.url}, out, **server)

    def run_with(
        self, config: SampleSettings, servers: dict[str, str], out: str = "o", **server: object
    ) -> StageResult:
        limits = {"max_retries": 1, "request_timeout_s": 20.0, **server}
        teachers = {name: ServerConfig.model_validate({"urls": (url,), **limits}) for name, url in servers.items()}
        execution = ExecutionConfig(teachers=teachers, rollout_batch_size=4)
        return run(config, stage_context("sample", self.root / out, {"data": self.data}, execution=execution))

    @property
    def asked(self) -> list[int]:
        return [asked_number(body) for _, body in self.endpoint.asked]


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Bench:
    monkeypatch.setattr("luffy.http_client._FIRST_DELAY_S", 0.01)
    return Bench(tmp_path)


def test_prompts_without_traces_get_those_of_correct_answers_and_every_later_reader_finds_its_file(tmp_path, bench):
    out = tmp_path / "out"
    result = bench.run(by_prompt({3: wrong}), settings({"r1": teacher(temperature=0.6)}), "out")
    assert traces_in(out) == {"p0": ["human"], "p3": []} | {f"p{number}": ["r1"] for number in (1, 2, 4, 5, 6)}
    assert sorted(traces_in(out, "sft")) == ["p0", "p1", "p2", "p4", "p5", "p6"]
    assert traces_in(out, "rl_complement") == {"p3": []}
    (trace,) = read_prompts(out / "train.parquet")[1].traces
    assert trace == Trace(
        "so \\boxed{2}", "r1", True, model="org/big", decoding="temperature 0.6, top_p 1", num_tokens=5
    )
    # The first sample of every prompt, then the second of the one that has no correct answer.
    assert Counter(bench.asked) == {1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1}
    card = card_in(out)
    assert (card.prompts, card.asked_about, card.given, card.without) == (7, 6, 5, ("p3",))
    assert card.teachers["r1"].outcomes == {"correct": 5, "wrong": 2}
    assert (card.teachers["r1"].pass_rate, card.num_tokens) == (5 / 7, 7 * 15)
    assert result.metrics["prompts/given_a_trace"] == 5


def test_every_end_of_an_answer_is_an_outcome_and_the_rules_for_traces_hold_for_answers(tmp_path, bench):
    script = {
        1: says("\\boxed{2}", reasoning_content="1 +1=2"),
        2: says("\\boxed{3}", finish_reason="length"),
        3: says("\\boxed{4}", finish_reason="content_filter"),
        4: says(""),
        5: lambda path, body: Reply(200, b'{"choices": [{"mess'),
        6: lambda path, body: refusal(400, "your policy forbids this"),
    }
    bench.run(by_prompt(script), settings({"r1": teacher(num_samples=1)}), "ends/o")
    card = card_in(tmp_path / "ends" / "o")
    assert card.teachers["r1"].outcomes == {"correct": 1, "failed": 1, "no_answer": 1, "refused": 2, "truncated": 1}
    assert card.without == ("p2", "p3", "p4", "p5", "p6")
    (trace,) = read_prompts(tmp_path / "ends" / "o" / "train.parquet")[1].traces
    assert trace.text == "<think>\n1 +1=2\n</think>\n\n\\boxed{2}"
    script = {
        1: says(f"{'so ' * 50}\\boxed{{2}}"),
        2: says("<think>still \\boxed{3}"),
        3: says(f"{BENCHMARK} \\boxed{{4}}"),
        4: says("\\boxed{5}<|eos|>"),
    }
    config = settings({"r1": teacher(num_samples=1)}, {"max_trace_tokens": 100})
    bench.run(by_prompt(script), config, "rules/o")
    card = card_in(tmp_path / "rules" / "o").teachers["r1"]
    assert card.rejected == {"trace_holds_benchmark_problem": 1, "trace_holds_stop_token": 1, "trace_too_long": 1}
    assert card.outcomes == {"correct": 5, "no_answer": 1}
    given = traces_in(tmp_path / "rules" / "o").items()
    assert [uid for uid, authors in given if "r1" in authors] == ["p5", "p6"]


def test_several_teachers_sign_their_traces_and_in_a_cascade_the_next_one_gets_what_is_left(tmp_path, bench):
    """Undecodable bytes are no trace either, and the prompt is asked again."""
    teachers = {"small": teacher(), "big": teacher(endpoint={"name": "org/huge"}, system_prompt="Think.")}
    with served(by_prompt({2: wrong, 3: says("caf\ufffd \\boxed{4}")})) as small, served(right) as big:
        servers = {"small": small.url, "big": big.url}
        bench.run_with(settings(teachers), servers, "all/o")
        assert Counter(asked_number(body) for _, body in small.asked) == {1: 1, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}
        found = traces_in(tmp_path / "all" / "o")
        assert (found["p1"], found["p2"], found["p3"]) == (["small"], ["big"], ["big"])  # equal texts are one trace
        assert big.asked[0][1]["messages"][0] == {"role": "system", "content": "Think."}
        before = len(big.asked)
        bench.run_with(settings(teachers, cascade=True), servers, "cascade/o")
    assert sorted(asked_number(body) for _, body in big.asked[before:]) == [2, 3]
    card = card_in(tmp_path / "cascade" / "o")
    assert (card.teachers["big"].prompts, card.teachers["small"].rejected) == (2, {"trace_undecoded": 2})


def test_an_endpoint_that_is_dead_never_counts_as_an_outcome(tmp_path, bench):
    with pytest.raises(LostError, match="status 503: gone"):
        bench.run(lambda path, body: refusal(503, "gone"), max_retries=0)
    bench.run(mortal(4, right, refusal(503, "gone")), max_retries=0, concurrency=1)
    assert card_in(tmp_path / "o").teachers["r1"].outcomes["failed"] > 0  # fewer than make an endpoint dead
    bench.run(right, out="second")
    assert len(bench.asked) == 2  # the answers of the first stage are taken over, its failures are not
    assert card_in(tmp_path / "second").given == 6


def test_what_was_paid_for_in_the_stage_of_an_earlier_version_is_not_paid_for_again(tmp_path, bench):
    bench.run(by_prompt({3: wrong}), out="synthesize/key")
    (tmp_path / "synthesize" / "key" / "answers.jsonl").unlink()
    bench.run(right, out="sample/other")
    assert bench.asked == []
    assert contents(tmp_path / "sample" / "other", ["train.parquet"]) == contents(
        tmp_path / "synthesize" / "key", ["train.parquet"]
    )


def test_requests_that_are_all_rejected_are_a_mistake_and_no_outcome(tmp_path, bench, monkeypatch):
    """From the first on, or from some moment on, whatever its batches."""
    with refused("top_p is not"):
        bench.run(lambda path, body: refusal(400, "top_p is not supported"))
    assert (tmp_path / "o" / "paid_answers.jsonl").read_bytes() == b""
    monkeypatch.setattr("luffy.stages.sample._BATCHES", 1)
    monkeypatch.setattr("luffy.stages.sample._MISSES", 2)
    monkeypatch.setattr("luffy.stages.answers.paid._REJECTIONS", 1)
    with refused("no credit"):
        bench.run(mortal(2, right, refusal(400, "no credit")), concurrency=1)
    bench.run(right)
    assert card_in(tmp_path / "o").teachers["r1"].outcomes == {"correct": 6}


def test_a_budget_is_looked_at_after_each_chunk_however_many_are_asked_at_once(tmp_path, bench, monkeypatch):
    monkeypatch.setattr("luffy.stages.sample.CHUNK", 2)

    def run_with(name: str, answer: Answer, concurrency: int, **budget: float) -> tuple[TaughtCard, list[int]]:
        price = {"prompt_per_million": 100_000.0, "completion_per_million": 200_000.0}
        bench.run(answer, settings({"r1": teacher(price=price)}, budget=budget), f"{name}/o", concurrency=concurrency)
        return card_in(tmp_path / name / "o"), bench.asked

    one, asked = run_with("one", right, 1, max_tokens=40)
    assert one == run_with("many", right, 64, max_tokens=40)[0]
    assert (asked, one.num_tokens, one.never_asked) == ([1, 2, 3, 4], 60, ("p5", "p6"))
    assert one.teachers["r1"].not_asked == 2 + 6
    text = (tmp_path / "one" / "o" / "card.md").read_text()
    assert "p5, p6" in text and "60 tokens" in text and "40 allowed" in text
    by_cost, asked = run_with("cost", right, 64, max_cost=2.0)
    assert (len(asked), by_cost.cost) == (2, 4.0)  # 10 tokens of prompt and 5 of the answer, twice
    # A stage that resumes in the middle of a chunk asks what is left of it, and no more.
    with refused("no credit"):
        run_with("cut", mortal(3, right, refusal(402, "no credit")), 1, max_tokens=40)
    assert run_with("cut", right, 1, max_tokens=40) == (one, [4])
    # A rejected prompt is an outcome.
    rejecting = by_prompt({1: lambda path, body: refusal(400, "the prompt is filtered")})
    card, asked = run_with("rejected", rejecting, 1, max_tokens=40)
    assert (asked[0], card.teachers["r1"].outcomes) == (1, {"correct": 3, "refused": 1})


def test_costs_follow_the_price_and_reach_the_limit():
    price, limit = PriceConfig(prompt_per_million=1.0, completion_per_million=8.0), SpendingLimit(max_cost=0.00003)
    assert price.of(6, 2) == 2.2e-05
    assert [limit.is_reached(10**9, cost) for cost in (2.2e-05, 3e-05)] == [False, True]
    assert [SpendingLimit(max_tokens=9).is_reached(tokens, 1e9) for tokens in (8, 9)] == [False, True]


def test_a_model_folder_gives_its_log_probabilities_where_its_tokens_are_the_policys(tmp_path, bench, monkeypatch):
    class Rounded(ScriptedEngine):
        def _complete(self, *asked: Any) -> Completion:
            whole = super()._complete(*asked)
            return dataclasses.replace(whole, logprobs=(1e-9,) * len(whole.token_ids))

    write_wide_model(tmp_path / "teacher", seed=0)
    engine = Rounded(tiny_tokenizer(), lambda prompt, seed: f"\\boxed{{{number_in(prompt) + 1 + seed % 2}}}")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    own = {"path": str(tmp_path / "teacher"), "max_response_tokens": 20, "num_samples": 2}
    bench.run_with(settings({"own": own}), {})
    card = card_in(tmp_path / "o").teachers["own"]
    assert card.with_logprobs == card.traces > 0
    (trace, *_) = [trace for p in read_prompts(tmp_path / "o" / "train.parquet") for trace in p.traces][1:]
    assert trace.logprobs == (0.0,) * trace.num_tokens


# Rewriting.

REWRITING = settings({"policy": teacher()}, prompts="all", rewrite={"num_samples": 2})


@pytest.fixture
def experts(bench) -> Bench:
    """Of its four prompts, the first three have an expert's trace."""
    traces = [(Trace(f"an expert says \\boxed{{{number + 1}}}", "human", True),) for number in range(3)]
    rows = [dataclasses.replace(row, traces=known) for row, known in zip(problems(4), [*traces, ()], strict=True)]
    bench.write(rows, [])
    return bench


def is_helped(body: dict) -> bool:
    return "expert" in body["messages"][-1]["content"]


def test_rewriting_keeps_what_the_policy_solves_then_shows_it_the_trace_and_the_expert_is_the_last_resort(
    tmp_path, experts
):
    """p0 to p2 have an expert's trace: the policy solves p0 alone, p1 with the trace, p2 never; p3 has no expert."""

    def pupil(path: str, body: dict) -> Reply:
        number = asked_number(body)
        return (right if number == 0 or (number == 1 and is_helped(body)) else wrong)(path, body)

    result = experts.run(pupil, REWRITING)
    found = read_prompts(tmp_path / "o" / "train.parquet")
    origins = {prompt.uid: [(trace.author, trace.origin) for trace in prompt.traces] for prompt in found}
    expected = {"p0": ("policy", "own"), "p1": ("policy", "rewritten"), "p2": ("human", "expert")}
    assert origins == {uid: [trace] for uid, trace in expected.items()} | {"p3": []}
    shown = [asked_number(body) for _, body in experts.endpoint.asked if is_helped(body)]
    assert sorted(shown) == [1, 2, 2], "until it is right, where it failed by itself and there is a trace"
    card = card_in(tmp_path / "o")
    assert card.origins == {"expert": 1, "own": 1, "rewritten": 1}
    assert result.metrics["traces/rewritten"] == 1
    counts = {name: (each.questions, each.traces) for name, each in card.teachers.items()}
    assert counts == {"policy": (7, 1), "policy, rewriting": (3, 1)}
    assert "expert 1, own 1, rewritten 1" in (tmp_path / "o" / "card.md").read_text()
    # A rewritten trace is learned without the trace in its prompt.
    tokenizer, bare = tiny_tokenizer(), {prompt.uid: prompt for prompt in problems(4)}
    for name in ("train", "sft", "rl_complement"):
        for prompt in read_prompts(tmp_path / "o" / f"{name}.parquet"):
            assert prompt.messages == bare[prompt.uid].messages
            (task,) = tokenize_tasks(tokenizer, [prompt])
            assert "expert" not in tokenizer.decode(task.prompt_ids)
            replies = " ".join(trace.reply for trace in task.demonstrations)
            assert ("expert" in replies) == (prompt.uid == "p2" and name != "rl_complement")


def test_a_copy_of_the_experts_text_is_the_experts(tmp_path, experts):
    def copies(path: str, body: dict) -> Reply:
        said = completion(f"an expert says \\boxed{{{asked_number(body) + 1}}}")
        return said if is_helped(body) else wrong(path, body)

    experts.run(copies, REWRITING)
    assert card_in(tmp_path / "o").origins == {"expert": 3}


# Refusals.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": "without_traces"}, "set prompts: all"),
        ({"rewrite": {"template": "{prompt}"}}, "{trace}"),
        ({"teachers": {"a": teacher(), "b": teacher()}}, "2 models"),
    ],
)
def test_a_rewriting_that_cannot_be_is_refused(changes, named):
    with pytest.raises(ValidationError) as caught:
        SampleConfig.model_validate({"teachers": {"policy": teacher()}, "prompts": "all", "rewrite": {}, **changes})
    assert named in str(caught.value)


def with_a_wrong_key(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("R1_KEY", "wrong")


def without_prompts(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    bench.write(read_prompts(bench.data / "train.parquet")[:1], [])


def without_a_template(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    write_wide_model(bench.root / "teacher", seed=0)
    (bench.root / "teacher" / "chat_template.jinja").unlink()


KEYED, AT = {"api_key_variable": "R1_KEY"}, "execution.teachers.r1"
FOLDER = {"teachers": {"own": {"path": "teacher", "max_response_tokens": 20}}}
EIGHT = {"data": {"sft": {"unique_train_examples": 8}}}


@pytest.mark.parametrize(("prepare", "config", "server", "named"), [
    (None, {}, KEYED, (f"{AT}.api_key_variable", "R1_KEY", "not set")),
    (with_a_wrong_key, {}, KEYED, (f"{AT}.api_key_variable", "R1_KEY", "rejected")),
    (None, {}, {"urls": ("http://127.0.0.1:9",)}, (f"{AT}.urls", "http://127.0.0.1:9")),
    (without_a_template, FOLDER, {}, ("sample.teachers.own.path", "chat template")),
    (without_prompts, {}, {}, ("sample.prompts: all",)),
    # Unlike in prepare_data, every prompt has a trace now.
    (None, {"data": {"rl": "complement"}}, {}, ("data.rl", "complement")),
    (None, EIGHT, {}, ("data.sft.unique_train_examples", "8 asked for, 7 training prompts")),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(bench, monkeypatch, prepare, config, server, named):
    monkeypatch.chdir(bench.root)
    if prepare is not None:
        prepare(bench, monkeypatch)
    own = settings(**config)
    with served(right, key="sk-right" if server else None) as endpoint, refused(*named):
        bench.run_with(own, {"r1": endpoint.url} if "r1" in own.sample.teachers else {}, **server)


def test_a_plan_says_that_a_key_is_not_set(monkeypatch):
    teachers = "sample={teachers: {r1: {endpoint: {name: m}, max_response_tokens: 8}}}"
    server = "execution.teachers={r1: {urls: ['http://h:1/v1'], api_key_variable: R1_KEY}}"
    config = load_experiment(CONFIGS / "smoke.yaml", [teachers, server])
    assert "R1_KEY is not set; export it" in " ".join(find_resources(config).notes)
    monkeypatch.setenv("R1_KEY", "sk-1")
    assert "R1_KEY" not in " ".join(find_resources(config).notes)
