"""What the sections of an experiment come to: defaults of other sections, settings of stages, keys."""

import json
import re
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.evaluation import DECODING, TEMPLATES, EvaluationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.grading import AnyGrader, ChoiceGrader, GradingConfig, MathGrader, StrictMathGrader
from luffy.config.model import LoRAConfig, locate
from luffy.config.settings import CONFIGURE, SETTINGS, RLSettings, StageSettings
from luffy.config.stage_kinds import STAGE_KINDS, STAGE_ORDER
from luffy.data.prompt_templates import PROMPT_TEMPLATES
from luffy.errors import ConfigError
from luffy.pipeline.graph import StageNode, build_graph
from luffy.pipeline.identity import identifying, identity_of

CONFIGS = Path(__file__).parents[3] / "exp_configs"
SMOKE, GAME = CONFIGS / "smoke.yaml", CONFIGS / "guess_number.yaml"
RL = ("chain=rl", "method=luffy")
URL = "http://one:8000/v1"
TEACHERS = (
    "synthesize={teachers: {r1: {endpoint: {name: m}, max_response_tokens: 8}}}",
    "execution.teachers={r1: {urls: ['http://h:1/v1']}}",
)
VALIDATED = "rl.validation={every: 2, suites: [longer]}"


def nodes(*overrides: str) -> dict[str, StageNode]:
    return {node.name: node for node in build_graph(load_experiment(SMOKE, overrides))}


def settings(stage: str, *overrides: str) -> StageSettings:
    return nodes(*overrides)[stage].settings


def test_each_stage_has_its_settings() -> None:
    assert SETTINGS.keys() == STAGE_KINDS.keys()
    assert CONFIGURE.keys() == {*STAGE_ORDER}


# What changes no result is in no key.


@pytest.mark.parametrize(
    ("stage", "overrides"),
    {"prepare_data": ["data.rl=complement", "method=on_policy"], "sft": ["cluster=ray"]}.items(),
)
def test_what_changes_no_result_is_in_no_key(stage: str, overrides: list[str]) -> None:
    assert settings(stage, *overrides) != settings(stage)
    assert identifying(settings(stage, *overrides)) == identifying(settings(stage))


@pytest.mark.parametrize(
    "overrides",
    [["execution.packing=true"], ["execution.compile=true"], ["execution.attention=flex"],
     ["execution.attention=flash_attention_2"], ["execution.attention=flash_attention_3", "execution.packing=true"]],
)  # fmt: skip
def test_neither_attention_nor_compilation_changes_what_a_result_is(overrides: list[str]) -> None:
    half = ("model.dtype=bfloat16", "execution.zero_stage=1")
    plain, other = nodes(*half), nodes(*half, *overrides)
    assert [node.settings for node in plain.values()][:4] == [node.settings for node in other.values()][:4]


# difficulty, sample, synthesize


@pytest.mark.parametrize(("chain", "behind"), [((), "sft"), (RL, "rl")])
def test_difficulty_alone_puts_its_stage_behind_base_where_there_is_rl(chain: tuple[str, ...], behind: str) -> None:
    measured = load_experiment(SMOKE, ["difficulty.num_samples=4", *chain])
    assert measured.stages[:4] == ("prepare_data", "base", "difficulty", behind)
    assert "difficulty" not in load_experiment(SMOKE, chain).stages
    config = load_experiment(SMOKE, ["difficulty={}", "chain=sft"])
    assert ("difficulty" in config.stages, config.measured_difficulty) == (False, None)


@pytest.mark.parametrize(
    ("where", "engine"),
    [("cluster=local", "transformers"), ("cluster=ray", "vllm"), ("rl.engine=vllm", "vllm"),
     ("evaluation.engine=vllm", "transformers")],
)  # fmt: skip
def test_what_difficulty_does_not_say_is_said_by_rl(where: str, engine: str) -> None:
    stop = 'rl.stop=["</answer>"]'
    found = load_experiment(SMOKE, ["difficulty={}", "rl.temperature=0.7", stop, where]).measured_difficulty
    assert found is not None
    assert (found.temperature, found.max_response_tokens, found.engine) == (0.7, 64, engine)
    assert found.stop == ("</answer>",)


