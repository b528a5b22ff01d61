"""Arms of comparisons and points of grids whose verdicts are chosen, without a run."""

from pathlib import Path

from luffy.config import load_experiment
from luffy.config.many_runs.arms import Candidate
from luffy.config.many_runs.sweep_design import GridPoint, SweepDesign, grid_points
from luffy.config.many_runs.sweep_runs import Sweep
from luffy.evaluation.across_runs.run_results import ArmResults, Costs, RunResult
from luffy.evaluation.across_runs.sweep_findings import find_on_arms
from luffy.evaluation.results import CheckpointScores, EvaluationResults
from synthetic.result_rows import result_row, sample_record

COSTS = Costs(12.0, 96.0, 1000.0, 1500.0, 61.0, None)
BUDGET = {"optimizer_steps": 12}
(NOTHING_TRIED,) = grid_points(None)


def evaluation(problems=40, **right):
    """Verdicts of greedy decoding, with the first `right[suite]` problems of each suite solved."""
    rows, correct = [], {}
    for suite, count in right.items():
        records = [sample_record(suite, f"p{uid}", uid < count) for uid in range(problems)]
        rows.append(result_row(records, 0.95))
        correct[suite, "greedy"] = {row.uid: int(row.correct) for row in records}
    return CheckpointScores(EvaluationResults(checkpoint="rl", confidence=0.95, rows=tuple(rows)), correct)


def design(**content):
    """A loaded design of which nothing is used but what is written in it, and the confidence of smoke.yaml."""
    found = SweepDesign.model_validate({"name": "small", "experiment": "smoke", "seeds": (1, 2), **content})
    experiment = load_experiment("smoke")
    return Sweep(found, Path("small.yaml"), {}, {"only{}": (Candidate("", NOTHING_TRIED, experiment),)})


def run(seed, costs=COSTS, **of_run):
    """A finished run: `easy=20` solves that many problems of the suite `easy`."""
    kept = {name: of_run.pop(name) for name in ("curve", "held_out", "trained") if name in of_run}
    return RunResult(seed, evaluation(**of_run), costs, **kept)


def arm(name, *counts, failures=(), curve=()):
    """Finished seeds 1, 2, ...: `counts` are the solved problems of the suites `easy` and `hard`."""
    seeds = (run(seed, easy=easy, hard=hard, curve=curve) for seed, (easy, hard) in enumerate(counts, start=1))
    return ArmResults(name, NOTHING_TRIED, tuple(seeds), dict(failures))


def compared(*arms, reference="luffy", budget=BUDGET, seeds=(1, 2), tuning=None, base=(("easy", 4), ("hard", 0))):
    """The findings of a comparison of `arms`."""
    recipes = {one.name: {"chain": "rl", "method": one.name} for one in arms}
    recipes |= {} if len(recipes) > 1 else {"unmade": {"chain": "rl", "method": "unmade"}}
    sweep = design(arms=recipes, reference=reference, budget=budget, seeds=seeds)
    return find_on_arms(sweep, arms, evaluation(**dict(base)), tuning)


def gridded(grid, solved, failed=(), seeds=(1, 2)):
    """The findings of a grid, `solved[i]` problems solved by the first seed at point i, and two more by the second."""
    points = []
    for point, right in zip(grid_points(grid), solved, strict=True):
        done = () if point.number in failed else seeds
        finished = (run(seed, easy=right + 2 * i, hard=right // 2) for i, seed in enumerate(done))
        lost = {seed: "was ended" for seed in seeds if seed not in done}
        points.append(ArmResults(point.text, GridPoint(point.number, point.values), tuple(finished), lost))
    return find_on_arms(design(name="sizes", grid=grid, seeds=seeds), points, None)
