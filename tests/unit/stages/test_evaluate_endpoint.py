"""The stage `evaluate` on a model that others serve: a real HTTP server answers, dies, and is there again."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from synthetic.answered_stage import contents, stage_context
from synthetic.arithmetic import problems
from synthetic.endpoint import CHAT, TEXT, Endpoint, Reply, by_seed, completion, refusal

from luffy.config.environment import ToolsEnvironment
from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import ExactGrader, GradingConfig
from luffy.config.model import EndpointModel, ModelConfig
from luffy.config.settings import BaseSettings, EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.errors import ClusterError, ConfigError, DataError
from luffy.evaluation.results import read_results
from luffy.evaluation.sample_files import read_sample_records
from luffy.stages import base
from luffy.stages.evaluate import run
from luffy.stages.program import StageContext

KEY = "sk-hunter2"
MODEL = EndpointModel(name="gpt-x", request={"reasoning_effort": "low"})
SETTINGS = EvaluateSettings(
    seed=7,
    dtype="float32",
    evaluation=EvaluationConfig(
        decodings={"sampled": DecodingConfig(temperature=1.0, num_samples=3)},
        max_response_tokens=16,
        engine="openai",
        suites={"plain": SuiteConfig(template="r1_zero")},
    ),
    grading=GradingConfig(kind=ExactGrader()),
)
OUTPUTS = ("samples.jsonl.zst", "responses.json", "results.json", "summary.md", "summary.html")
Serve = Callable[..., Endpoint]


@pytest.fixture
def serve(monkeypatch) -> Iterator[Serve]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    running: list[Endpoint] = []

    def start(answer: Callable[[str, dict], Reply | None] = by_seed, paths: tuple[str, ...] = (CHAT, TEXT)) -> Endpoint:
        running.append(Endpoint(answer, paths, KEY))
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.close()


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    """Twelve problems asked as a chat, four as a text; and what `base` makes of a model that others serve."""
    (tmp_path / "data" / "suites").mkdir(parents=True)
    write_prompts(tmp_path / "data" / "suites" / "chat.parquet", problems(12))
    write_prompts(tmp_path / "data" / "suites" / "plain.parquet", problems(4))
    base.run(
        BaseSettings(seed=7, model=ModelConfig(endpoint=MODEL), base=None), stage_context("base", tmp_path / "base", {})
    )
    return {"data": tmp_path / "data", "model": tmp_path / "base"}


def context_in(out: Path, inputs: dict[str, Path], *served: Endpoint, **server: int) -> StageContext:
    config = ServerConfig(urls=tuple(each.url for each in served), max_retries=0, **{"concurrency": 2, **server})
    return stage_context("evaluate_base", out, inputs, execution=ExecutionConfig(server=config))


def test_each_suite_is_asked_in_its_way_and_every_response_is_graded(tmp_path, inputs, serve):
    served = serve()
    result = run(SETTINGS, context_in(tmp_path / "out", inputs, served))
    results = read_results(tmp_path / "out" / "results.json")
    assert [(row.suite, row.num_problems, row.num_samples, row.mean_tokens) for row in results.rows] == [
        ("chat", 12, 3, 7), ("plain", 4, 3, 7),
    ]  # fmt: skip
    assert results.rows[0].protocol is not None and results.rows[0].protocol.engine == "openai"
    chat, *_, plain = list(read_sample_records(tmp_path / "out" / "samples.jsonl.zst"))
    assert (chat.prompt, plain.prompt[-30:]) == ("user: 0 +1", "\nUser: 3 +1\nAssistant: <think>")
    assert (chat.response[:6], plain.response[:13]) == ("\\boxed", "<think>\\boxed")
    assert [path for path, _ in served.asked] == [CHAT] * 36 + [TEXT] * 12
    assert {(body["model"], body["reasoning_effort"]) for _, body in served.asked} == {("gpt-x", "low")}
    assert len({body["seed"] for _, body in served.asked}) == 48
    assert result.outputs == OUTPUTS
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_an_endpoint_that_dies_costs_no_response_and_the_same_command_gets_the_same_result(tmp_path, inputs, serve):
    alive = [29]

    def dying(path: str, body: dict) -> Reply | None:
        alive[0] -= 1
        return by_seed(path, body) if alive[0] >= 0 else None

    first, second = serve(dying), serve()
    with pytest.raises(ClusterError, match=r"no answer .*; finished responses are saved, and the same command"):
        run(SETTINGS, context_in(tmp_path / "out", inputs, first, concurrency=1))
    # Another URL, another number of servers, and another number of requests at a time.
    run(SETTINGS, context_in(tmp_path / "out", inputs, second, serve(), concurrency=3))
    run(SETTINGS, context_in(tmp_path / "apart" / "undisturbed", inputs, other := serve()))
    assert contents(tmp_path / "out", OUTPUTS) == contents(tmp_path / "apart" / "undisturbed", OUTPUTS)
    assert len(other.asked) == 48
    again = [body["seed"] for _, body in second.asked]
    assert len(again) < 48 - 29
    assert {body["seed"] for _, body in first.asked[:29]}.isdisjoint(again)


def test_more_samples_and_another_evaluation_pay_only_for_what_is_new(tmp_path, inputs, serve):
    served = serve()
    run(SETTINGS, context_in(tmp_path / "out", inputs, served))
    more = {"decodings": {"sampled": DecodingConfig(temperature=1.0, num_samples=4)}}
    settings = SETTINGS.model_copy(update={"evaluation": SETTINGS.evaluation.model_copy(update=more)})
    run(settings, context_in(tmp_path / "more", inputs, served))
    assert len(served.asked) == 48 + 16
    assert len({body["seed"] for _, body in served.asked}) == 64


def test_no_file_holds_the_key(tmp_path, inputs, serve):
    run(SETTINGS, context_in(tmp_path / "out", inputs, serve()))
    with pytest.raises(ConfigError, match="status 403"):
        refused = serve(lambda path, body: refusal(403, f"Bearer {KEY} may not"))
        run(SETTINGS, context_in(tmp_path / "apart" / "refused", inputs, refused))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_an_endpoint_without_the_path_of_a_template_is_refused_before_anything_is_asked(tmp_path, inputs, serve):
    served = serve(paths=(CHAT,))
    with pytest.raises(ConfigError, match=r"/v1/completions: status 404.* set evaluation\.template: own"):
        run(SETTINGS, context_in(tmp_path / "out", inputs, served))
    assert served.asked == []


def test_reasoning_that_is_not_closed_is_no_answer(tmp_path, inputs, serve):
    said = completion("", "length", reasoning_content="\\boxed{1}")
    alone = SETTINGS.model_copy(update={"evaluation": SETTINGS.evaluation.model_copy(update={"suites": {}})})
    run(alone, context_in(tmp_path / "out", inputs, serve(lambda path, body: said)))
    record = next(read_sample_records(tmp_path / "out" / "samples.jsonl.zst"))
    assert (record.response, record.outcome, record.finish_reason) == ("<think>\n\\boxed{1}", "no_answer", "length")


def test_a_suite_that_cannot_be_asked_whole_is_refused(tmp_path, inputs, serve):
    served = serve()
    turns = dataclasses.replace(problems(1)[0], messages=problems(1)[0].messages * 2)
    write_prompts(inputs["data"] / "suites" / "plain.parquet", [turns])
    with pytest.raises(DataError, match="suite plain: problem p0: the template r1_zero takes one question"):
        run(SETTINGS, context_in(tmp_path / "out", inputs, served))
    assert served.asked == []


def test_the_description_names_the_model_and_not_where_it_is(inputs):
    (file,) = (inputs["model"] / "model").iterdir()
    assert json.loads(file.read_text()) == {"name": "gpt-x", "request": {"reasoning_effort": "low"}}


def test_an_environment_answers_a_model_behind_an_endpoint(serve, inputs, tmp_path):
    """The model calls the calculator with the question, and boxes what it is told; the last turn is graded."""

    def calling(path: str, body: dict) -> Reply:
        asked, *rest = (turn["content"] for turn in body["messages"] if turn["role"] == "user")
        call = json.dumps({"name": "calculator", "arguments": {"expression": asked}})
        told = rest[0].split("\n")[1] if rest else ""
        return completion(f"\\boxed{{{told}}}" if rest else f"<tool_call>\n{call}\n</tool_call>", num_tokens=4)

    server = serve(calling, (CHAT,))
    evaluation = EvaluationConfig(
        decodings={"greedy": DecodingConfig(temperature=0.0)}, max_response_tokens=16, engine="openai"
    )
    tools = ToolsEnvironment(kind="tools", tools=("calculator",))
    settings = SETTINGS.model_copy(update={"evaluation": evaluation, "environment": tools, "grading": GradingConfig()})
    run(settings, context_in(tmp_path / "out", inputs, server))
    records = read_sample_records(tmp_path / "out" / "samples.jsonl.zst")
    by_suite = [record for record in records if record.suite == "chat"]
    assert len(by_suite) == 12
    for record in by_suite:
        assert record.correct
        assert record.measures["tool_calls/calculator"] == 1.0
        assert record.num_tokens == 2 * 4
        assert record.response.count("--- policy ---") == 2 and "--- environment ---" in record.response
