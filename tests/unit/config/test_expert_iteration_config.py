"""The sections `sample` and `expert_iteration`: what they leave to others, and what is refused at load time."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.errors import ConfigError

EXPERIMENTS = Path(__file__).parents[3] / "exp_configs"
SMOKE = EXPERIMENTS / "smoke.yaml"


def loaded(*overrides):
    return load_experiment(SMOKE, ["chain=expert_iteration", *overrides])


def test_what_the_section_does_not_say_others_do():
    assert loaded().sampled_traces.max_response_tokens == 64  # data.max_trace_tokens
    assert loaded().sampled_traces.engine == "transformers"
    assert loaded("cluster=ray").sampled_traces.engine == "vllm"
    assert load_experiment(SMOKE, ["sample={}"]).sampled_traces is None


def test_the_shipped_experiment_has_three_rounds_on_traces_of_its_own():
    config = load_experiment(EXPERIMENTS / "expert_iteration.yaml")
    assert (config.expert_iteration.rounds, config.sft.num_traces) == (3, None)
    assert config.stages == ("prepare_data", "base", "sample", "sft", "evaluate", "report")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["sample=null"], "sample: missing; stage sample needs it"),
        (["expert_iteration.rounds=0"], "expert_iteration.rounds"),
        (["expert_iteration.rounds=1", "expert_iteration.start_from=previous"], "start_from: previous has no effect"),
        (["stages=[prepare_data, base, sample, evaluate, report]"], "rounds 3 has no effect without the stage sft"),
        (["sample.engine=openai"], "execution.server.urls: missing; sample.engine: openai"),
        (["sample.engine=vllm", "sample.temperature=0.005"], "sample.temperature 0.005 is below vLLM's lowest"),
        (["execution.vllm.engines=2"], "difficulty.engine or sample.engine: vllm"),
        (["stages=[prepare_data, base, sft, sample, evaluate, report]"], "must be in the order"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides, line):
    with pytest.raises(ConfigError, match=line):
        loaded(*overrides)


def test_several_engines_sample():
    assert loaded("sample.engine=vllm", "execution.vllm.engines=2").sampled_traces.engine == "vllm"
