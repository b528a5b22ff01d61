"""The section `synthesize`: when it makes a stage, who reads it, and what is refused in one line."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
SERVED = "execution.teachers={r1: {urls: ['http://h:1/v1']}}"


def teachers(more: str = "", options: str = "") -> str:
    return f"synthesize={{teachers: {{r1: {{endpoint: {{name: m}}, max_response_tokens: 8{more}}}}}{options}}}"


def nodes(*overrides: str) -> dict[str, dict[str, str]]:
    return {node.name: dict(node.inputs) for node in build_graph(load_experiment(SMOKE, overrides))}


def test_the_section_puts_the_stage_behind_base_and_what_learns_reads_it():
    found = nodes(teachers(), SERVED, "difficulty={policy: sft}")
    assert list(found)[:6] == ["prepare_data", "base", "synthesize", "sft", "difficulty", "rl"]
    assert found["synthesize"] == {"data": "prepare_data"}
    assert (found["sft"]["data"], found["difficulty"]["data"]) == ("synthesize", "synthesize")
    assert nodes(teachers(), SERVED)["rl"]["data"] == "synthesize"
    assert {found[name]["data"] for name in found if name.startswith(("base", "evaluate"))} == {"prepare_data"}
    assert "synthesize" not in nodes()


def test_a_chain_may_end_with_the_data_that_teachers_made():
    assert list(nodes(teachers(), SERVED, "chain=null", "method=null", "stages=[prepare_data, base, synthesize]")) == [
        "prepare_data",
        "base",
        "synthesize",
    ]


def test_sft_examples_are_chosen_once_their_traces_are_there():
    config = load_experiment(SMOKE, [teachers(), SERVED, "data.sft.unique_train_examples=8"])
    settings = {node.name: node.settings for node in build_graph(config)}
    assert settings["prepare_data"].data.sft.unique_train_examples == "all"
    assert settings["synthesize"].data.sft.unique_train_examples == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((teachers(),), r"execution\.teachers\.r1\.urls: missing; say where the teacher r1 is served"),
        ((teachers(), "execution.teachers={r2: {urls: ['http://h:1']}}"), r"r2 is no teacher .* there are: r1"),
        (("execution.teachers={r2: {urls: ['http://h:1']}}",), r"r2 is no teacher .* there are: none"),
        ((teachers(", path: x"), SERVED), r"exactly one of endpoint .* and path"),
        ((teachers(", engine: vllm"), SERVED), r"engine has no effect on a model served by an endpoint"),
        ((teachers(options=", budget: {max_tokens: 0}"), SERVED), r"budget\.max_tokens.*greater than 0"),
        ((teachers(options=", budget: {}"), SERVED), r"budget: sets no limit; give max_tokens or max_cost"),
        ((teachers(options=", budget: {max_cost: 1.0}"), SERVED), r"teachers\.r1\.price is missing"),
        ((teachers(options=", cascade: true"), SERVED), r"cascade has no effect with one teacher"),
        ((teachers(options=", keep: {max_per_prompt: 9}"), SERVED), r"max_per_prompt 9 is above num_samples 4"),
        ((teachers(", temperature: 0.0"), SERVED), r"temperature 0 gives the same answer each time"),
        (("synthesize={teachers: {}}",), r"synthesize\.teachers"),
        (
            (teachers(), SERVED, "data.filters.difficulty=easy"),
            r"data\.filters\.difficulty sorts prompts by",
        ),
        (
            (teachers(), SERVED, "synthesize.prompts=all", "synthesize.rewrite={}", "environment={kind: guess_number}"),
            r"traces are rewritten in single turns",
        ),
        (("stages=[prepare_data, base, synthesize]", "chain=null", "method=null"), r"synthesize: missing"),
    ],
)
def test_what_cannot_be_is_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load_experiment(SMOKE, overrides)
    assert "\n" not in str(refused.value)
