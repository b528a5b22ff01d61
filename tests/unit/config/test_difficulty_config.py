"""The section `difficulty`: when it makes a stage, what it leaves to others, what is refused."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.errors import ConfigError

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
RL = ("chain=rl", "method=luffy")
BY_VLLM = ("difficulty.engine=vllm", "difficulty.temperature=0.005")


def stages(*overrides):
    return load_experiment(SMOKE, overrides).stages


@pytest.mark.parametrize(("chain", "behind"), [((), "sft"), (RL, "rl")])
def test_the_section_alone_puts_the_stage_behind_base(chain, behind):
    assert stages("difficulty.num_samples=4", *chain)[:4] == ("prepare_data", "base", "difficulty", behind)
    assert "difficulty" not in stages(*chain)


def test_a_chain_without_rl_has_no_use_for_it():
    assert "difficulty" not in stages("difficulty={}", "chain=sft")
    assert load_experiment(SMOKE, ["difficulty={}", "chain=sft"]).measured_difficulty is None


@pytest.mark.parametrize(
    ("where", "engine"), [("cluster=local", "transformers"), ("cluster=ray", "vllm"), ("rl.engine=vllm", "vllm")]
)
def test_what_it_does_not_say_is_said_by_rl(where, engine):
    inherited = load_experiment(SMOKE, ["difficulty={}", "rl.temperature=0.7", where])
    found = inherited.measured_difficulty
    assert (found.temperature, found.max_response_tokens, found.engine) == (0.7, 64, engine)


def test_how_checkpoints_are_evaluated_says_nothing_of_it():
    inherited = load_experiment(SMOKE, ["difficulty={}", "evaluation.engine=vllm"])
    assert inherited.measured_difficulty.engine == "transformers"


def test_what_it_says_itself_holds():
    own = {"temperature": 1.2, "max_response_tokens": 32, "engine": "transformers"}
    given = load_experiment(SMOKE, [f"difficulty={own}", "cluster=ray"]).measured_difficulty
    assert {name: getattr(given, name) for name in own} == own


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_range_may_be_one_share(share):
    assert stages("difficulty.num_samples=4", f"difficulty={{min_pass_rate: {share}, max_pass_rate: {share}}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["difficulty={min_pass_rate: 0.8, max_pass_rate: 0.2}"], "min_pass_rate 0.8 is above max_pass_rate 0.2"),
        (
            ["difficulty={num_samples: 4, min_pass_rate: 0.3, max_pass_rate: 0.4}"],
            "no prompt could be kept: no pass rate over 4 responses lies between min_pass_rate 0.3",
        ),
        (["difficulty.max_pass_rate=1.5"], "difficulty.max_pass_rate: "),
        (["difficulty.temperature=0"], "difficulty.temperature: "),
        (["difficulty.policy=sft", *RL], "difficulty.policy: sft needs the stage sft in the chain; use base"),
        (["stages=[prepare_data, base, difficulty, rl]"], "difficulty: missing; stage difficulty needs it"),
        (["stages=[prepare_data, base, difficulty, sft]", "difficulty={}"], "difficulty has no effect without rl"),
        (["difficulty.engine=openai"], "execution.server.urls: missing; difficulty.engine: openai needs"),
        (BY_VLLM, "difficulty.temperature 0.005 is below vLLM's lowest sampling temperature"),
    ],
)
def test_mistakes_are_one_line_that_names_the_field(overrides, message):
    with pytest.raises(ConfigError) as refusal:
        load_experiment(SMOKE, overrides)
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_servers_and_low_temperatures_are_fine_where_they_have_their_use():
    servers = "execution.server.urls=[http://one:8000]"
    assert "difficulty" in stages("difficulty.engine=openai", servers)
    assert "difficulty" in stages("difficulty.temperature=0.005")
