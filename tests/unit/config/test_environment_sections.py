"""The section `environment` among the others of an experiment: where it is accepted, and what is refused."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.settings import DifficultySettings, SampleSettings, SynthesizeSettings
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.errors import ConfigError

GAME = Path(__file__).parents[3] / "exp_configs" / "guess_number.yaml"
RANK = "environment.scoring.group_measures={rank: 'synthetic.episode_measures:rank'}"


def test_difficulty_plays_the_episodes_of_the_environment() -> None:
    config = load_experiment(GAME, ["difficulty={}"])
    configure = STAGE_KINDS["difficulty"].configure
    assert configure is not None
    settings = configure(config)
    assert isinstance(settings, DifficultySettings)
    assert settings.environment == config.environment is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([RANK, "chain=sft"], "group_measures.rank: only RL has groups"),
        ([RANK, "objective.group.off_policy_when_accuracy_at_most=0.2"], "changes a group after its episodes are"),
        ([RANK, "grading.kind={kind: measure, name: rank}"], "kind: measure cannot take rank"),
        ([RANK, "environment.scoring.measures={rank: 'synthetic.episode_measures:words'}"], "rank is one of measures"),
    ],
)
def test_a_group_measure_without_its_use_is_refused_at_load(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(GAME, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["difficulty={stop: [ab]}"], "difficulty.stop has no effect with an environment"),
        (["rl.stop=[ab]"], "rl.stop has no effect with an environment"),
        (
            ["chain=expert_iteration", "method=null", "sample.stop=[ab]"],
            "sample.stop has no effect with an environment",
        ),
    ],
)
def test_stop_texts_beside_an_environment_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(GAME, changes)


def test_the_policy_and_teachers_play_the_episodes_of_the_environment() -> None:
    teachers = "synthesize={teachers: {own: {path: org/big, max_response_tokens: 16}}}"
    sampled = load_experiment(GAME, ["chain=expert_iteration", "method=null", "rl=null"])
    for name, config in {"sample": sampled, "synthesize": load_experiment(GAME, [teachers])}.items():
        configure = STAGE_KINDS[name].configure
        assert configure is not None
        settings = configure(config)
        assert isinstance(settings, SampleSettings | SynthesizeSettings)
        assert settings.environment == config.environment is not None


BRANCHING = "environment.limits.history=branching"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=ppo"], "objective.advantage.kind: gae: needs an episode as one sequence"),
        (["method=exgrpo"], "objective.replay: needs an episode as one sequence"),
        (["method=uft"], "objective.group.prefix: needs an episode as one sequence"),
        (["method=gspo"], "loss.kind: sequence_surrogate: needs an episode as one sequence"),
        (["method=srft"], "loss.token_weight: exp_.*: needs an episode as one sequence"),
        (["rl.correction={kind: mask, level: sequence}"], "rl.correction.level: sequence: needs an episode as one"),
    ],
)
def test_what_looks_at_a_whole_episode_is_refused_where_it_may_be_several_sequences(
    changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(GAME, [BRANCHING, *changes])
    load_experiment(GAME, [BRANCHING.replace("branching", "as_sampled"), *changes])
