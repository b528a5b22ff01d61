"""The stage `synthesize` with an endpoint that answers as told: what is asked, kept, counted, limited and refused."""

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reference.gradient_case import tiny_model
from synthetic.answered_stage import contents, stage_context
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.endpoint import CHAT, Endpoint, Reply, completion, mortal, refusal

from luffy.config import load_experiment
from luffy.config.answers import SynthesizeConfig
from luffy.config.data import DataConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import SynthesizeSettings
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.pass_rates import read_card
from luffy.data.synthesis_card import SynthesisCard
from luffy.errors import ConfigError, DataError, LostError
from luffy.pipeline.resources import find_resources
from luffy.rollout.engine import Completion
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageContext, StageResult
from luffy.stages.rl_components import tokenize_tasks
from luffy.stages.synthesize import run
from luffy.types import Message, Prompt, Trace

OUTPUTS = ("train.parquet", "sft.parquet", "rl_complement.parquet", "card.json", "card.md")
SUITE = Prompt("s0", "suite", (Message("user", "what is one and one and one and one and one and one and one"),), "7")
Answer = Callable[[str, dict], Reply | None]


def number_in(body: dict) -> int:
    return int(body["messages"][-1]["content"].split()[0])


def right(path: str, body: dict) -> Reply:
    return completion(f"so \\boxed{{{number_in(body) + 1}}}", num_tokens=5, prompt_tokens=10)


def wrong(path: str, body: dict) -> Reply:
    return completion("\\boxed{77}", num_tokens=5, prompt_tokens=10)


def by_prompt(answers: dict[int, Answer], others: Answer = right) -> Answer:
    return lambda path, body: answers.get(number_in(body), others)(path, body)


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch) -> None:
    monkeypatch.setattr("luffy.http_client._FIRST_DELAY_S", 0.01)


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    """Seven prompts, of which p0 has a trace, p6 lost its own, and the others never had one."""
    data = tmp_path / "data"
    (data / "suites").mkdir(parents=True)
    first, *bare = problems(7)
    traced = dataclasses.replace(first, traces=(Trace("\\boxed{1}", "human", True),))
    write_prompts(data / "train.parquet", [traced, *bare[:-1]])
    write_prompts(data / "sft.parquet", [traced])
    write_prompts(data / "rl_complement.parquet", bare)
    write_prompts(data / "suites" / "test.parquet", [SUITE])
    tiny_tokenizer().save_pretrained(data / "tokenizer")
    return {"data": data}


def teacher(**changes: object) -> dict[str, object]:
    return {"endpoint": {"name": "org/big"}, "max_response_tokens": 40, "num_samples": 2, **changes}


def settings(teachers: dict[str, dict], data: dict[str, object] | None = None, **changes: object) -> SynthesizeSettings:
    source = {"kind": "arithmetic", "num_prompts": 1, "num_operations": (1,)}
    limits = {"suites": {"test": source}, "max_prompt_tokens": 64, "max_trace_tokens": 40, **(data or {})}
    return SynthesizeSettings(
        seed=7,
        synthesize=SynthesizeConfig.model_validate({"teachers": teachers, **changes}),
        data=DataConfig.model_validate(limits),
        grading=GradingConfig(),
    )


@contextmanager
def served(answer: Answer, key: str | None = None) -> Iterator[Endpoint]:
    endpoint = Endpoint(answer, (CHAT,), key)
    try:
        yield endpoint
    finally:
        endpoint.close()


def context_in(out: Path, inputs: dict[str, Path], servers: dict[str, str], **server: object) -> StageContext:
    limits = {"max_retries": 1, "request_timeout_s": 20.0, **server}
    teachers = {name: ServerConfig.model_validate({"urls": (url,), **limits}) for name, url in servers.items()}
    execution = ExecutionConfig(teachers=teachers, rollout_batch_size=4)
    return stage_context("synthesize", out, inputs, execution=execution)


