"""The stage `sample` with teachers, whose endpoint answers as told: what is asked, kept, counted, limited, refused.

With an environment right games become traces of many turns, and no turn is paid for twice. What the stage shares with
others that ask is in `test_answering`.
"""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.patience import wait_until
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.answered_stage import contents, number_in, stage_context, teaching
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.endpoint import CHAT, Answer, Endpoint, Reply, completion, mortal, refusal
from synthetic.loaded_source import load_source
from synthetic.stage_jobs import write_wide_model

from luffy.config import load_experiment
from luffy.config.answers import SampleConfig
from luffy.config.data import GuessNumberSource
from luffy.config.environment import CustomEnvironment, GuessNumberEnvironment, MixtureEnvironment
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.settings import SampleSettings
from luffy.data.answer_cards import TaughtCard, read_card
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.templates import load_tokenizer
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.guess_number import GuessingGame
from luffy.errors import EnvironmentFault, LostError
from luffy.pipeline.resources import find_resources
from luffy.rollout.engine import Completion
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.answers.paid import episode_key
from luffy.stages.program import StageResult
from luffy.stages.rl_components import tokenize_tasks
from luffy.stages.sample import run
from luffy.types import Message, Prompt, Trace

pytestmark = pytest.mark.usefixtures("shared_graders")
BENCHMARK = "what is one and one and one and one and one and one and one"


def says(text: str, **choice: Any) -> Answer:
    return lambda path, body: completion(text, **choice)


def rejects(status: int, message: str) -> Answer:
    return lambda path, body: refusal(status, message)


def asked_number(body: dict) -> int:
    return number_in(body["messages"][-1]["content"])


def right(path: str, body: dict) -> Reply:
    return completion(f"so \\boxed{{{asked_number(body) + 1}}}", num_tokens=5, prompt_tokens=10)


wrong = says("\\boxed{77}", num_tokens=5, prompt_tokens=10)
NO_CREDIT = refusal(402, "no credit")


def by_prompt(answers: dict[int, Answer], others: Answer = right) -> Answer:
    return lambda path, body: answers.get(asked_number(body), others)(path, body)


def teacher(**changes: object) -> dict[str, object]:
    return {"endpoint": {"name": "org/big"}, "max_response_tokens": 40, "num_samples": 2, **changes}


def settings(
    teachers: dict[str, dict] | None = None, data: dict[str, object] | None = None, **changes: Any
) -> SampleSettings:
    return teaching(teachers or {"r1": teacher()}, data, ("test",), **changes)


class Bench:
    """Runs the stage in folders of its own on seven prompts: p0 has a trace, the others have none.

    Stages with other parents find no answers of one another.
    """

    def __init__(self, root: Path, serve: Callable[..., Endpoint]) -> None:
        self.root, self.data, self._serve = root, root / "data", serve
        (self.data / "suites").mkdir(parents=True)
        first, *bare = problems(7)
        self.write([replace(first, traces=(Trace("\\boxed{1}", "human", True),)), *bare], bare)
        benchmark = Prompt("s0", "suite", (Message("user", BENCHMARK),), "7")
        write_prompts(self.data / "suites" / "test.parquet", [benchmark])
        tiny_tokenizer().save_pretrained(self.data / "tokenizer")

    def write(self, train: list[Prompt], complement: list[Prompt]) -> None:
        write_prompts(self.data / "train.parquet", train)
        write_prompts(self.data / "sft.parquet", [prompt for prompt in train if prompt.traces])
        write_prompts(self.data / "rl_complement.parquet", complement)

    def run(
        self, answer: Answer | dict[str, str], config: SampleSettings | None = None, out: str = "o", **server: object
    ) -> StageResult:
        """With one teacher, whose `endpoint` answers so, or those at these URLs."""
        config = config or settings()
        if not isinstance(answer, dict):
            self.endpoint = self._serve(answer, (CHAT,))
            answer = dict.fromkeys(config.sample.teachers, self.endpoint.url)
        limits = {"max_retries": 1, "request_timeout_s": 20.0, **server}
        teachers = {name: ServerConfig.model_validate({"urls": (url,), **limits}) for name, url in answer.items()}
        execution = ExecutionConfig(teachers=teachers, rollout_batch_size=4)
        return run(config, stage_context("sample", self.root / out, {"data": self.data}, execution=execution))

    @property
    def asked(self) -> list[int]:
        return [asked_number(body) for _, body in self.endpoint.asked]

    def prompts(self, out: str = "o", name: str = "train") -> list[Prompt]:
        return read_prompts(self.root / out / f"{name}.parquet")

    def authors(self, out: str = "o", name: str = "train") -> dict[str, list[str]]:
        return {prompt.uid: [trace.author for trace in prompt.traces] for prompt in self.prompts(out, name)}

    def card(self, out: str = "o") -> TaughtCard:
        return read_card(self.root / out / "card.json", TaughtCard)


