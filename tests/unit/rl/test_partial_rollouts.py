"""Partial rollouts: which step samples which token, which step learns from it, and what a resumed run finds."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import torch
from reference.gradient_case import tiny_model
from support.patience import PATIENCE_S
from test_composition import RecordedRanks, Sent, runner_of, settings_of

from luffy.config.group import GroupConfig
from luffy.config.settings import RLSettings
from luffy.errors import CheckpointError
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.tracking.journal import RolloutJournal
from luffy.training.learner import TrainerRank
from luffy.types import SAMPLED, FinishReason, Group, Trajectory

BUDGET, STEPS = 6, 6
PARTIAL = ("rl.max_response_tokens=64", f"rl.partial_rollout_tokens={BUDGET}")
METHODS = {
    "luffy": (),
    "on_policy": ("rl.sampling={kind: pools}",),
    "exgrpo": (),
    "prefix_rft": (),
    "relift": (),
    "hpt": (),
    "chord": ("objective.group.guidance={pass_rate_at_most: 0.3}",),
}
"""Every way to compose a group that is allowed with partial rollouts."""


@dataclass(frozen=True)
class PartialRun:
    settings: RLSettings
    folder: Path
    journal: RolloutJournal
    metrics: list[dict[str, float]]
    sent: Sent
    saved: list[Mapping[str, object]]
    """The state in the checkpoint of each step."""
    seeds: list[int]
    """Of all requests."""

    def closed(self, step: int) -> list[Group]:
        return self.journal.read(step) or []

    def left_open(self, step: int) -> list[Group]:
        return self.journal.read_open(step) or []


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def run(grader: GraderPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PartialRun]:
    @cache
    def run(method: str) -> PartialRun:
        settings, folder = settings_of(method, *PARTIAL, *METHODS[method], steps=STEPS), tmp_path_factory.mktemp("run")
        ranks, journal = RecordedRanks(Sent(), 2), RolloutJournal(folder)
        runner, engine = runner_of(settings, grader, journal, ranks)
        metrics = []
        with runner:
            for step in range(1, STEPS + 1):
                metrics.append(runner.run(step).metrics)
                runner.save(step)
        return PartialRun(settings, folder, journal, metrics, ranks.sent, ranks.saved, engine.seeds)

    return run


CASES = pytest.mark.parametrize("method", METHODS)


def _own(row: Trajectory) -> list[int]:
    """The weight versions of the tokens that the policy sampled for the row."""
    return [version for version, source in zip(row.weight_version, row.source, strict=True) if source in SAMPLED]


@CASES
def test_a_step_adds_its_tokens_to_every_row_and_learns_from_the_groups_that_it_completes(method, run):
    """From the lengths alone: a row of n tokens that step d began has those of steps d, d + 1, ..., `BUDGET` each."""
    found, spans = run(method), Counter[int]()
    for step in range(1, STEPS + 1):
        for group in found.closed(step):
            rows = [own for row in (*group.trajectories, *group.replaced) if (own := _own(row))]
            (began,) = {own[0] + 1 for own in rows}
            assert rows == [[began - 1 + place // BUDGET for place in range(len(own))] for own in rows]
            assert step == max(began - 1 + math.ceil(len(own) / BUDGET) for own in rows)
            assert group.is_carried == (began < step)
            assert all(math.isfinite(row.reward) for row in group.trajectories)
            spans[step - began] += 1
        for group in found.left_open(step):
            for row in group.trajectories:
                assert math.isnan(row.reward) == (row.finish_reason is FinishReason.INTERRUPTED)
                assert not math.isnan(row.reward) or _own(row)[-BUDGET:] == [step - 1] * BUDGET
    assert spans[0] and spans[1] and spans[2], "some wait, and for more than one step"
    assert max(spans) <= found.settings.rl.staleness_bound == math.ceil(64 / BUDGET) - 1


@CASES
def test_every_group_that_is_begun_is_completed_once_or_still_open_at_the_end(method, run):
    found = run(method)
    steps = range(1, STEPS + 1)
    begun = Counter[str]()
    for step in steps:
        fresh = [group.uid for group in (*found.closed(step), *found.left_open(step)) if not group.is_carried]
        begun.update(fresh)
        assert len(fresh) == found.settings.rl.prompts_per_step
        assert step > 4 or method != "luffy" or max(begun.values()) == 1, "an epoch of 48 prompts has each of them once"
    ended = Counter(group.uid for step in steps for group in found.closed(step))
    assert begun == ended + Counter(group.uid for group in found.left_open(STEPS))
    assert len(set(found.seeds)) == len(found.seeds)


@CASES
def test_updates_have_the_rows_of_complete_groups_with_advantages_over_all_of_them(method, run):
    found = run(method)
    learned = [shards for of, shards in found.sent if of is TrainerRank.learn]
    assert len(learned) == STEPS
    for step, shards in enumerate(learned, start=1):
        pairs = [(r, a) for shard in shards for r, a in zip(shard.rows, shard.advantages, strict=True)]
        groups = [group for group in found.closed(step) if group.trajectories]
        assert {row for row, _ in pairs} == {row for group in groups for row in group.trajectories}
        if method == "luffy":  # whose advantage has no scale
            expected = [(r, r.reward - fmean(group.rewards)) for group in groups for r in group.trajectories]
            assert Counter(r for r, _ in pairs) == Counter(r for r, _ in expected)
            assert sorted(a for _, a in pairs) == pytest.approx(sorted(a for _, a in expected))


def test_metrics_count_tokens_in_the_step_that_sampled_them(run):
    found = run("luffy")
    for step, metrics in enumerate(found.metrics, start=1):
        closed, left_open = found.closed(step), found.left_open(step)
        rows = [row for group in (*closed, *left_open) for row in group.trajectories]
        assert metrics["rollout/tokens_drawn"] == sum(_own(row).count(step - 1) for row in rows)
        assert metrics["rollout/interrupted_rows"] == sum(math.isnan(row.reward) for row in rows)
        assert metrics["batch/open_groups"] == len(left_open)
        ages = [step - 1 - version for group in closed for row in group.trajectories for version in _own(row)]
        assert metrics["rollout/staleness_mean"] == pytest.approx(fmean(ages))
        assert metrics["rollout/staleness_max"] == max(ages)


@CASES
@pytest.mark.parametrize("last", [1, 3])
def test_a_run_resumed_after_any_checkpoint_learns_the_same(method, last, run, grader, tmp_path):
    """The step after the checkpoint is in the journal; those after it are sampled again."""
    found = run(method)
    for step in range(1, last + 2):
        for file in found.folder.glob(f"*_{step:06d}.parquet"):
            shutil.copy(file, tmp_path)
    (tmp_path / f"open_{last + 2:06d}.parquet").write_bytes(b"of an attempt that was killed")
    ranks, journal = RecordedRanks(Sent(), 2, [*found.saved[:last]]), RolloutJournal(tmp_path)
    runner, _ = runner_of(found.settings, grader, journal, ranks)
    with runner:
        runner.restore(last)
        for step in range(last + 1, STEPS + 1):
            runner.run(step)
            runner.save(step)
    assert ranks.saved == found.saved
    assert repr(ranks.sent) == repr(found.sent[-len(ranks.sent) :])
    for step in range(1, STEPS + 1):
        assert repr((journal.read(step), journal.read_open(step))) == repr((found.closed(step), found.left_open(step)))


def test_a_resumed_run_whose_journal_lost_the_open_groups_says_so(run, grader, tmp_path):
    found = run("luffy")
    ranks = RecordedRanks(Sent(), 2, found.saved)
    runner, _ = runner_of(found.settings, grader, RolloutJournal(tmp_path), ranks)
    with runner, pytest.raises(CheckpointError, match="lost step 2, whose open groups step 3 continues"):
        runner.restore(2)
        runner.run(3)


def test_a_step_in_which_no_group_would_be_complete_goes_on_until_one_is(grader, tmp_path):
    """Every response has two tokens or more."""
    settings = settings_of("on_policy", "rl.partial_rollout_tokens=1", steps=2)
    journal, ranks = RolloutJournal(tmp_path), RecordedRanks(Sent(), 2)
    runner, engine = runner_of(settings, grader, journal, ranks)
    with runner:
        for step in (1, 2):
            runner.run(step)
            closed = journal.read(step) or []
            assert closed and any(len(_own(row)) > 1 for group in closed for row in group.trajectories)
            assert {version for g in closed for row in g.trajectories for version in _own(row)} <= {0, step - 1}
    assert len(set(engine.seeds)) == len(engine.seeds)


def test_each_token_has_its_probability_under_the_weights_that_sampled_it(grader):
    """Two models as two steps of one policy: each scores all the tokens with one float64 pass of its own."""
    models = [tiny_model(seed).eval() for seed in (0, 1)]
    params = SamplingParams(1.0, 12, (0,))
    collector = GroupCollector(
        grader, lambda ids: "", params, GroupConfig(size=8, off_policy=0), seed=3, total_steps=2, step_tokens=5
    )
    task = RolloutTask("p", (1, 2, 3), "7", ())
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
