"""The rollouts of an RL step that are written down for people."""

from collections.abc import Sequence
from dataclasses import replace

from synthetic.trajectories import row_of

from luffy.config.group import GlobalBatchAdvantage, GroupMeanAdvantage
from luffy.rl.groups import sample_rollouts
from luffy.training.batching import row_advantages
from luffy.types import FinishReason, Group, Hint, Source

MEAN = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)


REFERENCES = {"a": "5", "b": "6", "c": "7", "secret": None}


def group(uid: str) -> Group:
    return Group(uid, (row_of(1.0),) * 2)


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def test_a_row_of_each_group_and_none_of_a_confidential_prompt() -> None:
    samples = sample_rollouts(list(map(group, ("a", "secret", "b", "c"))), MEAN, 2, spelled, spelled, REFERENCES)
    assert [(each.uid, each.prompt, each.response) for each in samples] == [("a", "1", "2"), ("b", "1", "2")]
    assert [each.reference for each in samples] == ["5", "6"]


def test_an_advantage_over_the_batch_counts_confidential_prompts_too() -> None:
    right, _ = group("a").trajectories
    groups = [Group("a", (right, right)), Group("secret", (replace(right, reward=0.0),) * 2)]
    advantage = GlobalBatchAdvantage(kind="global_batch", population="joint", group_baseline=False)
    (shown,) = sample_rollouts(groups, advantage, 2, spelled, spelled, REFERENCES)
    assert shown.advantage == row_advantages(groups, advantage)[0] > 0


def test_a_group_whose_rows_all_failed_shows_one_of_them() -> None:
    failed = replace(group("a").trajectories[0], reward=0.0, finish_reason=FinishReason.ENVIRONMENT_ERROR)
    samples = sample_rollouts([Group("a", (), failed=(failed,))], MEAN, 1, spelled, spelled, {})
    assert [(sample.uid, sample.advantage) for sample in samples] == [("a", None)]


def test_a_sample_says_which_hint_it_was_sampled_with() -> None:
    (bare, other) = group("a").trajectories
    hinted = replace(bare, source=(Source.HINTED,), hint=Hint(2, "first step"))
    (sample,) = sample_rollouts([Group("a", (other, hinted))], MEAN, 1, spelled, spelled, {})
    assert (sample.hint_level, sample.hint, sample.source) == (2, "first step", "off_policy")
