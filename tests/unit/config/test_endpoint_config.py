"""A model that others serve: what an experiment may do with it, and what is part of its results' identity."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated, evaluation_of
from luffy.config.experiment import ExperimentConfig
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
URL = "http://one:8000/v1"
SERVED = (
    "model.architecture=null", "model.endpoint={name: m}", "base=null", "data.corpus=null", "evaluation.engine=openai",
    f"execution.server.urls=[{URL}]", "difficulty=null",
)  # fmt: skip
EVALUATED = "stages=[prepare_data, base, evaluate, report]"


def of_api(
    *overrides: str, model: str = "api:m", urls: tuple[str, ...] = (URL,), **request: object
) -> ExperimentConfig:
    return evaluation_of(load_experiment(SMOKE, overrides), model, urls=urls, request=request)  # type: ignore[arg-type]


def settings(config: ExperimentConfig) -> list[object]:
    return [node.settings for node in build_graph(config)[:3]]


def test_any_experiments_protocol_is_that_of_a_model_behind_a_url() -> None:
    own, config = load_experiment(SMOKE), of_api(reasoning_effort="low")
    assert [node.name for node in build_graph(config)] == ["prepare_data", "base", "evaluate_base", "report"]
    assert own.evaluation is not None and config.evaluation is not None
    assert config.evaluation == own.evaluation.model_copy(update={"engine": "openai"})
    assert config.model.endpoint is not None
    assert (config.model.endpoint.name, config.model.endpoint.request) == ("m", {"reasoning_effort": "low"})
    assert config.execution.server.urls == (URL,)


def test_the_name_and_the_request_are_a_results_identity_and_the_place_is_not() -> None:
    elsewhere = ["execution.server.concurrency=2", "execution.server.api_key_variable=OTHER"]
    assert settings(of_api()) == settings(of_api(*elsewhere, urls=("https://b/api", "http://c")))
    assert settings(of_api()) != settings(of_api(model="api:n"))
    assert settings(of_api()) != settings(of_api(reasoning_effort="low"))


def test_servers_of_the_experiment_are_taken_where_no_url_is_given() -> None:
    served = ["evaluation.engine=openai", "execution.server.urls=[http://two:1]"]
    assert of_api(*served, urls=()).execution.server.urls == ("http://two:1",)


def test_the_chain_of_a_served_model_can_be_written_down() -> None:
    config = load_experiment(SMOKE, [*SERVED, EVALUATED])
    assert [node.name for node in build_graph(config)] == ["prepare_data", "base", "evaluate_base", "report"]
    cold = "evaluation.decodings={cold: {temperature: 0.001}}"  # below what vLLM draws at
    assert load_experiment(SMOKE, [*SERVED, EVALUATED, cold]).model.endpoint is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "stages: sft needs a model's weights, which model.endpoint does not give"),
        (["stages=[prepare_data, base, rl, evaluate]"], "stages: rl needs a model's weights"),
        ([EVALUATED, "evaluation.engine=transformers", "execution.server.urls=[]"], "evaluation.engine: transformers"),
        ([EVALUATED, "execution.server.urls=[]"], "execution.server.urls: missing"),
        ([EVALUATED, "model.path=some/model"], "give exactly one of path"),
        ([EVALUATED, "model.chat_template=qwen"], "chat_template has no effect without path or package"),
        ([EVALUATED, "base={steps: 1, batch_size: 1, optimizer: {lr: 1}}"], "have no effect with model.endpoint"),
        ([EVALUATED, "model.endpoint.name=''"], "model.endpoint.name"),
        ([EVALUATED, "model.endpoint.request.stop=x"], "request.stop cannot be set here"),
        (
            [EVALUATED, "model.endpoint.request.temperature=null"],
            "request.temperature: null leaves the endpoint at its default of 1, but evaluation.decodings.greedy",
        ),
        ([EVALUATED, "evaluation.decodings.sampled.num_samples=0"], "num_samples: must be greater than 0"),
    ],
)
def test_what_a_served_model_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(SMOKE, [*SERVED, *overrides])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "named", "message"),
    [
        ("api:m", {"urls": ()}, "--url: missing; say where m is served"),
        ("api:", {}, "--model: api: names no model"),
        ("api:m", {"urls": ("one:8000",)}, "--url one:8000: must be like http://host:8000"),
        ("api:m", {"urls": ("http://a", "http://a/v1")}, "give each server once"),
        ("api:m", {"chat_template": "qwen"}, "--chat-template has no effect on a model served by an endpoint"),
        ("api:m", {"request": {"n": 4}}, "request.n cannot be set here"),
        ("some/model", {}, "--url has no effect on a model folder"),
        (
            "some/model",
            {"urls": (), "chat_template": "qwem"},
            "--chat-template: qwem: no such file; give luffy, none, ",
        ),
        ("some/model", {"urls": (), "request": {"a": 1}}, "--request has no effect on a model folder"),
    ],
)
def test_a_question_that_does_not_fit_is_one_line(model: str, named: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluation_of(load_experiment(SMOKE), model, **{"urls": (URL,), **named})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sweep_has_no_url() -> None:
    with pytest.raises(ConfigError, match="--url has no effect with --steps"):
        evaluated(load_experiment(SMOKE), EvaluatedModel(steps=(2,), urls=(URL,)))