class Bench:
    """Runs the stage in folders of its own; in each, no earlier stage has answers unless they are side by side."""

    def __init__(self, root: Path, inputs: dict[str, Path]) -> None:
        self.root = root
        self.inputs = inputs
        self.endpoint: Endpoint

    def run(
        self, answer: Answer, config: SynthesizeSettings | None = None, out: str = "o", **server: object
    ) -> StageResult:
        """With one teacher, which answers so; `endpoint` then has what it was asked."""
        config = config or settings({"r1": teacher()})
        (name,) = config.synthesize.teachers
        with served(answer) as self.endpoint:
            return run(config, context_in(self.root / out, self.inputs, {name: self.endpoint.url}, **server))

    @property
    def asked(self) -> list[int]:
        return [number_in(body) for _, body in self.endpoint.asked]


@pytest.fixture
def bench(tmp_path, inputs) -> Bench:
    return Bench(tmp_path, inputs)


def traces_in(out: Path, name: str = "train") -> dict[str, list[str]]:
    return {prompt.uid: [trace.author for trace in prompt.traces] for prompt in read_prompts(out / f"{name}.parquet")}


def card_in(out: Path) -> SynthesisCard:
    return read_card(out / "card.json", SynthesisCard)


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
    assert all((out / output).exists() for output in result.outputs)


def test_refusals_truncations_empty_and_failed_answers_are_outcomes_and_reasoning_is_put_into_tags(tmp_path, bench):
    half = Reply(200, b'{"choices": [{"mess')

    def reasoned(path: str, body: dict) -> Reply:
        return completion("\\boxed{2}", reasoning_content="1 +1=2")

    script = {
        1: reasoned,
        2: lambda path, body: completion("\\boxed{3}", finish_reason="length"),
        3: lambda path, body: completion("\\boxed{4}", finish_reason="content_filter"),
        4: lambda path, body: completion(""),
        5: lambda path, body: half,
        6: lambda path, body: refusal(400, "your policy forbids this"),
    }
    bench.run(by_prompt(script), settings({"r1": teacher(num_samples=1)}))
    card = card_in(tmp_path / "o")
    assert card.teachers["r1"].outcomes == {"correct": 1, "empty": 1, "failed": 1, "refused": 2, "truncated": 1}
    assert card.without == ("p2", "p3", "p4", "p5", "p6")
    (trace,) = read_prompts(tmp_path / "o" / "train.parquet")[1].traces
    assert trace.text == "<think>\n1 +1=2\n</think>\n\n\\boxed{2}"


def test_rules_for_traces_hold_for_answers(tmp_path, bench):
    (question,) = SUITE.messages
    script = {
        1: lambda path, body: completion(f"{'so ' * 50}\\boxed{{2}}"),
        2: lambda path, body: completion("<think>still \\boxed{3}"),
        3: lambda path, body: completion(f"{question.content} \\boxed{{4}}"),
        4: lambda path, body: completion("\\boxed{5}<|eos|>"),
    }
    bench.run(by_prompt(script), settings({"r1": teacher(num_samples=1)}, {"max_trace_tokens": 100}))
    card = card_in(tmp_path / "o").teachers["r1"]
    assert card.rejected == {"trace_holds_benchmark_problem": 1, "trace_holds_stop_token": 1, "trace_too_long": 1}
    assert card.outcomes == {"correct": 5, "no_answer": 1}
    assert [uid for uid, authors in traces_in(tmp_path / "o").items() if "r1" in authors] == ["p5", "p6"]


def test_an_answer_with_undecodable_bytes_is_no_trace_and_the_prompt_is_asked_again(tmp_path, inputs):
    def garbled(path: str, body: dict) -> Reply:
        return completion(f"caf\ufffd \\boxed{{{number_in(body) + 1}}}")

    teachers = {"small": teacher(), "big": teacher(endpoint={"name": "org/huge"})}
    with served(by_prompt({1: garbled})) as small, served(right) as big:
        servers = {"small": small.url, "big": big.url}
        run(settings(teachers, cascade=True), context_in(tmp_path / "o", inputs, servers))
    assert [number_in(body) for _, body in small.asked].count(1) == 2
    assert [number_in(body) for _, body in big.asked] == [1]
    assert traces_in(tmp_path / "o")["p1"] == ["big"]
    assert card_in(tmp_path / "o").teachers["small"].rejected == {"trace_undecoded": 2}


