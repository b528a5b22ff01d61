"""Two starts in one group: refused in one line, or both as they are alone."""

import itertools
from pathlib import Path
from statistics import fmean

import pytest
from synthetic.scripted_runs import TASKS, Run, scripted_run, settings_of

from luffy.errors import ConfigError
from luffy.grading.pool import GraderPool
from luffy.types import Group

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
        with pytest.raises(ConfigError) as refusal:
            _run_of(pair, grader, tmp_path, 0.0)
        assert "\n" not in str(refusal.value) and REFUSED[pair] in str(refusal.value)
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
    groups = [group for group in scripted_run(settings, grader, tmp_path).groups if _has_trace(group)]
    seen = {(bool(group.of_start("a")), bool(group.of_start("b"))) for group in groups}
    assert len(seen) == 4


def _has_trace(group: Group) -> bool:
    return any(task.demonstrations for task in TASKS if task.uid == group.uid)
