"""Starts at work: every group of a run has what the rule of its controller's paper says; two starts side by side."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from reference.doses import adaback_interval, adaprefix_share, g2rpo_a_lengths, mfc_frontier
from support.refusals import refused
from synthetic.scripted_runs import HAS_TRACE, LENGTHS, Run, num_given, scripted_run, settings_of

from luffy.config.starts import FitDose
from luffy.errors import ConfigError
from luffy.grading.pool import GraderPool
from luffy.rl.doses import fitted_dose
from luffy.types import Group, Source, Trajectory

HAS_PREFIX = {uid: bool(lengths - {1}) for uid, lengths in LENGTHS.items()}
"""A trace of one token has none, and would teach a controller what bare rows do."""
Runs = Callable[..., Run]


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
                assert _given(row) in num_given(group.uid, dose)
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
        guided = sum(HAS_PREFIX[group.uid] for group in step.groups)
        assert [len(call) for call in step.requests][1:] == [8 * guided] * 3
        for group in step.groups:
            assert len(group.trajectories) == 32
            tried = list[tuple[float, float]]()
            for place in range(0, 32, 8) if HAS_PREFIX[group.uid] else ():
                rows = group.trajectories[place : place + 8]
                (dose,) = {row.start.dose for row in rows if row.start is not None}
                assert dose == (fitted_dose(tuple(tried), config.target) if tried else 1.0)
                assert all(_given(row) in num_given(group.uid, dose) for row in rows)
                tried.append((dose, _success(rows)))


def test_adhint_gives_more_the_more_rollouts_of_the_group_fail(run: Runs) -> None:
    shares = set()
    for group in run("adhint_schedule").groups:
        rollouts, hinted = group.trajectories[:4], group.trajectories[4:]
        for row in hinted if HAS_TRACE[group.uid] else ():
            assert row.start is not None and row.start.dose is not None
            assert abs(row.start.dose - (0.1 + 0.8 * (1 - _success(rollouts)))) <= 0.1 + 1e-12
            assert _given(row) in num_given(group.uid, row.start.dose)
            shares.add(row.start.dose)
        assert not any(map(_given, rollouts))
    assert len(shares) > 50, "each row has a noise of its own"


# ---- two starts in one group: refused in one line, or both as they are alone ----

STARTS = {
    "whole": "{show: {kind: trace}}",
    "prefix": "{show: {kind: prefix}, rows: 2, dose: {kind: uniform, low: 0.1, high: 0.9}}",
    "all": "{show: {kind: prefix}, rows: all, dose: 0.5}",
    "ladder": "{show: {kind: prefix}, rows: 2, dose: {kind: ladder, rungs: [{rows: 2, share: 0.5, below: 0.9}]}}",
    "difficulty": "{show: {kind: prefix}, rows: 2, dose: {kind: difficulty, low: 0.1, high: 0.9}}",
    "bisection": "{show: {kind: prefix}, rows: 2, shared: true, dose: {kind: prompt_bisection}}",
    "ratio": "{show: {kind: prefix}, rows: 2, dose: {kind: batch_ratio}}",
    "fit": "{show: {kind: prefix}, rows: 4, shared: true, dose: {kind: fit, rounds: 2}}",
    "hint": "{show: {kind: hint}, rows: 2, dose: 0.5, learn: shown, when: {share: 0.5}}",
    "frontier": "{show: {kind: hint}, rows: 2, shared: true, dose: {kind: prompt_frontier}, learn: shown}",
    "solved": "{show: {kind: trace}, when: {pass_rate_at_most: 0.5}}",
    "hint_where_failing": "{show: {kind: hint}, rows: 2, dose: 0.5, learn: shown, when: {accuracy_at_most: 0.0}}",
    "trace_where_failing": "{show: {kind: trace}, when: {accuracy_at_most: 0.0}}",
    "search": "{show: {kind: prefix, pieces: 4}, rows: all, dose: {kind: search}, keep: nearest, "
    "when: {accuracy_at_most: 0.0}}",
    "chosen": "{show: {kind: trace, choose: likeliest_answer}, when: {accuracy_at_most: 0.0}}",
}
IN_PROMPT = {"hint", "frontier", "hint_where_failing"}
FALLBACKS = {"hint_where_failing", "trace_where_failing", "search", "chosen"}
REFUSED = {
    **{pair: "compares all off-policy rows" for name in STARTS for pair in ((name, "chosen"), ("chosen", name))},
    **dict.fromkeys(itertools.permutations(FALLBACKS, 2), "both sample again"),
    **{
        pair: "the group has none"
        for name in {"difficulty", "solved", "hint_where_failing", "trace_where_failing", "search"}
        for pair in ((name, "all"), ("all", name))
    },
}
PAIRS = list(itertools.permutations(STARTS, 2))


def _run_of(pair: tuple[str, ...], grader: GraderPool, folder: Path, failing: float) -> Run:
    starts = ", ".join(f"{name}: {STARTS[name]}" for name in pair)
    method = "on_policy" if IN_PROMPT.issuperset(pair) else "luffy"
    settings = settings_of(method, f"objective.group.starts={{trace: null, {starts}}}", steps=2)
    return scripted_run(settings, grader, folder, failing)


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_two_starts_share_a_group_or_are_refused(pair, grader, tmp_path):
    if pair in REFUSED:
        with refused(REFUSED[pair], error=ConfigError):
            _run_of(pair, grader, tmp_path, 0.0)
        return
    for failing in (0.0, 0.2):
        found = _run_of(pair, grader, tmp_path / str(failing), failing)
        for step in found.steps:
            assert len({*step.seeds}) == len(step.seeds), "each response has a seed of its own"
        for group in found.groups:
            _assert_whole(group, pair)


def _assert_whole(group: Group, pair: tuple[str, ...]) -> None:
    assert len(group.trajectories) <= 8
    if FALLBACKS.isdisjoint(pair):
        assert len(group.trajectories) + len(group.failed) == 8
    rollouts = [row for row in (*group.trajectories, *group.replaced) if row.start is None]
    for row in group.of_start("difficulty") if "difficulty" in pair else ():
        assert row.start is not None and row.start.dose is not None
        success = fmean(row.is_correct for row in rollouts) if rollouts else 1.0
        assert row.start.dose == pytest.approx(0.1 + 0.8 * (1 - success)), "by the rollouts alone"


def test_the_coins_of_two_starts_are_thrown_apart(grader: GraderPool, tmp_path: Path) -> None:
    shares = "{show: {kind: prefix}, rows: 1, dose: 0.5, when: {share: 0.5}}"
    settings = settings_of("luffy", f"objective.group.starts={{trace: null, a: {shares}, b: {shares}}}")
    groups = [group for group in scripted_run(settings, grader, tmp_path).groups if HAS_TRACE[group.uid]]
    seen = {(bool(group.of_start("a")), bool(group.of_start("b"))) for group in groups}
    assert len(seen) == 4