@pytest.fixture
def bench(tmp_path, serve) -> Bench:
    return Bench(tmp_path, serve)


def test_prompts_without_traces_get_those_of_correct_answers_and_every_later_reader_finds_its_file(bench):
    result = bench.run(by_prompt({3: wrong}), settings({"r1": teacher(temperature=0.6)}))
    assert bench.authors() == {"p0": ["human"], "p3": []} | {f"p{number}": ["r1"] for number in (1, 2, 4, 5, 6)}
    assert sorted(bench.authors(name="sft")) == ["p0", "p1", "p2", "p4", "p5", "p6"]
    assert bench.authors(name="rl_complement") == {"p3": []}
    (trace,), sampled_by = bench.prompts()[1].traces, {"model": "org/big", "decoding": "temperature 0.6, top_p 1"}
    assert trace == Trace("so \\boxed{2}", "r1", True, **sampled_by, num_tokens=5)
    # The first sample of every prompt, then the second of the one that has no correct answer.
    assert Counter(bench.asked) == {1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1}
    card = bench.card()
    assert (card.prompts, card.asked_about, card.given, card.without) == (7, 6, 5, ("p3",))
    assert card.teachers["r1"].outcomes == {"correct": 5, "wrong": 2}
    assert (card.teachers["r1"].pass_rate, card.num_tokens) == (5 / 7, 7 * 15)
    assert result.metrics["prompts/given_a_trace"] == 5


ENDS = {
    1: says("\\boxed{2}", reasoning_content="1 +1=2"),
    2: says("\\boxed{3}", finish_reason="length"),
    3: says("\\boxed{4}", finish_reason="content_filter"),
    4: says(""),
    5: lambda path, body: Reply(200, b'{"choices": [{"mess'),
    6: rejects(400, "your policy forbids this"),
}
UNUSABLE = {
    1: says(f"{'so ' * 50}\\boxed{{2}}"),
    2: says("<think>still \\boxed{3}"),
    3: says(f"{BENCHMARK} \\boxed{{4}}"),
    4: says("\\boxed{5}<|eos|>"),
}


def test_every_end_of_an_answer_is_an_outcome_and_the_rules_for_traces_hold_for_answers(bench):
    bench.run(by_prompt(ENDS), settings({"r1": teacher(num_samples=1)}), "ends/o")
    card = bench.card("ends/o")
    assert card.teachers["r1"].outcomes == {"correct": 1, "failed": 1, "no_answer": 1, "refused": 2, "truncated": 1}
    assert card.without == ("p2", "p3", "p4", "p5", "p6")
    (trace,) = bench.prompts("ends/o")[1].traces
    assert trace.text == "<think>\n1 +1=2\n</think>\n\n\\boxed{2}"
    config = settings({"r1": teacher(num_samples=1)}, {"max_trace_tokens": 100})
    bench.run(by_prompt(UNUSABLE), config, "rules/o")
    card = bench.card("rules/o").teachers["r1"]
    assert card.rejected == {"trace_holds_benchmark_problem": 1, "trace_holds_stop_token": 1, "trace_too_long": 1}
    assert card.outcomes == {"correct": 5, "no_answer": 1}
    assert [uid for uid, authors in bench.authors("rules/o").items() if "r1" in authors] == ["p5", "p6"]