def test_what_difficulty_says_itself_holds() -> None:
    own = {"temperature": 1.2, "max_response_tokens": 32, "engine": "transformers", "stop": []}
    given = load_experiment(SMOKE, [f"difficulty={own}", "rl.stop=[x]", "cluster=ray"]).measured_difficulty
    assert {name: getattr(given, name) for name in own} == {**own, "stop": ()}


def test_what_sample_does_not_say_others_do_and_the_shipped_expert_iteration_has_three_rounds() -> None:
    sampled = load_experiment(SMOKE, ["chain=expert_iteration"]).sampled_traces
    assert sampled is not None
    assert (sampled.max_response_tokens, sampled.engine) == (64, "transformers")  # data.max_trace_tokens
    by_ray = load_experiment(SMOKE, ["chain=expert_iteration", "cluster=ray"]).sampled_traces
    assert by_ray is not None and by_ray.engine == "vllm"
    assert load_experiment(SMOKE, ["sample={}"]).sampled_traces is None
    shipped = load_experiment(CONFIGS / "expert_iteration.yaml")
    assert shipped.sft is not None
    assert (shipped.expert_iteration.rounds, shipped.sft.num_traces) == (3, None)
    assert shipped.stages == ("prepare_data", "base", "sample", "sft", "evaluate", "report")


def test_synthesize_puts_its_stage_behind_base_what_learns_reads_it_and_a_chain_may_end_with_it() -> None:
    found = {name: dict(node.inputs) for name, node in nodes(*TEACHERS, "difficulty={policy: sft}").items()}
    assert list(found)[:6] == ["prepare_data", "base", "synthesize", "sft", "difficulty", "rl"]
    assert found["synthesize"] == {"data": "prepare_data"}
    assert (found["sft"]["data"], found["difficulty"]["data"]) == ("synthesize", "synthesize")
    assert nodes(*TEACHERS)["rl"].inputs["data"] == "synthesize"
    assert {found[name]["data"] for name in found if name.startswith(("base", "evaluate"))} == {"prepare_data"}
    assert "synthesize" not in nodes()
    chain = ["prepare_data", "base", "synthesize"]
    assert list(nodes(*TEACHERS, "chain=null", "method=null", f"stages={chain}")) == chain


def test_sft_examples_are_chosen_once_their_traces_are_there() -> None:
    found = nodes(*TEACHERS, "data.sft.unique_train_examples=8")
    chosen = [found[name].settings.data.sft.unique_train_examples for name in ("prepare_data", "synthesize")]
    assert chosen == ["all", 8]


def test_difficulty_the_policy_and_teachers_play_the_episodes_of_the_environment() -> None:
    teachers = "synthesize={teachers: {own: {path: org/big, max_response_tokens: 16}}}"
    sampled = load_experiment(GAME, ["chain=expert_iteration", "method=null", "rl=null"])
    for stage, config in {
        "sample": sampled,
        "synthesize": load_experiment(GAME, [teachers]),
        "difficulty": load_experiment(GAME, ["difficulty={}"]),
    }.items():
        assert CONFIGURE[stage](config).environment == config.environment is not None


# rl


def test_the_optimizer_steps_of_every_pass_count() -> None:
    rl = settings("rl", *RL, "rl.prompts_per_step=8", "rl.prompts_per_update=2", "rl.passes=3").rl
    assert (rl.updates_per_pass, rl.updates_per_step) == (4, 12)


def test_moving_thresholds_depend_on_the_length_of_the_run() -> None:
    constant = ("chain=rl", "method=on_policy", "rl.optimizer.schedule={kind: constant}")
    moving = "rl.sampling={kind: pools, hard_at_most: {kind: linear, start: 0.1, end: 0.3}}"
    found = [settings("rl", *constant, *more) for more in ((), ("rl.sampling={kind: pools}",), (moving,))]
    assert [each.depends_on_length for each in found] == [False, False, True]


