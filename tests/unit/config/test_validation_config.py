"""The sections `sft.validation` and `rl.validation`: what they refuse, what stages are given, what keys they leave."""

import pytest

from luffy.config import load_experiment
from luffy.config.validation import DECODING
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import identifying, identity_of

SMOKE = "exp_configs/smoke.yaml"
DIFFICULTY = ("difficulty={num_samples: 2}",)


def nodes(*overrides):
    return {node.name: node for node in build_graph(load_experiment(SMOKE, list(overrides)))}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["rl.validation={every: 2}"], "give exactly one of source: validation and suites"),
        (["rl.validation={every: 2, suites: [longr]}"], "no suite is called longr; did you mean 'longer'?"),
        (
            ["sft.validation={every: 2, source: validation}"],
            "sft.validation.source: validation is empty",
        ),
        (["rl.validation={every: 7, suites: [longer]}"], "rl.validation.every 7 is above the stage's 6 steps"),
        (["rl.validation={every: 1, suites: [longer, longer]}"], "suites: give each name once"),
        (["rl.validation={every: 1, suites: [longer], patience: 2}"], "patience needs keep_best"),
        (
            ["rl.validation={every: 1, suites: [longer], keep_best: {metric: loss}}"],
            "metric: loss is not measured",
        ),
        (
            ["rl.validation={every: 1, suites: [longer], decoding: {temperature: 0.0, num_samples: 2}}"],
            "num_samples: 1",
        ),
        (
            ["rl.validation={every: 1, suites: [longer], decoding: {temperature: 0.001}}", "rl.engine=vllm"],
            "rl.validation.decoding.temperature 0.001 is below vLLM's lowest",
        ),
        (
            ["sft.validation={every: 1, suites: [longer]}", "evaluation=null", "stages=[prepare_data, base, sft]"],
            "sft.validation.max_response_tokens: missing",
        ),
        (
            [
                "sft.validation={every: 1, suites: [longer]}",
                "cluster=ray",
                "execution={zero_stage: 3, ray: {trainer_ranks: 2}}",
            ],
            "ranks that share their weights",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_at_load(overrides, line):
    with pytest.raises(ConfigError) as refused:
        nodes(*overrides)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_the_section_settings_are_what_they_were():
    for name in ("sft", "rl"):
        node = nodes()[name]
        assert "validation" not in identifying(node.settings)
        assert "validation" not in identifying(node.settings)[name]
        assert "held_out" not in node.inputs
    assert "validation" not in load_experiment(SMOKE, []).model_dump(mode="json")["rl"]


def test_the_validation_is_part_of_the_settings_once():
    node = nodes("rl.validation={every: 2, suites: [longer]}")["rl"]
    settings = identifying(node.settings)
    assert settings["validation"]["schedule"]["every"] == 2
    assert "validation" not in settings["rl"]
    again = type(node.settings).model_validate_json(node.settings.model_dump_json())
    assert again == node.settings


def test_suites_are_asked_and_graded_as_in_the_evaluation_under_a_decoding_of_their_own():
    own = "evaluation.suites.longer={num_samples: 3, grader: {kind: exact}}"
    section = "sft.validation={every: 2, suites: [longer], decoding: {temperature: 0.5, num_samples: 2}}"
    held_out = nodes(own, section)["sft"].settings.validation
    protocol = held_out.protocol.protocol("longer", DECODING)
    assert (protocol.temperature, protocol.num_samples, protocol.grader.kind) == (0.5, 2, "exact")
    assert held_out.protocol.max_response_tokens == 32
    assert held_out.protocol.own_graders


def test_problems_come_from_prepared_data_even_where_difficulty_selects_the_prompts():
    found = nodes("rl.validation={every: 2, suites: [longer]}", *DIFFICULTY)["rl"].inputs
    assert found == {"data": "difficulty", "model": "sft", "held_out": "prepare_data"}


@pytest.mark.parametrize(
    ("section", "extendable"),
    [
        ("{every: 2, suites: [longer]}", True),
        ("{every: 4, suites: [longer]}", False),  # step 6 is measured because it is the last
        ("{every: 2, suites: [longer], keep_best: {}}", False),
    ],
)
def test_a_longer_run_continues_a_shorter_one_where_both_would_measure_the_same(section, extendable):
    constant = ("chain=rl", "method=on_policy", "rl.optimizer={lr: 1e-3}")
    settings = nodes(f"rl.validation={section}", *constant)["rl"].settings
    assert identity_of("rl", settings, {}, {}, {}).extendable == extendable