def test_several_teachers_sign_their_traces_and_in_a_cascade_the_next_one_gets_what_is_left(bench, serve):
    """Undecodable bytes are no trace either, and the prompt is asked again."""
    teachers = {"small": teacher(), "big": teacher(endpoint={"name": "org/huge"}, system_prompt="Think.")}
    small = serve(by_prompt({2: wrong, 3: says("caf\ufffd \\boxed{4}")}), (CHAT,))
    big = serve(right, (CHAT,))
    servers = {"small": small.url, "big": big.url}
    bench.run(servers, settings(teachers), "all/o")
    assert Counter(asked_number(body) for _, body in small.asked) == {1: 1, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}
    found = bench.authors("all/o")
    assert (found["p1"], found["p2"], found["p3"]) == (["small"], ["big"], ["big"])  # equal texts are one trace
    assert big.asked[0][1]["messages"][0] == {"role": "system", "content": "Think."}
    before = len(big.asked)
    bench.run(servers, settings(teachers, cascade=True), "cascade/o")
    assert sorted(asked_number(body) for _, body in big.asked[before:]) == [2, 3]
    card = bench.card("cascade/o")
    assert (card.teachers["big"].prompts, card.teachers["small"].rejected) == (2, {"trace_undecoded": 2})


def test_an_endpoint_that_is_dead_never_counts_as_an_outcome(bench):
    with pytest.raises(LostError, match="status 503: gone"):
        bench.run(rejects(503, "gone"), max_retries=0)
    bench.run(mortal(4, right, refusal(503, "gone")), max_retries=0, concurrency=1)
    assert bench.card().teachers["r1"].outcomes["failed"] > 0  # fewer than make an endpoint dead
    bench.run(right, out="second")
    assert len(bench.asked) == 2  # the answers of the first stage are taken over, its failures are not
    assert bench.card("second").given == 6


def test_what_was_paid_for_in_the_stage_of_an_earlier_version_is_not_paid_for_again(tmp_path, bench):
    before, after = tmp_path / "synthesize" / "key", tmp_path / "sample" / "other"
    bench.run(by_prompt({3: wrong}), out="synthesize/key")
    (before / "answers.jsonl").unlink()
    bench.run(right, out="sample/other")
    assert bench.asked == []
    assert contents(after, ["train.parquet"]) == contents(before, ["train.parquet"])


def test_requests_that_are_all_rejected_are_a_mistake_and_no_outcome(tmp_path, bench, monkeypatch):
    """From the first on, or from some moment on, whatever its batches."""
    with refused("top_p is not"):
        bench.run(rejects(400, "top_p is not supported"))
    assert (tmp_path / "o" / "paid_answers.jsonl").read_bytes() == b""
    for name, value in {"sample._BATCHES": 1, "sample._MISSES": 2, "answers.paid._REJECTIONS": 1}.items():
        monkeypatch.setattr(f"luffy.stages.{name}", value)
    with refused("no credit"):
        bench.run(mortal(2, right, refusal(400, "no credit")), concurrency=1)
    bench.run(right)
    assert bench.card().teachers["r1"].outcomes == {"correct": 6}


def test_a_budget_is_looked_at_after_each_chunk_however_many_are_asked_at_once(tmp_path, bench, monkeypatch):
    monkeypatch.setattr("luffy.stages.sample.CHUNK", 2)

    def run_with(name: str, answer: Answer, concurrency: int, **budget: float) -> tuple[TaughtCard, list[int]]:
        price = {"prompt_per_million": 100_000.0, "completion_per_million": 200_000.0}
        bench.run(answer, settings({"r1": teacher(price=price)}, budget=budget), f"{name}/o", concurrency=concurrency)
        return bench.card(f"{name}/o"), bench.asked

    # It is reached when it is used up: each question and its answer have 10 and 5 tokens.
    one, asked = run_with("one", right, 1, max_tokens=60)
    assert one == run_with("many", right, 64, max_tokens=60)[0]
    assert (asked, one.num_tokens, one.never_asked) == ([1, 2, 3, 4], 60, ("p5", "p6"))
    assert one.teachers["r1"].not_asked == 2 + 6
    text = (tmp_path / "one" / "o" / "card.md").read_text()
    assert "p5, p6" in text and "60 tokens" in text and "60 allowed" in text
    by_cost, asked = run_with("cost", right, 64, max_cost=4.0)
    assert (len(asked), by_cost.cost) == (2, 4.0)  # 10 tokens of prompt and 5 of the answer, twice
    # A stage that resumes in the middle of a chunk asks what is left of it, and no more.
    with refused("no credit"):
        run_with("cut", mortal(3, right, NO_CREDIT), 1, max_tokens=60)
    assert run_with("cut", right, 1, max_tokens=60) == (one, [4])
    # A rejected prompt is an outcome.
    card, asked = run_with("rejected", by_prompt({1: rejects(400, "the prompt is filtered")}), 1, max_tokens=40)
    assert (asked[0], card.teachers["r1"].outcomes) == (1, {"correct": 3, "refused": 1})