def test_sft_and_rl_get_the_adapter_and_only_sft_its_dropout() -> None:
    found = nodes("model.lora={rank: 4, alpha: 8, dropout: 0.1}")
    assert found["base"].settings.model.lora is None
    assert found["sft"].settings.lora == LoRAConfig(rank=4, alpha=8.0, dropout=0.1)
    assert found["rl"].settings.lora == LoRAConfig(rank=4, alpha=8.0)


# Validation while a stage trains


def test_the_validation_is_part_of_the_settings_once_and_its_problems_come_from_prepared_data() -> None:
    node = nodes(VALIDATED)["rl"]
    values = identifying(node.settings)
    assert values["validation"]["schedule"]["every"] == 2
    assert values["rl"]["validation"] is None
    assert type(node.settings).model_validate_json(node.settings.model_dump_json()) == node.settings
    assert "held_out" not in nodes()["rl"].inputs
    found = nodes(VALIDATED, "difficulty={num_samples: 2}")["rl"].inputs
    assert found == {"data": "difficulty", "model": "sft", "held_out": "prepare_data"}


def test_suites_are_asked_and_graded_as_in_the_evaluation_under_a_decoding_of_their_own() -> None:
    own = "evaluation.suites.longer={num_samples: 3, grader: {kind: exact}}"
    section = "sft.validation={every: 2, suites: [longer], decoding: {temperature: 0.5, num_samples: 2}}"
    held_out = settings("sft", own, section).validation
    protocol = held_out.protocol.protocol("longer", DECODING)
    assert (protocol.temperature, protocol.num_samples, protocol.grader.kind) == (0.5, 2, "exact")
    assert held_out.protocol.max_response_tokens == 32
    assert held_out.protocol.own_graders


@pytest.mark.parametrize(
    ("section", "extendable"),
    [
        ("{every: 2, suites: [longer]}", True),
        ("{every: 4, suites: [longer]}", False),  # step 6 is measured because it is the last
        ("{every: 2, suites: [longer], keep_best: {}}", False),
    ],
)
def test_a_longer_run_continues_a_shorter_one_where_both_would_measure_the_same(section: str, extendable: bool) -> None:
    constant = ("chain=rl", "method=on_policy", "rl.optimizer={lr: 1e-3}")
    found = settings("rl", f"rl.validation={section}", *constant)
    assert isinstance(found, RLSettings)
    assert identity_of("rl", found, {}, {}, {}).extendable == extendable


# evaluation and grading


def evaluation(text: str, tmp_path: Path) -> EvaluationConfig:
    (tmp_path / "it.yaml").write_text(f"extends: {SMOKE}\nevaluation: {text}")
    config = load_experiment(tmp_path / "it.yaml").evaluation
    assert config is not None
    return config


def test_a_suite_says_what_it_does_otherwise(tmp_path: Path) -> None:
    config = evaluation(
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
    in_file = evaluation(f"{{template: {tmp_path}/mine.txt}}", tmp_path)
    by_suite = evaluation(f"{{suites: {{longer: {{template: {tmp_path}/mine.txt}}}}}}", tmp_path)
    assert in_file == evaluation(f"{{template: {json.dumps(text)}}}", tmp_path)
    assert in_file.template == by_suite.template_of("longer") == text
    assert by_suite.template_of("retention") == "own"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("missing.txt", r"it\.yaml:2: evaluation\.template: .*missing\.txt: no such file; relative paths start at"),
        ("none.txt", r"none\.txt: must have \{question\} once, where the question goes; it has it 0 times"),
        ("bytes.txt", r"bytes\.txt: cannot be read \(it is not UTF-8 text\)"),
    ],
)
def test_an_unusable_template_is_one_line(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "none.txt").write_text("Answer: {problem}")
    (tmp_path / "bytes.txt").write_bytes(b"\xff{question}")
    with pytest.raises(ConfigError, match=message) as raised:
        evaluation(f"{{template: {tmp_path / template}}}", tmp_path)
    assert "\n" not in str(raised.value)


def test_shipped_templates_are_those_with_a_text() -> None:
    assert set(TEMPLATES) == {"own", *PROMPT_TEMPLATES}


