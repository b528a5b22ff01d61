"""From an experiment to the evaluation of one model, or of its RL run's checkpoints."""

import re
from pathlib import Path

import pytest

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.derived import EvaluatedModel, evaluated, evaluation, sweep_of
from luffy.config.model import ModelConfig
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stage" / "model").mkdir(parents=True)
    (tmp_path / "stage" / "model" / "config.json").write_text("{}")
    return tmp_path / "stage"


def test_only_the_suites_the_model_and_the_protocol_are_left(folder: Path) -> None:
    config = load_experiment(SMOKE)
    chosen = evaluated(config, EvaluatedModel(str(folder / "model")))
    assert [node.name for node in build_graph(chosen)] == ["prepare_data", "base", "evaluate_base", "report"]
    assert (chosen.data.train, chosen.data.corpus, chosen.rl, chosen.objective) == (None, None, None, None)
    kept = [(each.data.suites, each.evaluation, each.grading) for each in (chosen, config)]
    assert kept[0] == kept[1]


def test_one_model_is_one_evaluation_however_its_experiment_trains_and_however_it_is_named(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    named = [str(folder), str(folder / "model"), str(folder.parent / "link" / "model")]
    trained = [[], ["method=dapo", "rl.steps=50"], ["sft.epochs=9", "data.train.num_prompts=99"]]
    settings = [
        [node.settings for node in build_graph(evaluated(load_experiment(SMOKE, overrides), EvaluatedModel(model)))[:3]]
        for overrides, model in zip(trained, named, strict=True)
    ]
    assert settings[0] == settings[1] == settings[2]


def test_a_hub_id_stays_as_it_is_and_may_be_given_a_chat_template_and_servers_of_rl_are_left_out() -> None:
    chosen = evaluated(load_experiment(SMOKE), EvaluatedModel("Qwen/Qwen2.5-0.5B", chat_template="qwen"))
    assert (chosen.model.path, chosen.model.chat_template) == ("Qwen/Qwen2.5-0.5B", "qwen")
    servers = ["rl.engine=openai", "execution.server.urls=[http://one:8000]"]
    assert evaluated(load_experiment(SMOKE, servers), EvaluatedModel("some/model")).execution.server.urls == ()


def test_a_sweep_ends_its_chain_and_changes_no_stage_before_it() -> None:
    config = load_experiment(SMOKE)
    nodes = build_graph(sweep_of(config, (2, 4)), (2, 4))
    assert [node.name for node in nodes] == ["prepare_data", "base", "sft", "rl", "sweep"]
    assert nodes[:4] == build_graph(config)[:4]
    assert nodes[4].inputs == {"data": "prepare_data", "model": "rl"}


@pytest.mark.parametrize(
    ("overrides", "steps", "message"),
    [
        ([], (7,), "7 is not among the 6 steps"),
        ([], (0, 2), "0 is not among the 6 steps"),
        (["chain=sft"], (2,), "has no stage rl"),
        (["stages=[prepare_data, base, sft, rl]", "evaluation=null"], (2,), "evaluation: missing"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(overrides: list[str], steps: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_of(load_experiment(SMOKE, overrides), steps)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json; give a Hugging Face model folder"):
        evaluated(load_experiment(SMOKE), EvaluatedModel(str(tmp_path)))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"notes.txt is a file; give a Hugging Face model folder, a .gguf file or"):
        evaluated(load_experiment(SMOKE), EvaluatedModel(str(tmp_path / "notes.txt")))


@pytest.mark.parametrize("model", ["exported", "./exported", "../a", "/models/none", "~/models/none", "runs/a/model"])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match=f"--model: {re.escape(model)}: no such folder; relative paths start at /"):
        evaluated(load_experiment(SMOKE), EvaluatedModel(model))


def test_a_protocol_that_cannot_be_followed_is_one_line():
    config = load_experiment(SMOKE)
    servers = config.evaluation.model_copy(update={"engine": "openai"})
    config = config.model_copy(update={"evaluation": servers})
    with pytest.raises(ConfigError, match=r"execution\.server\.urls: missing") as caught:
        evaluated(config, EvaluatedModel("some/model"))
    assert "\n" not in str(caught.value)


def test_the_experiments_own_model_keeps_its_context_and_another_is_evaluated_where_it_is_missing(folder):
    config = load_experiment(SMOKE)
    own = ModelConfig(path=str(folder / "model"), rope_theta=40000, max_position_embeddings=99)
    config = config.model_copy(update={"model": own})
    assert evaluated(config, EvaluatedModel(str(folder / "model"))).model.max_position_embeddings == 99
    on_the_hub = config.model_copy(update={"model": own.model_copy(update={"path": "some/model"})})
    assert evaluated(on_the_hub, EvaluatedModel("some/model")).model.max_position_embeddings == 99
    missing = config.model_copy(update={"model": ModelConfig(path="/models/none")})
    assert evaluated(missing, EvaluatedModel(str(folder))).model.path == str(folder / "model")


def alone(model: str, *suites: str, config: str | None = None, overrides: tuple[str, ...] = ()) -> ExperimentConfig:
    return evaluation(config, overrides, EvaluatedModel(model, suites=suites))


def test_a_model_and_a_file_are_an_evaluation_named_after_the_model(folder: Path) -> None:
    folder = folder.rename(folder.with_name("Qwen Mine"))
    (folder / "model").rename(folder / "it")
    config = alone(str(folder / "it"), "tasks/*.jsonl", "second=a.csv", overrides=("seed=3",))
    assert (config.name, config.model.shown_name, config.seed) == ("it", "it", 3)
    assert {name: source.path for name, source in config.data.suites.items()} == {
        "model": "tasks/*.jsonl", "second": "a.csv",
    }  # fmt: skip
    assert config.evaluation is not None
    assert [*config.evaluation.decodings] == ["greedy"] and config.evaluation.max_response_tokens == 2048
    assert config.checkpoint_names == {"base": "it"} and load_experiment(SMOKE).checkpoint_names == {}


@pytest.mark.parametrize(("context", "most"), [(512, 256), (32768, 2048)])
def test_a_response_takes_at_most_half_of_the_models_context(folder: Path, context: int, most: int) -> None:
    (folder / "model" / "config.json").write_text(f'{{"max_position_embeddings": {context}}}')
    found = alone(str(folder), "aime24").evaluation
    assert found is not None and found.max_response_tokens == most


@pytest.mark.parametrize(
    ("suite", "name", "source", "environment"),
    [
        ("aime24", "aime24", "hub", None),
        ("arithmetic", "arithmetic", "arithmetic", None),
        ("guess_number", "guess_number", "guess_number", "guess_number"),
        ("reasoning_gym:gcd", "gcd", "reasoning_gym", None),
        ("verifiers:vf-wordle", "vf-wordle", "verifiers", "verifiers"),
        ("games={kind: guess_number, num_prompts: 8, high: 15}", "games", "guess_number", "guess_number"),
    ],
)
def test_a_suite_is_a_benchmark_an_environment_or_a_source(
    suite: str, name: str, source: str, environment: str | None
) -> None:
    config = alone("some/model", suite)
    assert {name: each.kind for name, each in config.data.suites.items()} == {name: source}
    assert (config.environment and config.environment.kind) == environment


def test_a_chain_that_trains_nothing_needs_no_master_weights() -> None:
    config = alone("some/model", "aime24", overrides=("model.dtype=bfloat16",))
    assert (config.model.dtype, config.execution.zero_stage) == ("bfloat16", 0)
    with pytest.raises(ConfigError, match="zero_stage: 0 keeps no float32 master weights"):
        load_experiment(SMOKE, ["model.dtype=bfloat16"])


def test_suites_replace_those_of_an_experiment_whose_protocol_stays() -> None:
    config, shipped = alone("some/model", "a.jsonl", config=str(SMOKE)), load_experiment(SMOKE)
    assert config.evaluation is not None and shipped.evaluation is not None
    assert (config.evaluation.only, config.evaluation.decodings) == (("a",), shipped.evaluation.decodings)


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ((), "give the experiment that says how to evaluate"),
        (("aime_24",), "--suite aime_24: no such file; did you mean 'aime24'"),
        (("a/x.jsonl", "b/x.csv"), "--suite b/x.csv: there is a suite x already; give --suite NAME=b/x.csv"),
        (("{kind: [}",), "is no source in YAML"),
        (("{kind: guess_number}",), "data.suites.guess_number.num_prompts"),
        (("guess_number", "aime24"), "guess_number is an environment, which a run has one of"),
    ],
)
def test_a_suite_that_cannot_be_is_one_line(suites: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        alone("some/model", *suites)
    assert "\n" not in str(caught.value)