def test_a_teacher_that_fails_stalls_and_hurries_loses_nothing_and_is_asked_once_for_each_answer(tmp_path, bench):
    """Every question fails once in a way of its own; what it gets in the end is the same as without."""
    seen: Counter[int] = Counter()
    lock, ended = threading.Lock(), threading.Event()
    faults = {
        1: refusal(503, "overloaded"),
        2: refusal(429, "too many", Retry_After="0.1"),
        3: None,
        4: Reply(200, {"choices": "x" * 100}, is_cut=True),
        5: Reply(200, b'{"choices": ['),
    }

    def troubled(path: str, body: dict) -> Reply | None:
        number = number_in(body)
        with lock:
            seen[number] += 1
            is_first = seen[number] == 1
        if is_first and number == 6:
            ended.wait()  # longer than anyone waits for an answer
            return None
        return faults[number] if is_first else right(path, body)

    with served(troubled) as endpoint:
        context = context_in(tmp_path / "troubled", bench.inputs, {"r1": endpoint.url}, request_timeout_s=4.0)
        run(settings({"r1": teacher()}), context)
        ended.set()
    bench.run(right, out="calm/out")
    assert seen == dict.fromkeys(range(1, 7), 2)
    assert contents(tmp_path / "troubled", OUTPUTS) == contents(tmp_path / "calm" / "out", OUTPUTS)


def test_an_endpoint_that_dies_is_resumed_where_it_was_and_one_that_is_dead_never_counts_as_an_outcome(tmp_path, bench):
    with pytest.raises(LostError, match="status 503: gone"):
        bench.run(lambda path, body: refusal(503, "gone"), max_retries=0)
    bench.run(mortal(4, right, refusal(503, "gone")), max_retries=0, concurrency=1)
    assert card_in(tmp_path / "o").teachers["r1"].outcomes["failed"] > 0  # fewer than make an endpoint dead
    bench.run(right, out="second")
    assert len(bench.asked) == 2  # the answers of the first stage are taken over, its failures are not
    assert card_in(tmp_path / "second").given == 6


def test_no_more_is_asked_than_the_budget_allows_however_many_are_asked_at_once(tmp_path, bench):
    def run_with(name: str, budget: dict, concurrency: int) -> tuple[SynthesisCard, int]:
        price = {"prompt_per_million": 100_000.0, "completion_per_million": 200_000.0}
        config = settings({"r1": teacher(price=price)}, budget=budget)
        bench.run(right, config, f"{name}/o", concurrency=concurrency)
        return card_in(tmp_path / name / "o"), len(bench.asked)

    one, asked = run_with("one", {"max_tokens": 40}, 1)
    many, _ = run_with("many", {"max_tokens": 40}, 64)
    assert (asked, one.num_tokens, one.never_asked) == (3, 45, ("p4", "p5", "p6"))
    assert one == many
    assert one.teachers["r1"].not_asked == 3 + 6
    by_cost, asked = run_with("cost", {"max_cost": 2.0}, 64)
    assert (asked, by_cost.cost) == (1, 2.0)  # 10 tokens of prompt and 5 of the answer
    text = (tmp_path / "one" / "o" / "card.md").read_text()
    assert "3 were never asked: p4, p5, p6" in text
    assert "45 tokens of prompts and answers of 40 allowed" in text


def test_several_teachers_sign_their_traces_and_in_a_cascade_the_next_one_gets_what_is_left(tmp_path, inputs):
    teachers = {"small": teacher(num_samples=1), "big": teacher(endpoint={"name": "org/huge"}, system_prompt="Think.")}
    with served(by_prompt({2: wrong, 3: wrong})) as small, served(right) as big:
        servers = {"small": small.url, "big": big.url}
        run(settings(teachers), context_in(tmp_path / "all" / "o", inputs, servers))
        assert traces_in(tmp_path / "all" / "o")["p1"] == ["small"]  # equal texts are one trace
        assert traces_in(tmp_path / "all" / "o")["p2"] == ["big"]
        assert big.asked[0][1]["messages"][0] == {"role": "system", "content": "Think."}
        before = len(big.asked)
        run(settings(teachers, cascade=True), context_in(tmp_path / "cascade" / "o", inputs, servers))
    assert sorted(number_in(body) for _, body in big.asked[before:]) == [2, 3]
    assert card_in(tmp_path / "cascade" / "o").teachers["big"].prompts == 2