def test_a_model_folder_gives_its_log_probabilities_where_its_tokens_are_the_policys(tmp_path, bench, monkeypatch):
    class Rounded(ScriptedEngine):
        def _complete(self, *asked: Any) -> Completion:
            whole = super()._complete(*asked)
            return replace(whole, logprobs=(1e-9,) * len(whole.token_ids))

    write_wide_model(tmp_path / "teacher", seed=0)
    engine = Rounded(tiny_tokenizer(), lambda prompt, seed: f"\\boxed{{{number_in(prompt) + 1 + seed % 2}}}")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    own = {"path": str(tmp_path / "teacher"), "max_response_tokens": 20, "num_samples": 2}
    bench.run({}, settings({"own": own}))
    card = bench.card().teachers["own"]
    assert card.with_logprobs == card.traces > 0
    (trace, *_) = [trace for prompt in bench.prompts() for trace in prompt.traces][1:]
    assert trace.logprobs == (0.0,) * trace.num_tokens


# Rewriting.

REWRITING = settings({"policy": teacher()}, prompts="all", rewrite={"num_samples": 2})


@pytest.fixture
def experts(bench) -> Bench:
    """Of its four prompts, the first three have an expert's trace."""
    traces = [(Trace(f"an expert says \\boxed{{{number + 1}}}", "human", True),) for number in range(3)]
    bench.write([replace(row, traces=known) for row, known in zip(problems(4), [*traces, ()], strict=True)], [])
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
    origins = {p.uid: [(trace.author, trace.origin) for trace in p.traces] for p in experts.prompts()}
    expected = {"p0": ("policy", "own"), "p1": ("policy", "rewritten"), "p2": ("human", "expert")}
    assert origins == {uid: [trace] for uid, trace in expected.items()} | {"p3": []}
    shown = [asked_number(body) for _, body in experts.endpoint.asked if is_helped(body)]
    assert sorted(shown) == [1, 2, 2], "until it is right, where it failed by itself and there is a trace"
    card = experts.card()
    assert card.origins == {"expert": 1, "own": 1, "rewritten": 1}
    assert result.metrics["traces/rewritten"] == 1
    counts = {name: (each.questions, each.traces) for name, each in card.teachers.items()}
    assert counts == {"policy": (7, 1), "policy, rewriting": (3, 1)}
    assert "expert 1, own 1, rewritten 1" in (tmp_path / "o" / "card.md").read_text()
    # A rewritten trace is learned without the trace in its prompt.
    tokenizer, bare = tiny_tokenizer(), {prompt.uid: prompt for prompt in problems(4)}
    for name in ("train", "sft", "rl_complement"):
        for prompt in experts.prompts(name=name):
            assert prompt.messages == bare[prompt.uid].messages
            (task,) = tokenize_tasks(tokenizer, [prompt])
            assert "expert" not in tokenizer.decode(task.prompt_ids)
            replies = " ".join(trace.reply for trace in task.demonstrations)
            assert ("expert" in replies) == (prompt.uid == "p2" and name != "rl_complement")


def test_a_copy_of_the_experts_text_is_the_experts(experts):
    def copies(path: str, body: dict) -> Reply:
        said = completion(f"an expert says \\boxed{{{asked_number(body) + 1}}}")
        return said if is_helped(body) else wrong(path, body)

    experts.run(copies, REWRITING)
    assert experts.card().origins == {"expert": 3}


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
def test_what_cannot_be_asked_is_refused(bench, serve, monkeypatch, prepare, config, server, named):
    monkeypatch.chdir(bench.root)
    if prepare is not None:
        prepare(bench, monkeypatch)
    endpoint, own = serve(right, (CHAT,), key="sk-right" if server else None), settings(**config)
    with refused(*named):
        bench.run({"r1": endpoint.url} if "r1" in own.sample.teachers else {}, own, **server)


