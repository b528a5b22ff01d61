"""What sections come to: defaults from other sections, settings of stages, keys, and the evaluation of one model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.chain import StageNode
from luffy.config.derived import EvaluatedModel, evaluated, evaluation, sweep_of
from luffy.config.evaluation import DECODING, TEMPLATES, EvaluationConfig
from luffy.config.grading import AnyGrader, ChoiceGrader, GradingConfig, MathGrader, StrictMathGrader
from luffy.config.model import LoRAConfig, ModelConfig, locate
from luffy.config.settings import SETTINGS, RLSettings, StageSettings
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.data.prompt_templates import PROMPT_TEMPLATES
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import identifying, identity_of

RL = ("chain=rl", "method=luffy")
URL = "http://one:8000/v1"
TEACHERS = (
    "sample={teachers: {r1: {endpoint: {name: m}, max_response_tokens: 8}}}",
    "execution.teachers={r1: {urls: ['http://h:1/v1']}}",
)
VALIDATED = "rl.validation={every: 2, suites: [longer]}"
CONSTANT = ("chain=rl", "method=on_policy", "rl.optimizer={lr: 1e-3}")
HALF = ("model.dtype=bfloat16", "execution.zero_stage=1")


def nodes(*overrides: str) -> dict[str, StageNode]:
    return {node.name: node for node in build_graph(load_experiment(SMOKE, overrides))}


def settings(stage: str, *overrides: str) -> StageSettings:
    return nodes(*overrides)[stage].settings


def test_each_stage_has_its_settings() -> None:
    assert SETTINGS.keys() == STAGE_KINDS.keys()


@pytest.mark.parametrize(
    ("stage", "overrides"), [("prepare_data", ["data.rl=complement", "method=on_policy"]), ("sft", ["cluster=ray"])]
)
def test_what_changes_no_result_is_in_no_key(stage: str, overrides: list[str]) -> None:
    assert settings(stage, *overrides) != settings(stage)
    assert identifying(settings(stage, *overrides)) == identifying(settings(stage))


@pytest.mark.parametrize("field", ["packing=true", "compile=true"])
def test_neither_packing_nor_compilation_changes_what_a_result_is(field: str) -> None:
    plain, other = nodes(*HALF), nodes(*HALF, f"execution.{field}")
    assert [node.settings for node in plain.values()][:4] == [node.settings for node in other.values()][:4]


# What sections come to, with what others say: a reader, overrides, and what it finds.


def difficulty(*overrides: str) -> dict[str, object] | None:
    found = load_experiment(SMOKE, overrides).measured_difficulty
    return found and {name: getattr(found, name) for name in ("temperature", "max_response_tokens", "stop", "engine")}


def sample(*overrides: str) -> tuple[int, str] | None:
    found = load_experiment(SMOKE, overrides).sampled_traces
    return found and (found.max_response_tokens, found.engine)


def stages(*overrides: str) -> list[str]:
    return [name for name in nodes(*overrides) if not name.startswith(("evaluate", "report"))]


def updates(*overrides: str) -> tuple[int, int]:
    rl = settings("rl", *RL, *overrides).rl
    return rl.updates_per_pass, rl.updates_per_step


def depends_on_length(*overrides: str) -> bool:
    return settings("rl", *CONSTANT, *overrides).depends_on_length


def extendable(validation: str) -> bool:
    """Whether a longer run continues a shorter one: where both would measure the same."""
    found = settings("rl", f"rl.validation={validation}", *CONSTANT)
    assert isinstance(found, RLSettings)
    return identity_of("rl", found, {}, {}, {}).extendable


def adapters(*overrides: str) -> list[LoRAConfig | None]:
    found = nodes(*overrides)
    return [found["base"].settings.model.lora, found["sft"].settings.lora, found["rl"].settings.lora]


def sft_examples(*overrides: str) -> list[object]:
    """Chosen once their traces are there."""
    found = nodes(*TEACHERS, *overrides)
    return [found[name].settings.data.sft.unique_train_examples for name in ("prepare_data", "sample")]


BY_RL = ("difficulty={}", "rl.temperature=0.7", 'rl.stop=["</answer>"]')
OF_RL = {"temperature": 0.7, "max_response_tokens": 64, "stop": ("</answer>",)}
OWN = {"temperature": 1.2, "max_response_tokens": 32, "engine": "transformers", "stop": []}
ALONE = ["prepare_data", "base", "sample"]
BEHIND_SFT = "stages=[prepare_data, base, sample, sft, difficulty, rl, evaluate]"
POOLS = "rl.sampling={kind: pools}"
MOVING = "rl.sampling={kind: pools, hard_at_most: {kind: linear, start: 0.1, end: 0.3}}"


@pytest.mark.parametrize(
    ("read", "overrides", "expected"),
    [
        (difficulty, [*BY_RL, "cluster=local"], {**OF_RL, "engine": "transformers"}),
        (difficulty, [*BY_RL, "cluster=ray"], {**OF_RL, "engine": "vllm"}),
        (difficulty, [*BY_RL, "rl.engine=vllm"], {**OF_RL, "engine": "vllm"}),
        (difficulty, [*BY_RL, "evaluation.engine=vllm"], {**OF_RL, "engine": "transformers"}),
        (difficulty, [f"difficulty={OWN}", "rl.stop=[x]", "cluster=ray"], {**OWN, "stop": ()}),
        (difficulty, ["difficulty={}", "chain=sft"], None),
        (sample, ["chain=expert_iteration"], (64, "transformers")),
        (sample, ["chain=expert_iteration", "cluster=ray"], (64, "vllm")),
        (sample, ["sample={}"], None),
        (stages, ["difficulty.num_samples=4", *RL], ["prepare_data", "base", "difficulty", "rl"]),
        (stages, ["difficulty={}", "chain=sft"], ["prepare_data", "base", "sft"]),
        (stages, [*TEACHERS, "difficulty={}", BEHIND_SFT], [*ALONE, "sft", "difficulty", "rl"]),
        (stages, [*TEACHERS, "difficulty={}"], [*ALONE, "difficulty", "sft", "rl"]),
        (sample, TEACHERS, None),
        (stages, [*TEACHERS, "chain=null", "method=null", f"stages={ALONE}"], ALONE),
        (updates, ["rl.prompts_per_step=8", "rl.prompts_per_update=2", "rl.passes=3"], (4, 12)),
        (depends_on_length, [], False),
        (depends_on_length, [POOLS], False),
        (depends_on_length, [MOVING], True),
        (extendable, ["{every: 2, suites: [longer]}"], True),
        (extendable, ["{every: 4, suites: [longer]}"], False),  # step 6 is measured because it is the last
        (extendable, ["{every: 2, suites: [longer], keep_best: {}}"], False),
        (adapters, ["model.lora={rank: 4, alpha: 8, dropout: 0.1}"],
         [None, LoRAConfig(rank=4, alpha=8.0, dropout=0.1), LoRAConfig(rank=4, alpha=8.0)]),
        (sft_examples, ["data.sft.unique_train_examples=8"], ["all", 8]),
    ],
)  # fmt: skip
def test_sections_come_to(read: Callable, overrides: list[str], expected: object) -> None:
    assert read(*overrides) == expected


def test_what_learns_reads_the_traces_of_teachers_and_the_rest_the_prepared_data() -> None:
    found = {name: dict(node.inputs) for name, node in nodes(*TEACHERS, "difficulty={}", BEHIND_SFT).items()}
    assert found["sample"] == {"data": "prepare_data"}
    assert (found["sft"]["data"], found["difficulty"]["data"]) == ("sample", "sample")
    assert nodes(*TEACHERS)["rl"].inputs["data"] == "sample"
    assert {found[name]["data"] for name in found if name.startswith(("base", "evaluate"))} == {"prepare_data"}


# Validation while a stage trains.


def test_the_validation_is_part_of_the_settings_once_and_its_problems_come_from_prepared_data() -> None:
    node = nodes(VALIDATED)["rl"]
    values = identifying(node.settings)
    assert values["validation"]["schedule"]["every"] == 2 and values["rl"]["validation"] is None
    assert type(node.settings).read(json.loads(node.settings.model_dump_json())) == node.settings
    assert "held_out" not in nodes()["rl"].inputs
    found = nodes(VALIDATED, "difficulty={num_samples: 2}")["rl"].inputs
    assert found == {"data": "difficulty", "model": "sft", "held_out": "prepare_data"}


def test_suites_are_asked_and_graded_as_in_the_evaluation_under_a_decoding_of_their_own() -> None:
    own = "evaluation.suites.longer={num_samples: 3, grader: {kind: exact}}"
    section = "sft.validation={every: 2, suites: [longer], decoding: {temperature: 0.5, num_samples: 2}}"
    held_out = settings("sft", own, section).validation
    protocol = held_out.protocol.protocol("longer", DECODING)
    assert (protocol.temperature, protocol.num_samples, protocol.grader.kind) == (0.5, 2, "exact")
    assert held_out.protocol.max_response_tokens == 32 and held_out.protocol.own_graders


# Evaluation and grading.


def protocol_of(text: str, folder: Path) -> EvaluationConfig:
    (folder / "it.yaml").write_text(f"extends: {SMOKE}\nevaluation: {text}")
    config = load_experiment(folder / "it.yaml").evaluation
    assert config is not None
    return config


def test_a_suite_says_what_it_does_otherwise(tmp_path: Path) -> None:
    config = protocol_of(
        "{template: qwen_math, stop: [Q], "
        "decodings: {greedy: {temperature: 0.0}, hot: {temperature: 0.6, top_p: 0.95}}, "
        "suites: {longer: {num_samples: 32, grader: choice}, retention: {template: none, stop: []}}}",
        tmp_path,
    )
    longer, retention, other = (config.protocol(name, "hot") for name in ("longer", "retention", "other_mix"))
    assert (longer.num_samples, longer.grader) == (32, ChoiceGrader())
    assert (longer.template, longer.stop) == ("qwen_math", ("Q",))
    assert (retention.num_samples, retention.template, retention.stop) == (1, "none", ())
    assert (other.temperature, other.top_p, other.grader, other.template) == (0.6, 0.95, None, "qwen_math")
    assert config.protocol("longer", "greedy").num_samples == 1  # greedy decoding gives the same each time
    assert config.own_graders == (ChoiceGrader(),)
    assert (config.template_of("retention"), config.template_of("longer")) == ("none", "qwen_math")
    assert EvaluationConfig.model_validate_json(config.model_dump_json()) == config


def test_a_template_of_the_users_own_is_its_text_wherever_it_was_written(tmp_path: Path) -> None:
    text = "Question: {question}\nLet us think.\nAnswer:"
    (tmp_path / "mine.txt").write_text(f"{text}\n")
    in_file = protocol_of(f"{{template: {tmp_path}/mine.txt}}", tmp_path)
    by_suite = protocol_of(f"{{suites: {{longer: {{template: {tmp_path}/mine.txt}}}}}}", tmp_path)
    assert in_file == protocol_of(f"{{template: {json.dumps(text)}}}", tmp_path)
    assert in_file.template == by_suite.template_of("longer") == text
    assert by_suite.template_of("retention") == "own"
    assert set(TEMPLATES) == {"own", *PROMPT_TEMPLATES}


@pytest.mark.parametrize(
    ("content", "named"), [("", "it.yaml:2: "), ("Answer: {problem}", "{question} once"), ("\xff{question}", "UTF-8")]
)
def test_an_unusable_template_is_one_line(tmp_path: Path, content: str, named: str) -> None:
    if content:
        (tmp_path / "mine.txt").write_text(content, encoding="latin-1")
    with refused("mine.txt", "evaluation.template", named, error=ConfigError):
        protocol_of(f"{{template: {tmp_path}/mine.txt}}", tmp_path)


def test_graders_nest_survive_their_own_json_and_are_found_by_name() -> None:
    assert load_experiment(SMOKE).grading == GradingConfig(kind=MathGrader(boxed="required"))
    parts = "[{weight: 1, grader: math}, {weight: 0.2, grader: {kind: any, of: [math_strict, {kind: choice}]}}]"
    config = load_experiment(SMOKE, [f"grading={{kind: {{kind: weighted, parts: {parts}}}}}"]).grading
    either = AnyGrader(of=(StrictMathGrader(), ChoiceGrader()))
    assert [(part.weight, part.grader) for part in config.kind.parts] == [(1.0, MathGrader()), (0.2, either)]
    assert GradingConfig.model_validate_json(config.model_dump_json()) == config
    config = GradingConfig(named={"lenient": MathGrader(boxed="preferred")})
    found = [config.grader(name) for name in (None, "lenient", "choice")]
    assert found == [MathGrader(), MathGrader(boxed="preferred"), ChoiceGrader()]
    with pytest.raises(KeyError):
        config.grader("nobody")


# The evaluation of one model, or of the checkpoints of an RL run.


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
    of_hub = evaluated(config, EvaluatedModel("Qwen/Qwen2.5-0.5B", chat_template="qwen")).model
    assert (of_hub.path, of_hub.chat_template) == ("Qwen/Qwen2.5-0.5B", "qwen")


def test_one_model_is_one_evaluation_however_its_experiment_trains_and_however_it_is_named(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    named = [str(folder), str(folder / "model"), str(folder.parent / "link" / "model")]
    trained = [[], ["method=dapo", "rl.steps=50"], ["sft.epochs=9", "data.train.num_prompts=99"]]
    asked = [
        [node.settings for node in build_graph(evaluated(load_experiment(SMOKE, overrides), EvaluatedModel(model)))[:3]]
        for overrides, model in zip(trained, named, strict=True)
    ]
    assert asked[0] == asked[1] == asked[2]


def of_api(*overrides: str, model: str = "api:m", urls: tuple[str, ...] = (URL,), **request: str) -> ExperimentConfig:
    return evaluated(load_experiment(SMOKE, overrides), EvaluatedModel(model, urls=urls, request=request))


def test_any_experiments_protocol_is_that_of_a_model_behind_a_url() -> None:
    own, config = load_experiment(SMOKE), of_api(reasoning_effort="low")
    assert [node.name for node in build_graph(config)] == ["prepare_data", "base", "evaluate_base", "report"]
    assert own.evaluation is not None and config.model.endpoint is not None
    assert config.evaluation == own.evaluation.model_copy(update={"engine": "openai"})
    assert (config.model.endpoint.name, config.model.endpoint.request) == ("m", {"reasoning_effort": "low"})
    assert config.execution.server.urls == (URL,)
    served = ["model={architecture: null, endpoint: {name: own}}", "base=null", "data.corpus=null"]
    served += ["stages=[prepare_data, base, evaluate]", "evaluation.engine=openai"]
    served += ["execution.server.urls=[http://two:1]"]
    assert of_api(*served, urls=()).execution.server.urls == ("http://two:1",)


def test_the_name_and_the_request_are_a_results_identity_and_the_place_is_not() -> None:
    def asked(config: ExperimentConfig) -> list[StageSettings]:
        return [node.settings for node in build_graph(config)[:3]]

    elsewhere = ["execution.server.concurrency=2", "execution.server.api_key_variable=OTHER"]
    assert asked(of_api()) == asked(of_api(*elsewhere, urls=("https://b/api", "http://c")))
    assert asked(of_api()) != asked(of_api(model="api:n"))
    assert asked(of_api()) != asked(of_api(reasoning_effort="low"))


def test_a_sweep_ends_its_chain_and_changes_no_stage_before_it() -> None:
    config = load_experiment(SMOKE)
    found = build_graph(sweep_of(config, (2, 4)), (2, 4))
    assert [node.name for node in found] == ["prepare_data", "base", "sft", "rl", "sweep"]
    for node, of_chain in zip(found[:4], build_graph(config), strict=False):
        assert (node.inputs, node.settings) == (of_chain.inputs, of_chain.settings)


@pytest.mark.parametrize(
    ("update", "model", "named"),
    [
        ({}, "{folder}", "has no config.json"),
        ({}, "{folder}/notes.txt", "notes.txt is a file"),
        ({"evaluation": load_experiment(SMOKE).evaluation.model_copy(update={"engine": "openai"})}, "some/model",
         "evaluation.engine: openai asks the servers of model.endpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_one_line(tmp_path: Path, update: dict, model: str, named: str) -> None:
    (tmp_path / "notes.txt").touch()
    with refused(named, error=ConfigError):
        evaluated(load_experiment(SMOKE).model_copy(update=update), EvaluatedModel(model.format(folder=tmp_path)))


def test_the_experiments_own_model_keeps_its_context_and_another_is_evaluated_where_it_is_missing(folder) -> None:
    def of(path: str, model: str) -> ModelConfig:
        own = ModelConfig(path=path, rope_theta=40000, max_position_embeddings=99)
        return evaluated(load_experiment(SMOKE).model_copy(update={"model": own}), EvaluatedModel(model)).model

    for path in (str(folder / "model"), "some/model"):
        assert of(path, path).max_position_embeddings == 99
    assert of("/models/none", str(folder)).path == str(folder / "model")


def alone(model: str, *suites: str, config: str | None = None, overrides: tuple[str, ...] = ()) -> ExperimentConfig:
    return evaluation(config, overrides, EvaluatedModel(model, suites=suites))


def test_a_model_and_a_file_are_an_evaluation_named_after_the_model(folder: Path) -> None:
    folder = folder.rename(folder.with_name("Qwen Mine"))
    (folder / "model").rename(folder / "it")
    config = alone(str(folder / "it"), "tasks/*.jsonl", "second=a.csv", overrides=("seed=3",))
    assert (config.name, config.model.shown_name, config.seed) == ("it", "it", 3)
    paths = {name: source.path for name, source in config.data.suites.items()}
    assert paths == {"model": "tasks/*.jsonl", "second": "a.csv"}
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
def test_a_suite_is_a_benchmark_an_environment_or_a_source(suite, name, source, environment) -> None:
    config = alone("some/model", suite)
    assert {name: each.kind for name, each in config.data.suites.items()} == {name: source}
    assert (config.environment and config.environment.kind) == environment


def test_a_chain_that_trains_nothing_needs_no_master_weights() -> None:
    config = alone("some/model", "aime24", overrides=(HALF[0],))
    assert (config.model.dtype, config.execution.zero_stage) == ("bfloat16", 0)
    with refused("zero_stage: 0", "float32 master weights"):
        load_experiment(SMOKE, [HALF[0]])


def test_suites_replace_those_of_an_experiment_whose_protocol_stays() -> None:
    config, shipped = alone("some/model", "a.jsonl", config=str(SMOKE)), load_experiment(SMOKE)
    assert config.evaluation is not None and shipped.evaluation is not None
    assert (config.evaluation.only, config.evaluation.decodings) == (("a",), shipped.evaluation.decodings)


@pytest.mark.parametrize(
    ("suites", "named"),
    [
        ((), "give the experiment that says how to evaluate"),
        (("aime_24",), "--suite aime_24: no such file; did you mean 'aime24'"),
        (("a/x.jsonl", "b/x.csv"), "--suite NAME=b/x.csv"),
        (("{kind: [}",), "is no source in YAML"),
        (("{kind: guess_number}",), "data.suites.guess_number.num_prompts"),
        (("guess_number", "aime24"), "guess_number is an environment"),
    ],
)
def test_a_suite_that_cannot_be_is_one_line(suites: tuple[str, ...], named: str) -> None:
    with refused(named, error=ConfigError):
        alone("some/model", *suites)


@pytest.mark.parametrize(
    ("name", "files", "named"),
    [
        ("one_model", ["weights.Q4_1.gguf"], ""),
        ("no_models", [], "ships 0 .gguf files"),
        ("two_models", ["a.gguf", "b.gguf"], "ships 2 .gguf files"),
        ("nowhere_to_be_found", None, "nowhere_to_be_found is not installed"),
    ],
)
def test_a_package_of_one_model_is_located_without_being_imported(tmp_path, monkeypatch, name, files, named) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if files is not None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for file in files or ():
        (tmp_path / name / file).write_bytes(b"GGUF")
    overrides = [f"model={{package: {name}, architecture: null}}", "base=null", "data.corpus=null"]
    source = load_experiment(SMOKE, overrides).model.source
    if named:
        with refused(named, error=ConfigError):
            locate(source)
    else:
        assert (source, locate(source)) == (f"package:{name}", str(tmp_path / name / files[0]))
    assert locate("Qwen/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"