def test_a_model_folder_gives_its_log_probabilities_where_its_tokens_are_the_policys(tmp_path, inputs, monkeypatch):
    folder = tmp_path / "teacher"
    tiny_tokenizer().save_pretrained(folder)
    model = tiny_model()  # with a context of 64 tokens
    model.resize_token_embeddings(len(tiny_tokenizer()))
    model.save_pretrained(folder)
    config = settings({"own": {"path": str(folder), "max_response_tokens": 20, "num_samples": 2}})

    def start(answer: Callable[[str, int], str]) -> ScriptedEngine:
        engine = ScriptedEngine(tiny_tokenizer(), answer)
        complete = engine._complete

        def rounded(*asked: Any) -> Completion:
            completion = complete(*asked)
            return dataclasses.replace(completion, logprobs=(1e-9,) * len(completion.token_ids))

        monkeypatch.setattr(engine, "_complete", rounded)
        monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
        return engine

    def by_seed(prompt: str, seed: int) -> str:
        number = int(prompt.removeprefix("<|bos|>").split()[0])
        return f"\\boxed{{{number + 1 + seed % 2}}}"

    def dies(prompt: str, seed: int) -> str:
        if len(first.requests) > 4:
            raise KeyboardInterrupt
        return by_seed(prompt, seed)

    first = start(dies)
    with pytest.raises(KeyboardInterrupt):
        run(config, context_in(tmp_path / "out", inputs, {}))
    second = start(by_seed)
    assert run(config, context_in(tmp_path / "out", inputs, {})).resumed_from == 4
    whole = start(by_seed)
    run(config, context_in(tmp_path / "whole", inputs, {}))
    assert [request.seed for request in second.requests] == [request.seed for request in whole.requests[4:]]
    assert contents(tmp_path / "out", OUTPUTS) == contents(tmp_path / "whole", OUTPUTS)
    card = card_in(tmp_path / "out").teachers["own"]
    assert card.with_logprobs == card.traces > 0
    (trace, *_) = [trace for p in read_prompts(tmp_path / "out" / "train.parquet") for trace in p.traces][1:]
    assert trace.logprobs == (0.0,) * trace.num_tokens


def test_a_teacher_without_a_chat_template_is_refused_by_its_own_name(tmp_path, inputs):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "teacher")
    tiny_model().save_pretrained(tmp_path / "teacher")
    config = settings({"own": {"path": str(tmp_path / "teacher"), "max_response_tokens": 20}})
    with pytest.raises(
        DataError, match=r"^synthesize\.teachers\.own\.path: .* no chat template; choose another model$"
    ):
        run(config, context_in(tmp_path / "o", inputs, {}))


@pytest.fixture
def experts(inputs) -> dict[str, Prompt]:
    """Writes four prompts, the first three of which have an expert's trace; returns them without."""
    bare = problems(4)
    traces = [(Trace(f"an expert says \\boxed{{{number + 1}}}", "human", True),) for number in range(3)]
    rows = [dataclasses.replace(row, traces=known) for row, known in zip(bare, [*traces, ()], strict=True)]
    write_prompts(inputs["data"] / "train.parquet", rows)
    write_prompts(inputs["data"] / "rl_complement.parquet", [])
    return {prompt.uid: prompt for prompt in bare}


def pupil(path: str, body: dict) -> Reply:
    """Solves 0 alone, 1 with an expert's help and nothing else."""
    number, is_helped = number_in(body), "expert" in body["messages"][-1]["content"]
    return (right if number == 0 or (number == 1 and is_helped) else wrong)(path, body)


def rewriting() -> SynthesizeSettings:
    return settings({"policy": teacher()}, prompts="all", rewrite={"num_samples": 2})