def test_a_plan_says_that_a_key_is_not_set(monkeypatch):
    teachers = "sample={teachers: {r1: {endpoint: {name: m}, max_response_tokens: 8}}}"
    server = "execution.teachers={r1: {urls: ['http://h:1/v1'], api_key_variable: R1_KEY}}"
    config = load_experiment(CONFIGS / "smoke.yaml", [teachers, server])
    assert "R1_KEY is not set; export it" in " ".join(find_resources(config).notes)
    monkeypatch.setenv("R1_KEY", "sk-1")
    assert "R1_KEY" not in " ".join(find_resources(config).notes)


# Episodes: games of guessing a number from 1 to 7.

GAME = GuessNumberEnvironment.model_validate({"kind": "guess_number", "limits": {"max_turns": 3, "max_turn_tokens": 8}})
SOURCE = GuessNumberSource(kind="guess_number", num_prompts=12, high=7)
PATIENTLY: dict[str, Any] = {"max_retries": 0, "concurrency": 4}


def playing(teachers: dict[str, dict] | None = None, environment: Any = GAME, **changes: object) -> SampleSettings:
    data = {"suites": {"test": SOURCE}, "max_prompt_tokens": 96}
    return settings(teachers or {"r1": teacher(num_samples=1)}, data, environment=environment, **changes)


