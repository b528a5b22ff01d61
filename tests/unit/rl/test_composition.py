"""What every method's updates are made of: each preset from the plan of a step to the rows of each rank.

    PYTHONPATH=tests python tests/unit/rl/test_composition.py

replaces the committed digests. Whoever changes them on purpose says so in the changelog.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from reference.taught_presets import SUPERVISED
from synthetic.scripted_runs import (
    CUTS,
    HAS_TRACE,
    HINTED_LOGP,
    PROMPTS,
    RANKS,
    RIGHT,
    STEPS,
    STOP,
    UPDATES,
    WRONG,
    Run,
    assert_resumes,
    learned,
    scripted_run,
    settings_of,
)
from synthetic.trajectories import hinted_rows

from luffy.config import available_presets
from luffy.config.group import DynamicSampling
from luffy.config.starts import Critique, TraceHint, TracePrefix, WholeTrace
from luffy.grading.pool import GraderPool
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.training.batching import Shard, has_demonstration, has_hinted_row, has_prefix_row, row_advantages
from luffy.types import ANSWER_PROBABILITY, SAMPLED, Group, Message, Outcome, Source, Start, Trajectory

METHODS = [name for name in available_presets("methods") if name not in SUPERVISED]
"""Every preset with an RL step; the others learn from traces alone."""
CASES = pytest.mark.parametrize("method", METHODS)
KINDS: dict[str, Callable[[Group], bool]] = {
    "replayed": lambda group: group.is_replayed,
    "prefixed": has_prefix_row,
    "hinted": has_hinted_row,
    "demonstrated": has_demonstration,
}
Runs = Callable[..., Run]


def _fails(group: Group) -> bool:
    return not any(row.is_correct for row in group.rollouts)


def _bare_prompt(group: Group) -> tuple[int, ...]:
    return (10 + int(group.uid[1:]),)


def _is_sampled(row: Trajectory) -> bool:
    return not SAMPLED.isdisjoint(row.source)


@CASES
def test_updates_have_groups_of_each_kind_alike_and_a_sampled_token(method: str, run: Runs) -> None:
    for step, num_updates in itertools.product(run(method).steps, UPDATES):
        assert all(any(map(_is_sampled, group.trajectories)) for group in step.groups)
        updates = step.updates(num_updates, 1)
        assert len(updates) == min(num_updates, len(step.kept))
        assert all(any(_is_sampled(row.trajectory) for row in rows) for rows in updates)
        for is_kind in (lambda group: True, *KINDS.values()):
            counts = [sum(is_kind(step.kept[group]) for group in {row.group for row in rows}) for rows in updates]
            assert max(counts) - min(counts) <= 1


@CASES
def test_every_row_is_in_one_update_and_the_same_one_on_any_number_of_ranks(method, run):
    for step, num_updates in itertools.product(run(method).steps, UPDATES):
        alone, shared = (step.updates(num_updates, num_ranks) for num_ranks in RANKS)
        rows = [row for group in step.kept for row in group.learned]
        assert Counter(row.trajectory for update in alone for row in update) == Counter(rows)
        assert list(map(Counter, alone)) == list(map(Counter, shared))
        assert all(rows for shard in step.shards[num_updates, 2] for rows in shard.updates), "ranks must keep step"


@CASES
def test_no_two_responses_of_a_run_have_the_same_seed(method: str, run: Runs) -> None:
    seeds = [seed for step in run(method).steps for seed in step.seeds]
    assert len(set(seeds)) == len(seeds) >= PROMPTS * STEPS


@CASES
def test_a_run_resumed_after_any_step_samples_and_learns_the_same(method, run, grader, tmp_path):
    """Of the step after the checkpoint the journal has nothing yet, or all of it."""
    for last, journalled in ((1, 2), (2, 2), (3, 3)):
        assert_resumes(run(method), grader, tmp_path / f"from {last}", last, journalled)


@CASES
def test_the_steps_above_have_what_makes_their_method(method: str, run: Runs) -> None:
    """Else nothing would be tested: replay that has begun, hints, demonstrations, rounds, failed prompts."""
    found = run(method)
    objective = found.settings.objective
    group = objective.group
    expected = {
        "replayed": objective.replay is not None,
        "prefixed": bool(group.shows(TracePrefix)),
        "hinted": bool(group.shows(TraceHint, Critique)),
        "demonstrated": bool(group.shows(WholeTrace)),
    }
    assert {kind: any(map(is_kind, found.groups)) for kind, is_kind in KINDS.items()} == expected
    if objective.replay is not None:
        assert sum(group.is_replayed for group in found.steps[-1].groups) == objective.replay.share * PROMPTS
    if isinstance(group.filter, DynamicSampling):
        assert any(len(step.groups) > PROMPTS for step in found.steps)
    assert bool(found.sft_steps) == (objective.interleaved_sft is not None)
    assert all(rows for shards in found.sft_steps for shard in shards for rows in shard.updates)


@pytest.mark.parametrize("method", ["luffy", "dapo", "exgrpo", "prefix_rft", "relift", "guide", "bread"])
@pytest.mark.parametrize("failing", [0.2, 0.9])
def test_rows_whose_environment_failed_are_in_no_update_and_in_no_baseline(method, failing, grader, tmp_path):
    found = scripted_run(settings_of(method), grader, tmp_path, failing)
    config, lost = found.settings.objective.advantage, 0
    for step, num_updates in itertools.product(found.steps, UPDATES):
        assert all(len(g.trajectories) + len(g.failed) >= found.settings.objective.group.size for g in step.groups)
        rows = [row for update in step.updates(num_updates, 2) for row in update]
        assert Counter(row.trajectory for row in rows) == Counter(r for g in step.kept for r in g.trajectories)
        assert not any(row.trajectory.has_failed for row in rows)
        for index, group in enumerate(step.kept):
            assert group.rollouts or not group.failed_rollouts, "nothing is known of the prompt"
            alone = row_advantages([Group(group.uid, group.trajectories)], config).tolist()
            advantages = Counter((row.trajectory, row.advantage) for row in rows if row.group == index)
            assert advantages == Counter(zip(group.trajectories, alone, strict=True))
        assert all(row.has_failed for group in step.groups for row in group.failed)
        lost += sum(not group.is_learnable for group in step.groups)
    assert any(group.failed for step in found.steps for group in step.kept)
    assert lost or failing < 0.5


@pytest.mark.parametrize("method", ["exgrpo", "prefix_rft", "relift"])
def test_every_pass_learns_the_same_updates_on_the_same_ranks(method: str, run: Runs) -> None:
    found = run(method)
    rl = found.settings.rl.model_copy(update={"passes": 3})
    settings = found.settings.model_copy(update={"rl": rl})
    for step, case in itertools.product(found.steps, CUTS):
        for one, thrice in zip(step.shards[case], learned(settings, step.kept, step.number, *case), strict=True):
            assert dataclasses.replace(thrice, updates=one.updates) == one, "no row is sent twice"
            count = len(one.updates)
            each = [thrice.updates[start : start + count] for start in range(0, 3 * count, count)]
            assert [Counter(taken) for taken in each] == [Counter(one.updates)] * 3
            assert len(thrice.updates) == 3 * count


def test_another_seed_and_another_step_deal_otherwise(run: Runs) -> None:
    settings, step = run("exgrpo").settings, run("exgrpo").steps[-1]
    other = settings.model_copy(update={"seed": settings.seed + 1})
    assert learned(settings, step.kept, STEPS, 2, 1) == step.shards[2, 1]
    assert learned(settings, step.kept, STEPS + 1, 2, 1) != step.shards[2, 1]
    assert learned(other, step.kept, STEPS, 2, 1) != step.shards[2, 1]


def test_the_speed_of_training_counts_the_rows_trained_on(run: Runs) -> None:
    """Of a step with dynamic sampling, which drops groups."""
    for step in run("dapo").steps:
        seconds = step.metrics["perf/step_s"] - step.metrics["perf/trainer_idle_s"]
        trained, sampled = (
            sum(row.num_tokens for group in groups for row in group.trajectories) for groups in (step.kept, step.groups)
        )
        assert step.metrics["perf/train_tokens_per_s"] * seconds == pytest.approx(trained)
        assert step.metrics["perf/tokens_per_s"] * step.metrics["perf/step_s"] == pytest.approx(sampled)
        assert trained < sampled


# ---- what single methods do ----


def _replayed(found: Run) -> Iterator[tuple[Trajectory, list[Trajectory]]]:
    """Each replayed row, with the successes of its prompt in earlier steps, the oldest first."""
    for number, step in enumerate(found.steps):
        for group in filter(KINDS["replayed"], step.groups):
            before = [same for earlier in found.steps[:number] for same in earlier.groups if same.uid == group.uid]
            (row,) = [row for row in group.trajectories if Source.REPLAY in row.source]
            yield row, [success for same in before for success in same.rollouts if success.is_correct]


def test_exgrpo_replays_the_success_of_lowest_entropy(run: Runs) -> None:
    found = [[len(each.response_ids) for each in (row, *successes)] for row, successes in _replayed(run("exgrpo"))]
    assert all(length == min(lengths) for length, *lengths in found)
    assert any(len({*lengths}) > 1 for _, *lengths in found)


def test_exgrpo_replays_the_latest_success_where_that_is_asked_for(run: Runs) -> None:
    found = [
        [(each.response_ids, each.weight_version) for each in (row, *successes)]
        for row, successes in _replayed(run("exgrpo", "objective.replay.choose=latest"))
    ]
    assert all(row == successes[-1] for row, *successes in found)
    assert any(row not in successes[:-1] for row, *successes in found if len(successes) > 1)


def test_traces_may_be_for_prompts_on_which_earlier_steps_failed(run: Runs) -> None:
    """Twelve steps are three epochs: every prompt is judged by the one or two groups that it had before."""
    most = 2 / 7
    found = run("luffy", f"objective.group.starts.trace.when={{pass_rate_at_most: {most}, memory: 0.5}}", steps=12)
    rates: dict[str, float] = {}
    seen = Counter()
    for step in found.steps:
        for group in step.groups:
            guided = HAS_TRACE[group.uid] and rates.get(group.uid, 0.0) <= most
            assert has_demonstration(group) == guided
            assert len(group.trajectories) == found.settings.objective.group.size, "others are rolled out in full"
            seen[guided, group.uid in rates] += 1
            seen["at the bound"] += rates.get(group.uid) == most
        for group in step.groups:
            before = rates.get(group.uid, group.accuracy)
            rates[group.uid] = 0.5 * before + 0.5 * group.accuracy
    assert seen[True, True] and seen[False, True] and seen["at the bound"]


def _right(rows: list[Trajectory]) -> list[Trajectory]:
    return [row for row in rows if row.is_correct]


SECOND_ROUNDS = {  # rows under another prompt; those that stay, or each of several possibilities; the start of all
    "guide": (8, lambda rows: [rows], Start("hint", 0.5, "step 1\nstep 2")),
    "scaf_grpo": (4, lambda rows: [_right(rows)[:1]], None),
    "lte": (8, lambda rows: [_right(rows)], Start("critique", shown="Wrong answers: 8.")),
    "critique_grpo": (8, lambda rows: [[row] for row in _right(rows) or rows], None),
}


@pytest.mark.parametrize(("method", "num_rows", "keeps", "start"), [(key, *of) for key, of in SECOND_ROUNDS.items()])
def test_rows_of_a_second_round_take_the_places_of_rollouts(method, num_rows, keeps, start, run):
    numbers, shows_trace = Counter[int](), method in ("guide", "scaf_grpo")
    for group in run(method).groups:
        is_due = method == "critique_grpo" or (_fails(group) and (HAS_TRACE[group.uid] or not shows_trace))
        hinted = sorted(hinted_rows(group), key=lambda row: row.start.dose or 0.0)
        assert len(hinted) == (num_rows if is_due else 0)
        assert len(group.trajectories) == len(group.rollouts) == 8
        staying = [row for row in group.trajectories if row.is_hinted]
        assert not is_due or staying in keeps(hinted)
        for row in staying:
            is_bare = method != "scaf_grpo"
            assert (row.prompt_ids == _bare_prompt(group)) == is_bare
            assert {*row.source} == {Source.HINTED if is_bare else Source.ON_POLICY}
            assert {*row.logp_behavior} == {HINTED_LOGP}, "the ratio's denominator is the hinted probability"
            assert start is None or row.start == start
            assert group.trajectories[-len(staying) :] == tuple(staying)
        numbers[len(_right(staying))] += is_due
    assert any(count for num_right, count in numbers.items() if num_right)
    assert method != "lte" or len(numbers) > 2, "groups with several numbers of right rows"


def test_hdpo_learns_beside_a_group_that_fails_from_right_rows_that_saw_the_answer(run: Runs) -> None:
    """GRPO sees eight rollouts, whatever the policy does with the answer."""
    found, numbers = run("hdpo"), Counter[int]()
    for group in found.groups:
        assert len(group.trajectories) == len(group.rollouts) == 8 and not group.replaced
        assert len(group.beside) == (8 if _fails(group) else 0)
        assert {row.start for row in group.beside} <= {Start("answer", shown="Answer: 7.")}
        assert group.learned == (*group.trajectories, *_right([*group.beside]))
        for row in group.beside:
            assert row.prompt_ids == _bare_prompt(group) and {*row.source} == {Source.HINTED}
            assert {*row.logp_behavior} == {HINTED_LOGP}
        numbers[len(group.learned) - 8] += _fails(group)
    assert len(numbers) > 2, "groups with several numbers of right rows"
    for step in found.steps:
        own = [row for group in step.groups for row in group.rollouts]
        assert step.metrics["batch/zero_variance_share"] >= fmean(map(_fails, step.groups)) > 0
        assert step.metrics["rollout/num_drawn"] == len(own) == 8 * PROMPTS
        assert step.metrics["reward/mean"] == fmean(row.reward for row in own)
        assert step.metrics["batch/num_rows"] == sum(len(group.learned) for group in step.groups)
        learned = [row for update in step.updates(1, 2) for row in update]
        assert not any(row.advantage or row.accuracy for row in learned if row.trajectory.is_hinted)


def test_a_refinement_is_compared_with_the_seven_rollouts_that_stay(run: Runs) -> None:
    for step in run("critique_grpo").steps:
        for row in (row for update in step.updates(1, 2) for row in update):
            rewards = step.kept[row.group].rewards
            assert row.advantage == pytest.approx(row.trajectory.reward - sum(rewards) / 8)


def test_hinted_groups_of_pope_have_the_level_of_their_prompt_and_are_learned_with_it_beside_bare_ones(run) -> None:
    found = run("pope", steps=12)
    levels, bare, hinted = dict[str, int](), 0, 0
    for step in found.steps:
        known = dict(levels)
        for group in step.groups:
            assert len(group.trajectories) == 8 and not group.replaced
            if not hinted_rows(group):
                assert len(group.rollouts) == 8
                bare += HAS_TRACE[group.uid]
                continue
            hinted += 1
            assert HAS_TRACE[group.uid] and len(hinted_rows(group)) == 8 and not group.rollouts
            start = Start("hint", known.get(group.uid, 1) / 16, "step 1")
            for row in hinted_rows(group):
                assert row.start == start and len(row.prompt_ids) > 1, "learned with the hint in its prompt"
                assert set(row.logp_behavior) == {HINTED_LOGP} and not row.is_off_policy
            levels[group.uid] = min(known.get(group.uid, 1) + (not _right(hinted_rows(group))), 4)
        share = fmean(bool(hinted_rows(group)) for group in step.groups)
        assert step.metrics["batch/share_hint"] == pytest.approx(share)
    assert 0.3 < hinted / (hinted + bare) < 0.7 and max(levels.values()) > 1
    settled = {uid: {"level": level} for uid, level in levels.items()}
    assert found.saved[-1]["dose of hint"] == {"settled": settled, "recent": {}}


def _four_traces(number: int) -> RolloutTask:
    """A prompt with four traces, of which one is wrong; every fourth prompt is never solved."""
    traces = [(*[20] * count, WRONG if count == 2 else RIGHT, STOP) for count in range(4)]
    texts = [r"\boxed{8}" if WRONG in ids else r"\boxed{7}" for ids in traces]
    demonstrations = tuple(Demonstration(text, ids, None) for text, ids in zip(texts, traces, strict=True))
    return RolloutTask(f"p{number}", (10 + number,), "7", demonstrations, messages=(Message("user", str(number)),))


def test_ampo_learns_from_the_trace_that_the_trainer_scores_highest(grader: GraderPool, tmp_path: Path) -> None:
    """The ranks score a text of n tokens as n, so that is the longest right trace."""
    settings = settings_of("ampo", "objective.group.starts.trace.rows=1")
    found = scripted_run(settings, grader, tmp_path, tasks=[_four_traces(number) for number in range(48)])
    for step in found.steps:
        assert step.metrics["batch/share_trace"] == step.metrics["batch/choice_share"] > 0
        chosen, other = (step.metrics[f"batch/{kind}_answer_probability"] for kind in ("chosen", "other"))
        assert chosen == 4 > other
    kinds = Counter[bool]()
    for group in found.groups:
        traces = [row for row in (*group.trajectories, *group.replaced) if row.is_off_policy]
        assert len(group.trajectories) == len(group.rollouts) == 8
        kinds[_fails(group)] += 1
        if not _fails(group):
            assert not traces and not group.replaced, "one success is enough: the group is as it was sampled"
            continue
        assert group.trajectories[-1].response_ids == (20, 20, 20, RIGHT, STOP)
        assert sorted(len(row.response_ids) for row in traces) == [2, 3, 5], "the wrong trace is no candidate"
        assert {row.outcome for row in traces} == {Outcome.CORRECT}
        assert [row.measures[ANSWER_PROBABILITY] for row in traces] == [len(row.response_ids) - 1 for row in traces]
    assert kinds[True] and kinds[False]


# ---- requests, groups and rows as they are committed, so that code may move around them ----

COMMITTED = Path(__file__).with_name("composition_digests.json")


def digests(run: Run) -> Mapping[str, str]:
    """What the engine was asked, what became of it, and what each rank learned, over all steps of a run."""
    asked = [
        [[each.prompt_ids, each.seed, each.prefix_ids, each.max_new_tokens] for each in call]
        for step in run.steps
        for call in step.requests
    ]
    kinds = [((*group.trajectories, *group.beside), group.replaced, group.failed) for group in run.groups]
    groups = [[group.uid, *map(_rows, of_group)] for group, of_group in zip(run.groups, kinds, strict=True)]
    shards = [_shard(shard) for step in run.steps for case in CUTS for shard in step.shards[case]]
    shards += [_shard(shard) for step in run.sft_steps for shard in step]
    return {"requests": _digest(asked), "groups": _digest(groups), "rows of ranks": _digest(shards)}


def _rows(rows: Sequence[Trajectory]) -> list[list[object]]:
    return [_row(row) for row in rows]


def _row(row: Trajectory) -> list[object]:
    logp = [None if math.isnan(value) else value for value in row.logp_behavior]
    tokens = [row.prompt_ids, row.response_ids, [int(source) for source in row.source], logp, row.weight_version]
    shown = None if row.start is None else row.start.shown
    return [*tokens, row.reward, row.outcome, row.finish_reason, dict(row.measures), shown]


def _shard(shard: Shard) -> list[object]:
    advantages, accuracies = ([round(value, 9) for value in values] for values in (shard.advantages, shard.accuracies))
    return [_rows(shard.rows), list(shard.groups), advantages, accuracies, [*map(list, shard.updates)]]


def _digest(found: object) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@CASES
def test_a_preset_asks_and_learns_what_is_committed(method: str, run: Runs) -> None:
    """Six steps are enough for replay, memories of prompts and the second of two levels."""
    assert digests(run(method, steps=6)) == json.loads(COMMITTED.read_text())[method]


if __name__ == "__main__":
    with GraderPool(1, 60.0) as pool, tempfile.TemporaryDirectory() as folder:
        runs = {name: scripted_run(settings_of(name, steps=6), pool, Path(folder, name)) for name in METHODS}
        found = {name: digests(run) for name, run in runs.items()}
    COMMITTED.write_text(json.dumps(found, indent=1) + "\n")
