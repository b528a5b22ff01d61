"""Tuning the arms of a comparison: all of their tries at once, or rung by rung with successive halving."""

from collections.abc import Callable, Mapping, Sequence

from luffy.config.many_runs.arm_run import ArmRun
from luffy.config.many_runs.comparison import Candidate, Comparison
from luffy.config.many_runs.selection_split import decoding_of
from luffy.evaluation.method_comparison.tuning import ArmTuning, Halving, Try, Tuning, best, tried
from luffy.evaluation.results import Cell
from luffy.tasks.many_runs import RunOutcome, parted


def tune_arms(
    comparison: Comparison, execute: Callable[[Sequence[ArmRun]], Mapping[str, RunOutcome]], confidence: float
) -> Tuning:
    """The tuning of every arm of a comparison that has `select`.

    `execute` makes runs and returns their outcomes by `ArmRun.folder`; it is called once for each rung, with the best
    tries of the one before.
    """
    select = comparison.config.select
    assert select is not None
    cell = (select.on, decoding_of(comparison.candidates[0].config, select))
    left = {arm: comparison.candidates_of(arm) for arm in comparison.config.arms}
    made: dict[str, tuple[tuple[Try, ...], ...]] = dict.fromkeys(left, ())
    for rung in comparison.rungs:
        left = {arm: _going_on(candidates, made[arm], rung.num_tries) for arm, candidates in left.items()}
        runs = comparison.runs_at(rung, [each for candidates in left.values() for each in candidates])
        outcomes = execute(runs)
        found = [(run, outcomes[run.folder]) for run in runs]
        made = {
            arm: (*made[arm], tuple(_tried(each, found, cell, confidence) for each in candidates))
            for arm, candidates in left.items()
        }
    arms = tuple(ArmTuning(arm, rungs) for arm, rungs in made.items())
    return Tuning(*cell, select.seeds, select.random is not None, arms, _halving(comparison))


def _going_on(
    candidates: tuple[Candidate, ...], made: Sequence[tuple[Try, ...]], num_tries: int
) -> tuple[Candidate, ...]:
    """Those that the last rung made leaves for the next one; all before the first."""
    if not made:
        return candidates
    points = [each.point for each in best(made[-1], num_tries)]
    return tuple(each for each in candidates if each.point in points)


def _tried(candidate: Candidate, found: Sequence[tuple[ArmRun, RunOutcome]], cell: Cell, confidence: float) -> Try:
    own = {run.seed: outcome for run, outcome in found if (run.arm, run.point) == (candidate.arm, candidate.point)}
    return tried(candidate.point, *parted(own), cell, confidence)


def _halving(comparison: Comparison) -> Halving | None:
    select, budget, rungs = comparison.config.select, comparison.config.budget, comparison.rungs
    if select is None or select.halving is None:
        return None
    return Halving(
        select.halving.eta,
        "optimizer_steps" if budget.rollouts is None else "rollouts",
        tuple(rung.resource for rung in rungs),
        tuple(rung.num_tries for rung in rungs),
    )