def halving(path: str, body: dict) -> Reply:
    """A player that halves the interval."""
    low, high = 1, 7
    for said, answer in itertools.pairwise(body["messages"]):
        if said["role"] == "assistant":
            guess = int(said["content"])
            low, high = (guess + 1, high) if answer["content"].startswith("higher") else (low, guess - 1)
    return completion(str((low + high) // 2), num_tokens=2, prompt_tokens=10 * len(body["messages"]))


class Failing(GuessingGame):
    """Breaks at its first answer in the games of odd numbers."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if self._number % 2:
            raise RuntimeError("out of dice")
        return await super().respond(conversation)


def failing(max_failed_share: float) -> CustomEnvironment:
    limits = {**GAME.limits.model_dump(), "max_failed_share": max_failed_share}
    return CustomEnvironment.model_validate({"kind": "custom", "factory": f"{__name__}:Failing", "limits": limits})


@pytest.fixture
def games(bench) -> Bench:
    found = [replace(prompt, traces=()) for prompt in load_source(SOURCE, "train", 3).prompts]
    bench.write(found, found)
    write_prompts(bench.data / "suites" / "test.parquet", load_source(SOURCE, "test", 4).prompts[:1])
    texts = ["Game 0123456789: guess a number from 1 to 7.", "higher lower Please guess a whole number."]
    build_tokenizer(texts).save_pretrained(bench.data / "tokenizer")
    return bench


def test_the_key_of_an_episode_stays_so_that_answers_are_paid_for_once():
    prompt = Prompt("u", "d", (Message("user", "q"),), "7")
    parts = {
        "game": {"environment": {"kind": "guess_number"}, "plays": ["a"]},
        "tools": {"environment": {"kind": "tools", "tools": ["calculator"]}, "plays": ["b"]},
    }
    judge = {"kind": "judge", "url": "http://h", "model": "m"}
    measures = {"style": {"kind": "judge", "rubric": "short", "judge": judge}}
    own = {"kind": "custom", "factory": "a:B", "scoring": {"measures": measures}}
    paid = {
        "2522a0ac848aec3728bfcf7eb0323818f9b6326260e888386fcaa64466cea9e0": GuessNumberEnvironment(kind="guess_number"),
        "ab6e2fb599cf7544048dfb460a874accf38fbb8288e4281c87a643f51b2bd6c8": MixtureEnvironment.model_validate_json(
            json.dumps({"kind": "mixture", "parts": parts})
        ),
        "6bbeccd4bd55cc367eb2cbdf3e48c1654f22000fa13fd5524e9fc8f76c26f51a": CustomEnvironment.model_validate_json(
            json.dumps(own)
        ),
    }
    assert [episode_key("first", prompt, environment) for environment in paid.values()] == list(paid)
    assert episode_key("first", prompt, GAME) not in paid


def test_right_games_become_traces_and_card_and_budget_count_every_turn(games, monkeypatch):
    games.run(halving, playing(), **PATIENTLY)
    asked, card, prompts = games.endpoint.asked, games.card().teachers["r1"], games.prompts(name="sft")
    assert len(prompts) == len({prompt.uid for prompt in prompts}) == 12
    for prompt in prompts:
        (trace,) = prompt.traces
        assert (trace.author, trace.verified, trace.reply) == ("r1", True, prompt.ground_truth)
        assert [turn.role for turn in trace.turns[1::2]] == ["user"] * (len(trace.turns) // 2)
    encoded = itertools.chain(*encode_demonstrations(load_tokenizer(games.data / "tokenizer"), prompts))
    assert any(len(set(each.source)) == 2 for each in encoded)  # the author's tokens and the environment's
    assert card.num_tokens == 2 * len(asked) > 2 * card.questions == 24
    assert card.prompt_tokens == sum(10 * len(body["messages"]) for _, body in asked)
    limit = (card.prompt_tokens + card.num_tokens) // 2
    monkeypatch.setattr("luffy.stages.sample.CHUNK", 2)
    games.run(halving, playing(budget={"max_tokens": limit}), "some/o", **PATIENTLY)
    some = games.card("some/o").teachers["r1"]
    assert some.questions + some.not_asked == 12
    assert limit <= some.prompt_tokens + some.num_tokens < limit + 2 * 3 * 62  # by less than two games of three turns
    assert some.num_tokens == 2 * len(games.endpoint.asked)


def test_a_game_that_an_outage_cut_goes_on_after_its_last_turn_and_changes_nothing(tmp_path, games):
    asked, is_well, log = itertools.count(), threading.Event(), tmp_path / "o" / "paid_answers.jsonl"

    def mortal(path: str, body: dict) -> Reply:
        if is_well.is_set() or next(asked) < 5:
            return halving(path, body)
        # A refusal that overtakes an answer would be its question's outcome: the endpoint answers others.
        wait_until(lambda: log.read_bytes().count(b"\n\n") >= 5, "five saved turns")
        return refusal(503, "gone")

    with pytest.raises(LostError):
        games.run(mortal, playing(), **PATIENTLY)
    # Turns of games; the games themselves have measures.
    assert sum("measures" not in json.loads(line) for line in log.read_bytes().splitlines() if line) == 5
    is_well.set()
    games.run(mortal, playing(), **PATIENTLY)
    assert sum("measures" in json.loads(line) for line in log.read_bytes().splitlines() if line) == 12
    traces = [trace for prompt in games.prompts() for trace in prompt.traces]
    assert len(games.endpoint.asked) + 5 == sum(len(trace.turns[::2]) or 1 for trace in traces)
    games.run(halving, playing(), "other/o", **PATIENTLY)
    outputs = ("train.parquet", "sft.parquet", "rl_complement.parquet", "card.json", "card.md")
    assert contents(tmp_path / "o", outputs) == contents(tmp_path / "other" / "o", outputs)


def test_a_crashed_game_is_an_outcome_and_too_many_end_the_stage_while_their_turns_stay_paid(tmp_path, games):
    games.run(halving, playing(environment=failing(1.0)), **PATIENTLY)
    odd = sum(int(prompt.ground_truth) % 2 for prompt in read_prompts(games.data / "train.parquet"))
    assert games.card().teachers["r1"].outcomes == {"correct": 12 - odd, "crashed": odd}
    assert "RuntimeError: out of dice" in (tmp_path / "o" / "answers.jsonl").read_text()
    paid = []
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match=r"failed in \d+ of 12 episodes"):
            games.run(halving, playing(environment=failing(0.1)), "other/o", **PATIENTLY)
        paid.append(len(games.endpoint.asked))
    assert paid[0] > 0 == paid[1]


def test_a_model_folder_plays_as_an_endpoint_does(tmp_path, games, monkeypatch):
    tokenizer = load_tokenizer(games.data / "tokenizer")
    write_wide_model(tmp_path / "teacher", 0, tokenizer, 256)
    engine = ScriptedEngine(tokenizer, lambda prompt, seed: "4")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    own = {"path": str(tmp_path / "teacher"), "max_response_tokens": 64, "num_samples": 1}
    games.run({}, playing({"own": own}))
    fours = [prompt.uid for prompt in read_prompts(games.data / "train.parquet") if prompt.ground_truth == "4"]
    assert [prompt.uid for prompt in games.prompts(name="sft")] == fours
    card = games.card().teachers["own"]
    assert card.outcomes["out_of_turns"] == 12 - len(fours)
    assert card.num_tokens == sum(2 * turns for turns in [1] * len(fours) + [3] * (12 - len(fours)))