@pytest.mark.usefixtures("experts")
def test_rewriting_keeps_what_the_policy_solves_then_shows_it_the_trace_and_the_expert_is_the_last_resort(
    tmp_path, bench
):
    """p0 to p2 have an expert's trace: the policy solves p0 alone, p1 with the trace, p2 never; p3 has no expert."""
    result = bench.run(pupil, rewriting())
    found = read_prompts(tmp_path / "o" / "train.parquet")
    origins = {prompt.uid: [(trace.author, trace.origin) for trace in prompt.traces] for prompt in found}
    expected = {"p0": ("policy", "own"), "p1": ("policy", "rewritten"), "p2": ("human", "expert")}
    assert origins == {uid: [trace] for uid, trace in expected.items()} | {"p3": []}
    shown = [number_in(body) for _, body in bench.endpoint.asked if "expert" in body["messages"][-1]["content"]]
    assert sorted(shown) == [1, 2, 2], "until it is right, where it failed by itself and there is a trace"
    card = card_in(tmp_path / "o")
    assert card.origins == {"expert": 1, "own": 1, "rewritten": 1}
    assert result.metrics["traces/rewritten"] == 1
    counts = {name: (each.questions, each.traces) for name, each in card.teachers.items()}
    assert counts == {"policy": (7, 1), "policy, rewriting": (3, 1)}
    assert "Traces after rewriting: expert 1, own 1, rewritten 1." in (tmp_path / "o" / "card.md").read_text()


def test_a_rewritten_trace_is_learned_without_the_trace_in_its_prompt(tmp_path, bench, experts):
    bench.run(pupil, rewriting())
    tokenizer = tiny_tokenizer()
    for name in ("train", "sft", "rl_complement"):
        for prompt in read_prompts(tmp_path / "o" / f"{name}.parquet"):
            assert prompt.messages == experts[prompt.uid].messages
            (task,) = tokenize_tasks(tokenizer, [prompt])
            assert "expert" not in tokenizer.decode(task.prompt_ids)
            replies = " ".join(trace.reply for trace in task.demonstrations)
            assert ("expert" in replies) == (prompt.uid == "p2" and name != "rl_complement")


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("answers", [1, 6, 8])
def test_a_rewriting_that_ends_early_asks_for_the_rest_alone(tmp_path, bench, answers):
    """It ends among the policy's own answers, early or late, or while it rewrites."""
    with pytest.raises(ConfigError, match="no credit"):
        bench.run(mortal(answers, pupil, refusal(402, "no credit")), rewriting(), "out/o", concurrency=1)
    bench.run(pupil, rewriting(), "out/o")
    left = len(bench.asked)
    bench.run(pupil, rewriting(), "whole/o")
    assert answers + left == len(bench.asked) == 10
    assert contents(tmp_path / "out" / "o", OUTPUTS) == contents(tmp_path / "whole" / "o", OUTPUTS)


@pytest.mark.usefixtures("experts")
def test_a_copy_of_the_experts_text_is_the_experts(tmp_path, bench):
    def copies(path: str, body: dict) -> Reply:
        is_helped = "expert" in body["messages"][-1]["content"]
        return completion(f"an expert says \\boxed{{{number_in(body) + 1}}}") if is_helped else wrong(path, body)

    bench.run(copies, rewriting())
    assert card_in(tmp_path / "o").origins == {"expert": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": "without_traces"}, "rewrite is about prompts that have a trace; set prompts: all"),
        ({"rewrite": {"template": "{prompt}"}}, "template must have {trace} once"),
        (
            {"teachers": {"a": teacher(), "b": teacher()}},
            "teachers names 2 models; keep only the policy's starting model",
        ),
    ],
)
def test_a_rewriting_that_cannot_be_is_refused(changes, message):
    config = {"teachers": {"policy": teacher()}, "prompts": "all", "rewrite": {}, **changes}
    with pytest.raises(ValidationError, match=re.escape(message)):
        SynthesizeConfig.model_validate(config)


@pytest.mark.parametrize(
    ("server", "variable", "message"),
    [
        ({"api_key_variable": "R1_KEY"}, None, "execution.teachers.r1.api_key_variable: .* R1_KEY is not set"),
        ({"api_key_variable": "R1_KEY"}, "wrong", "R1_KEY .execution.teachers.r1.api_key_variable., which holds a rej"),
        ({"urls": ("http://127.0.0.1:9",)}, None, "execution.teachers.r1.urls: .*start the server or correct the URL"),
    ],
)
def test_a_teacher_that_cannot_be_asked_is_one_line(tmp_path, inputs, monkeypatch, server, variable, message):
    if variable is not None:
        monkeypatch.setenv("R1_KEY", variable)
    with served(right, key="sk-right") as endpoint, pytest.raises(ConfigError, match=message) as refused:
        run(settings({"r1": teacher()}), context_in(tmp_path / "o", inputs, {"r1": endpoint.url}, **server))
    assert "\n" not in str(refused.value)