def grading(text: str) -> GradingConfig:
    return load_experiment(SMOKE, [f"grading={text}"]).grading


def test_a_kind_of_grader_is_a_name_or_a_mapping_nests_and_survives_its_own_json() -> None:
    assert load_experiment(SMOKE).grading == GradingConfig(kind=MathGrader(boxed="required"))
    assert grading("{kind: math_strict}").kind == StrictMathGrader()
    assert grading("{kind: {kind: math, boxed: preferred}}").kind == MathGrader(boxed="preferred")
    either = grading("{kind: {kind: any, of: [math, {kind: choice}]}}").kind
    assert either == AnyGrader(of=(MathGrader(), ChoiceGrader()))
    both = "{kind: both, of: [math, math_strict]}"
    parts = f"[{{weight: 1, grader: math}}, {{weight: 0.2, grader: {both}}}]"
    config = grading(f"{{kind: {{kind: weighted, parts: {parts}}}}}")
    assert [part.weight for part in config.kind.parts] == [1.0, 0.2]
    assert GradingConfig.model_validate_json(config.model_dump_json()) == config


def test_names_lead_to_graders() -> None:
    config = GradingConfig(named={"lenient": MathGrader(boxed="preferred")})
    assert config.grader(None) == MathGrader()
    assert config.grader("lenient") == MathGrader(boxed="preferred")
    assert config.grader("choice") == ChoiceGrader()
    with pytest.raises(KeyError):
        config.grader("nobody")


# model


def of_api(*overrides: str, model: str = "api:m", urls: tuple[str, ...] = (URL,), **request: str) -> ExperimentConfig:
    return evaluated(load_experiment(SMOKE, overrides), EvaluatedModel(model, urls=urls, request=request))


def test_any_experiments_protocol_is_that_of_a_model_behind_a_url() -> None:
    own, config = load_experiment(SMOKE), of_api(reasoning_effort="low")
    assert [node.name for node in build_graph(config)] == ["prepare_data", "base", "evaluate_base", "report"]
    assert own.evaluation is not None and config.model.endpoint is not None
    assert config.evaluation == own.evaluation.model_copy(update={"engine": "openai"})
    assert (config.model.endpoint.name, config.model.endpoint.request) == ("m", {"reasoning_effort": "low"})
    assert config.execution.server.urls == (URL,)
    served = ["evaluation.engine=openai", "execution.server.urls=[http://two:1]"]
    assert of_api(*served, urls=()).execution.server.urls == ("http://two:1",)


def test_the_name_and_the_request_are_a_results_identity_and_the_place_is_not() -> None:
    def asked(config: ExperimentConfig) -> list[StageSettings]:
        return [node.settings for node in build_graph(config)[:3]]

    elsewhere = ["execution.server.concurrency=2", "execution.server.api_key_variable=OTHER"]
    assert asked(of_api()) == asked(of_api(*elsewhere, urls=("https://b/api", "http://c")))
    assert asked(of_api()) != asked(of_api(model="api:n"))
    assert asked(of_api()) != asked(of_api(reasoning_effort="low"))


def make_package(folder: Path, name: str, *files: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for file in files:
        (folder / name / file).write_bytes(b"GGUF")


def test_a_package_is_located_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "one_model", "weights.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["model={package: one_model, architecture: null}", "base=null", "data.corpus=null"]
    source = load_experiment(SMOKE, overrides).model.source
    assert source == "package:one_model"
    assert locate(source) == str(tmp_path / "one_model" / "weights.Q4_1.gguf")
    assert locate("Qwen/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("no_models", (), "ships 0 .gguf files; give one as model.path"),
        ("two_models", ("a.gguf", "b.gguf"), "ships 2 .gguf files; give one as model.path"),
        ("nowhere_to_be_found", None, "model.package: nowhere_to_be_found is not installed"),
    ],
)
def test_a_package_must_be_there_and_ship_one_file(tmp_path, monkeypatch, name, files, message):
    if files is not None:
        make_package(tmp_path, name, *files)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        locate(f"package:{name}")
