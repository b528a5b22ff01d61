"""Partial rollouts: which step samples which token, which step learns from it, and what a resumed run finds."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from reference.gradient_case import tiny_model
from synthetic.scripted_runs import RecordedRanks, Run, assert_resumes, runner_of, scripted_run, settings_of

from luffy.config.group import GroupConfig
from luffy.errors import CheckpointError
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.tracking.journal import RolloutJournal
from luffy.training.learner import TrainerRank
from luffy.types import SAMPLED, FinishReason, Trajectory

BUDGET, STEPS = 6, 6
PARTIAL = ("rl.max_response_tokens=64", f"rl.partial_rollout_tokens={BUDGET}")
METHODS = {
    **dict.fromkeys(("luffy", "exgrpo", "prefix_rft", "relift", "hpt", "pope", "mfc", "adaback", "g2rpo_a"), ()),
    "on_policy": ("rl.sampling={kind: pools}",),
    "chord": ("objective.group.starts.trace.when={pass_rate_at_most: 0.3}",),
}
"""Every way to compose a group that is allowed with partial rollouts."""
CASES = pytest.mark.parametrize("method", METHODS)
Runs = Callable[[str], Run]


@pytest.fixture(scope="module")
def partial(run: Callable[..., Run]) -> Runs:
    return lambda method: run(method, *PARTIAL, *METHODS[method], steps=STEPS)


def _own(row: Trajectory) -> list[int]:
    """The weight versions of the tokens that the policy sampled for the row."""
    return [version for version, source in zip(row.weight_version, row.source, strict=True) if source in SAMPLED]


@CASES
def test_a_step_adds_its_tokens_to_every_row_and_learns_from_the_groups_that_it_completes(method, partial):
    """From the lengths alone: a row of n tokens that step d began has those of steps d, d + 1, ..., `BUDGET` each."""
    found, spans = partial(method), Counter[int]()
    for step in found.steps:
        for group in step.groups:
            rows = [own for row in (*group.trajectories, *group.replaced) if (own := _own(row))]
            (began,) = {own[0] + 1 for own in rows}
            assert rows == [[began - 1 + place // BUDGET for place in range(len(own))] for own in rows]
            assert step.number == max(began - 1 + math.ceil(len(own) / BUDGET) for own in rows)
            assert group.is_carried == (began < step.number)
            assert all(math.isfinite(row.reward) for row in group.trajectories)
            spans[step.number - began] += 1
        for group in step.left_open:
            for row in group.trajectories:
                assert math.isnan(row.reward) == (row.finish_reason is FinishReason.INTERRUPTED)
                assert not math.isnan(row.reward) or _own(row)[-BUDGET:] == [step.number - 1] * BUDGET
    assert spans[0] and spans[1] and spans[2], "some wait, and for more than one step"
    assert max(spans) <= found.settings.rl.staleness_bound == math.ceil(64 / BUDGET) - 1


@CASES
def test_every_group_that_is_begun_is_completed_once_or_still_open_at_the_end(method: str, partial: Runs) -> None:
    found, begun = partial(method), Counter[str]()
    for step in found.steps:
        fresh = [group.uid for group in (*step.groups, *step.left_open) if not group.is_carried]
        begun.update(fresh)
        assert len(fresh) == found.settings.rl.prompts_per_step
        is_first_epoch = method == "luffy" and step.number <= 4
        assert not is_first_epoch or max(begun.values()) == 1, "an epoch of 48 prompts has each of them once"
    assert begun == Counter(group.uid for group in (*found.groups, *found.steps[-1].left_open))
    seeds = [seed for step in found.steps for seed in step.seeds]
    assert len(set(seeds)) == len(seeds)


@CASES
def test_updates_have_the_rows_of_complete_groups_with_advantages_over_all_of_them(method: str, partial: Runs) -> None:
    for step in partial(method).steps:
        (shards,) = [shards for of, shards in step.sent if of is TrainerRank.learn]
        pairs = [(r, a) for shard in shards for r, a in zip(shard.rows, shard.advantages, strict=True)]
        groups = [group for group in step.groups if group.trajectories]
        assert {row for row, _ in pairs} == {row for group in groups for row in group.trajectories}
        if method == "luffy":  # whose advantage has no scale
            expected = [(r, r.reward - fmean(group.rewards)) for group in groups for r in group.trajectories]
            assert Counter(r for r, _ in pairs) == Counter(r for r, _ in expected)
            assert sorted(a for _, a in pairs) == pytest.approx(sorted(a for _, a in expected))


def test_metrics_count_tokens_in_the_step_that_sampled_them(partial: Runs) -> None:
    for step in partial("luffy").steps:
        metrics, present = step.metrics, step.number - 1
        rows = [row for group in (*step.groups, *step.left_open) for row in group.trajectories]
        assert metrics["rollout/tokens_drawn"] == sum(_own(row).count(present) for row in rows)
        assert metrics["rollout/interrupted_rows"] == sum(math.isnan(row.reward) for row in rows)
        assert metrics["batch/open_groups"] == len(step.left_open)
        ages = [present - version for group in step.groups for row in group.trajectories for version in _own(row)]
        assert metrics["rollout/staleness_mean"] == pytest.approx(fmean(ages))
        assert metrics["rollout/staleness_max"] == max(ages)


@CASES
def test_a_run_resumed_after_any_checkpoint_learns_the_same(method, partial, grader, tmp_path):
    """The step after the checkpoint is in the journal; those after it are sampled again."""
    for last in (1, 3):
        assert_resumes(partial(method), grader, tmp_path / f"from {last}", last, journalled=last + 1)


def test_a_resumed_run_whose_journal_lost_the_open_groups_says_so(partial, grader, tmp_path):
    found = partial("luffy")
    runner, _ = runner_of(found.settings, grader, RolloutJournal(tmp_path), RecordedRanks(2, found.saved))
    with runner, pytest.raises(CheckpointError, match="lost step 2, whose open groups step 3 continues"):
        runner.restore(2)
        runner.run(3)


def test_a_step_in_which_no_group_would_be_complete_goes_on_until_one_is(grader: GraderPool, tmp_path: Path) -> None:
    """Every response has two tokens or more."""
    steps = scripted_run(settings_of("on_policy", "rl.partial_rollout_tokens=1", steps=2), grader, tmp_path).steps
    for step in steps:
        assert step.groups and any(len(_own(row)) > 1 for group in step.groups for row in group.trajectories)
        versions = {version for group in step.groups for row in group.trajectories for version in _own(row)}
        assert versions <= {0, step.number - 1}
    seeds = [seed for step in steps for seed in step.seeds]
    assert len(set(seeds)) == len(seeds)


def test_each_token_has_its_probability_under_the_weights_that_sampled_it(grader: GraderPool) -> None:
    """Two models as two steps of one policy: each scores all the tokens with one float64 pass of its own."""
    models = [tiny_model(seed).eval() for seed in (0, 1)]
    params, group, task = SamplingParams(1.0, 12, (0,)), GroupConfig(size=8), RolloutTask("p", (1, 2, 3), "7", ())
    collector = GroupCollector(grader, lambda ids: "", params, group, seed=3, total_steps=2, step_tokens=5)
    (group,) = collector.collect(TransformersEngine(models[0], 8, 0), [task], 1)
    assert group.is_open
    begun = RolloutTask("p", (1, 2, 3), "7", (), begun=group)
    (after,) = collector.collect(TransformersEngine(models[1], 8, 1), [begun], 2)
    carried = [row for row in after.trajectories if row.weight_version[-1] == 1]
    assert carried and all(row.weight_version[:6] == (0, 0, 0, 0, 0, 1) for row in carried)
    assert all(len(row.response_ids) == 10 or row.response_ids[-1] == 0 for row in carried)
    for row in after.trajectories:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        for version, model in enumerate(models):
            with torch.no_grad():
                logp_TV = torch.log_softmax(model.double()(ids).logits[0, len(row.prompt_ids) - 1 : -1], dim=-1)
            expected = logp_TV.gather(-1, ids[0, len(row.prompt_ids) :, None]).squeeze(-1).tolist()
            for of, recorded, exact in zip(row.weight_version, row.logp_behavior, expected, strict=True):
                assert of != version or recorded == pytest.approx(exact, abs=1e-5)