def test_a_plan_says_that_a_key_is_not_set(monkeypatch):
    smoke = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
    teachers = "synthesize={teachers: {r1: {endpoint: {name: m}, max_response_tokens: 8}}}"
    server = "execution.teachers={r1: {urls: ['http://h:1/v1'], api_key_variable: R1_KEY}}"
    config = load_experiment(smoke, [teachers, server])
    assert "R1_KEY is not set; export it" in " ".join(find_resources(config).notes)
    monkeypatch.setenv("R1_KEY", "sk-1")
    assert "R1_KEY" not in " ".join(find_resources(config).notes)


def test_requests_that_are_all_rejected_are_a_mistake_and_no_outcome(tmp_path, bench):
    with pytest.raises(ConfigError, match=r"refuses the request: .*top_p is not"):
        bench.run(lambda path, body: refusal(400, "top_p is not supported"))
    assert (tmp_path / "o" / "paid_answers.jsonl").read_bytes() == b""


def test_an_account_that_is_empty_ends_the_stage_and_counts_nothing(tmp_path, bench):
    with pytest.raises(ConfigError, match="status 402: no credit"):
        bench.run(mortal(2, right, refusal(402, "no credit")), concurrency=1)
    bench.run(right)
    assert len(bench.asked) == 4
    assert card_in(tmp_path / "o").teachers["r1"].outcomes == {"correct": 6}


def test_an_endpoint_that_rejects_everything_from_some_moment_on_counts_nothing_whatever_its_batches(
    tmp_path, bench, monkeypatch
):
    monkeypatch.setattr("luffy.stages.synthesize._PAID_BATCH", 1)
    monkeypatch.setattr("luffy.stages.synthesis.teachers._UNANSWERED_IN_A_ROW", 3)
    with pytest.raises(ConfigError, match="no credit"):
        bench.run(mortal(2, right, refusal(400, "no credit")), concurrency=1)
    bench.run(right)
    assert card_in(tmp_path / "o").teachers["r1"].outcomes == {"correct": 6}


def test_a_rejected_prompt_is_an_outcome_although_it_fills_the_first_batch_of_a_tight_budget(tmp_path, bench):
    def rejects(path: str, body: dict) -> Reply:
        return refusal(400, "the prompt is filtered")

    bench.run(by_prompt({1: rejects}), settings({"r1": teacher()}, budget={"max_tokens": 40}), concurrency=1)
    assert bench.asked[0] == 1
    assert card_in(tmp_path / "o").teachers["r1"].outcomes == {"correct": 3, "refused": 1}


def test_a_synthesis_without_prompts_to_ask_is_refused(bench):
    data = bench.inputs["data"]
    write_prompts(data / "train.parquet", read_prompts(data / "train.parquet")[:1])
    write_prompts(data / "rl_complement.parquet", [])
    with pytest.raises(DataError, match=r"no training prompt lacks a trace; set synthesize\.prompts: all"):
        bench.run(right)


def test_rl_after_sft_without_a_prompt_left_is_refused_before_anything_is_trained(bench):
    """Unlike in prepare_data, every prompt has a trace now."""
    with pytest.raises(DataError, match=r"data\.rl: the complement is empty"):
        bench.run(right, settings({"r1": teacher()}, {"rl": "complement"}))


def test_sft_cannot_ask_for_more_examples_than_there_are(tmp_path, bench):
    config = settings({"r1": teacher(num_samples=1)}, {"sft": {"unique_train_examples": 6}})
    bench.run(by_prompt({3: wrong}), config)
    assert len(traces_in(tmp_path / "o", "sft")) == 6
    with pytest.raises(DataError, match="unique_train_examples: 6 asked for, 5 training prompts have a trace"):
        bench.run(by_prompt({3: wrong, 4: wrong}), config, "fewer/o")
