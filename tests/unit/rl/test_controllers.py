"""Controllers of the dose at work: every group of a run is given what the rule of its paper says."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from reference.doses import adaback_interval, adaprefix_share, g2rpo_a_lengths, mfc_frontier
from synthetic.scripted_runs import TASKS, Run

from luffy.config.starts import FitDose
from luffy.rl.doses import fitted_dose
from luffy.types import Group, Source, Trajectory

LENGTHS = {task.uid: {len(trace.token_ids) for trace in task.demonstrations} for task in TASKS}
HAS_TRACE = {task.uid: bool(task.demonstrations) for task in TASKS}
HAS_PREFIX = {uid: bool(lengths - {1}) for uid, lengths in LENGTHS.items()}
"""A trace of one token has none, and would teach a controller what bare rows do."""
Runs = Callable[..., Run]


def _num_given(uid: str, share: float) -> set[int]:
    """Numbers of tokens that this share of a trace may have."""
    return {min(math.floor(round(length * share, 6)), length - 1) for length in LENGTHS[uid]}


def _given(row: Trajectory) -> int:
    return row.source.count(Source.OFF_POLICY)


def _dose(group: Group, name: str) -> float:
    """The dose of a group whose rows all have the same."""
    (dose,) = {row.start.dose for row in group.of_start(name) if row.start is not None}
    assert dose is not None
    return dose


def _success(rows: Sequence[Trajectory]) -> float:
    return fmean(row.is_correct for row in rows)


@pytest.mark.parametrize(("method", "name"), [("adaback", "prefix"), ("mfc", "hint")])
def test_a_prompt_is_given_what_its_earlier_visits_call_for(method: str, name: str, run: Runs) -> None:
    """The references know the doses and the successes of the visits before, and nothing else."""
    visits: dict[str, list[tuple[float, float]]] = {}
    places, seen = list[float](), Counter[bool]()
    for group in run(method, steps=20).groups:
        if not (HAS_PREFIX if method == "adaback" else HAS_TRACE)[group.uid]:
            assert not group.of_start(name)
            continue
        dose, before = _dose(group, name), visits.setdefault(group.uid, [])
        if method == "adaback":
            least, most = adaback_interval(before)
            assert least <= dose < most
            places.append((dose - least) / (most - least))
            for row in group.trajectories:
                assert _given(row) in _num_given(group.uid, dose)
        else:
            used, most = round(5 * dose), mfc_frontier(before, 5)
            assert dose == used / 5 and 0 <= used <= most
            places.append((used + 0.5) / (most + 1))
            hints = {None if row.start is None else row.start.shown for row in group.trajectories}
            assert hints == {"\n".join(f"step {step + 1}" for step in range(used)) or None}
        assert len(group.trajectories) == len(group.of_start(name)) == 8
        before.append((dose, _success(group.trajectories)))
        seen[before[-1][1] >= 0.5] += 1
    assert min(seen.values()) > 20, "failures and successes"
    assert fmean(places) == pytest.approx(0.5, abs=4 * 0.29 / len(places) ** 0.5), "drawn evenly over what is allowed"


def test_g2rpo_a_gives_two_rows_what_the_change_of_accuracy_calls_for(run: Runs) -> None:
    found = run("g2rpo_a", steps=12)
    accuracies = [fmean(_success(group.trajectories) for group in step.groups) for step in found.steps]
    lengths = g2rpo_a_lengths(accuracies)
    for step, length in zip(found.steps, lengths, strict=False):
        guided = [group for group in step.groups if HAS_PREFIX[group.uid]]
        assert all(_dose(group, "guidance") == pytest.approx(length) for group in guided)
        assert all(len(group.of_start("guidance")) == 2 and len(group.trajectories) == 8 for group in guided)
        assert step.metrics["rollout/dose_guidance"] == pytest.approx(length)
    assert len(set(lengths)) > 2


def test_adaprefix_moves_one_share_to_where_half_of_a_batch_succeeds(run: Runs) -> None:
    """Windows of two steps, over twelve; a prompt's own success and the envelope are taken off again."""
    dose = "objective.group.starts.prefix.dose"
    found = run("adaprefix", f"{dose}.every=2", f"{dose}.first=0.9", steps=12)
    windows, rates = list[tuple[float, float]](), dict[str, float]()
    for pair in zip(found.steps[::2], found.steps[1::2], strict=True):
        share, shown = adaprefix_share(windows, first=0.9), list[tuple[float, float]]()
        for step in pair:
            envelope = 1.0 if step.number <= 7 else 0.5 + 0.5 * math.cos(math.pi * ((step.number - 1) / 11 - 0.6) / 0.4)
            known = dict(rates)
            for group in (group for group in step.groups if HAS_PREFIX[group.uid]):
                wanted = share + 0.5 * (0.5 - known.get(group.uid, 0.5))
                assert _dose(group, "prefix") == pytest.approx(min(max(wanted, 0.0), 1.0, envelope))
                shown.append((_dose(group, "prefix"), _success(group.trajectories)))
                rates[group.uid] = (rates[group.uid] + shown[-1][1]) / 2 if group.uid in rates else shown[-1][1]
        windows.append((fmean(dose for dose, _ in shown), fmean(success for _, success in shown)))
    assert {success < 0.5 for _, success in windows} == {True, False}


def test_seele_samples_four_rounds_each_where_those_before_say_that_half_succeeds(run: Runs) -> None:
    config = run("seele").settings.objective.group.starts["hint"].dose
    assert isinstance(config, FitDose)
    for step in run("seele").steps:
        assert [len(call) for call in step.requests][1:] == [
            8 * sum(HAS_PREFIX[group.uid] for group in step.groups)
        ] * 3
        for group in step.groups:
            assert len(group.trajectories) == 32
            rounds = (
                [group.trajectories[place : place + 8] for place in range(0, 32, 8)] if HAS_PREFIX[group.uid] else []
            )
            tried = list[tuple[float, float]]()
            for rows in rounds:
                (dose,) = {row.start.dose for row in rows if row.start is not None}
                assert dose == (fitted_dose(tried, config) if tried else 1.0)
                assert all(_given(row) in _num_given(group.uid, dose) for row in rows)
                tried.append((dose, _success(rows)))


def test_adhint_gives_more_the_more_rollouts_of_the_group_fail(run: Runs) -> None:
    shares = set()
    for group in run("adhint_schedule").groups:
        rollouts, hinted = group.trajectories[:4], group.trajectories[4:]
        for row in hinted if HAS_TRACE[group.uid] else ():
            assert row.start is not None and row.start.dose is not None
            assert abs(row.start.dose - (0.1 + 0.8 * (1 - _success(rollouts)))) <= 0.1 + 1e-12
            assert _given(row) in _num_given(group.uid, row.start.dose)
            shares.add(row.start.dose)
        assert not any(map(_given, rollouts))
    assert len(shares) > 50, "each row has a noise of its own"
