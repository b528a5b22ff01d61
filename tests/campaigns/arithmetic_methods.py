"""Which method wins on the arithmetic task: five methods, two bases, five seeds, equal optimizer steps.

Run: python tests/campaigns/arithmetic_methods.py --workspace workspace/study [--workers 2] [--seeds 5]

Every arm starts from the same base, learns from the same 512 prompts for the same number of optimizer steps, and is
evaluated greedily on the same held-out problems. Each method's learning rate is the best of the same three, chosen on
a seed that is not reported; with `--rates` of one, it is that one. `--methods` takes any presets, or `all`. Stages are
cached: a killed campaign goes on where it was. Prints Markdown; `--json FILE` keeps every arm. The comparison itself,
at rates that are chosen already, is flows/compare_methods.py with exp_configs/compare_arithmetic.yaml.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.config import available_presets, load_experiment
from luffy.errors import LuffyError
from luffy.evaluation.results import read_results
from luffy.pipeline.experiment import Unwatched, open_experiment, start_run
from luffy.pipeline.workspace import find_workspace
from luffy.statistics.intervals import student_quantile

CONFIG = Path(__file__).resolve().parents[2] / "exp_configs/arithmetic.yaml"
STEPS = 48
COLD_START_STEPS = 9
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
SELECTION_SEED = 100
REFERENCE = "luffy"
# How often the base's text on chains of 4 to 6 operations reasons in steps: its rollouts succeed sometimes, or never.
BASES = {"sometimes": 0.1, "never": 0.0}
_SUPERVISED = ("sft", "dft")
_ALL_TRACES = ["sft.num_traces=null", "sft.batch_size=64", "sft.epochs=null", f"sft.steps={STEPS}"]
METHODS: dict[str, list[str]] = {
    name: ["chain=rl", f"method={name}", f"rl.steps={STEPS}"]
    if name not in _SUPERVISED
    else ["chain=sft", f"method={name}", *_ALL_TRACES]
    for name in available_presets("methods")
} | {
    "sft": ["chain=sft", *_ALL_TRACES],
    "sft_then_rl": ["chain=sft_then_rl", f"rl.steps={STEPS - COLD_START_STEPS}"],
    "sft_then_luffy": ["chain=sft_then_luffy", f"rl.steps={STEPS - COLD_START_STEPS}"],
}
STUDY = ("on_policy", "luffy", "sft", "sft_then_rl", "sft_then_luffy")


@dataclass(frozen=True)
class Arm:
    base: str
    method: str
    lr: float
    seed: int

    def overrides(self) -> list[str]:
        share = BASES[self.base]
        trained = "sft" if self.method in _SUPERVISED else "rl"
        return [
            *METHODS[self.method],
            f"{trained}.optimizer.lr={self.lr}",
            f"sft.seed={self.seed}",
            f"rl.seed={self.seed}",
            *[f"data.corpus.stepwise_share.{length}={share}" for length in (4, 5, 6)],
            "evaluation.decodings={greedy: {temperature: 0.0}}",
            "name=study",
        ]


@dataclass(frozen=True)
class Outcome:
    arm: Arm
    accuracy: dict[str, float]
    """By suite, greedy, final checkpoint."""
    base_accuracy: dict[str, float]


def run_arm(arm: Arm, workspace: Path) -> Outcome | None:
    """Train and evaluate one arm; None (and a line) when it failed."""
    config = load_experiment(CONFIG, arm.overrides())
    experiment = open_experiment(config, find_workspace(workspace))
    last = "sft" if arm.method in _SUPERVISED else "rl"
    wanted = ("evaluate_base", f"evaluate_{last}")
    try:
        with start_run(experiment) as run:
            folders = {}
            for plan in experiment.plan():
                if plan.node.stage in ("evaluate", "report") and plan.node.name not in wanted:
                    continue
                run.execute(plan.node.name, Unwatched())
                folders[plan.node.name] = plan.directory
    except LuffyError as error:
        print(f"FAILED {arm}: {error}", flush=True)
        return None
    outcome = Outcome(arm, _accuracies(folders[f"evaluate_{last}"]), _accuracies(folders["evaluate_base"]))
    print(f"{arm} {outcome.accuracy}", flush=True)
    return outcome


def _accuracies(folder: Path) -> dict[str, float]:
    return {row.suite: row.accuracy for row in read_results(folder / "results.json").rows}


def run_all(arms: Iterable[Arm], workspace: Path, workers: int) -> list[Outcome]:
    with ThreadPoolExecutor(workers) as pool:
        return [outcome for outcome in pool.map(lambda arm: run_arm(arm, workspace), arms) if outcome]


def best_learning_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], float]:
    best: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        key = (outcome.arm.base, outcome.arm.method)
        if key not in best or _headline(outcome) > _headline(best[key]):
            best[key] = outcome
    return {key: outcome.arm.lr for key, outcome in best.items()}


def _headline(outcome: Outcome) -> float:
    return outcome.accuracy["in_distribution"]


def table(base: str, methods: Sequence[str], outcomes: Sequence[Outcome], rates: dict[tuple[str, str], float]) -> str:
    """A Markdown table of one base: mean and standard deviation over seeds, and paired differences."""
    rows = [outcome for outcome in outcomes if outcome.arm.base == base]
    reference = {outcome.arm.seed: _headline(outcome) for outcome in rows if outcome.arm.method == REFERENCE}
    start = rows[0].base_accuracy
    lines = [
        f"Base `{base}` (in distribution {100 * start['in_distribution']:.1f} %, retention "
        f"{100 * start['retention']:.1f} %)\n",
        f"| method | lr | in distribution | other mix | longer | retention | minus {REFERENCE} [95 %] | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        own = [outcome for outcome in rows if outcome.arm.method == method]
        cells = [_spread([100 * o.accuracy[suite] for o in own]) for suite in _SUITES]
        paired = [100 * (_headline(o) - reference[o.arm.seed]) for o in own if o.arm.seed in reference]
        difference = "-" if method == REFERENCE else _interval(paired)
        lines.append(f"| `{method}` | {rates[base, method]:g} | {' | '.join(cells)} | {difference} | {len(own)} |")
    return "\n".join(lines)


_SUITES = ("in_distribution", "other_mix", "longer", "retention")


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:.1f}" for value in values) or "-"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    mean = statistics.fmean(values)
    half = student_quantile(0.95, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def main() -> None:
    """Choose learning rates, run the seeds, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--methods", nargs="+", default=STUDY, choices=[*METHODS, "all"])
    parser.add_argument("--rates", nargs="+", type=float, default=LEARNING_RATES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = list(METHODS) if "all" in options.methods else options.methods
    # The shared stages first, each once, so that the arms find them finished.
    run_all([Arm(base, "sft", options.rates[0], SELECTION_SEED) for base in options.bases], options.workspace, 2)
    chosen: list[Outcome] = []
    rates = {(base, method): options.rates[0] for base in options.bases for method in methods}
    if len(options.rates) > 1:
        grid = [(base, method, lr) for base in options.bases for method in methods for lr in options.rates]
        chosen = run_all([Arm(*point, SELECTION_SEED) for point in grid], options.workspace, options.workers)
        rates = best_learning_rates(chosen)
    arms = [
        Arm(base, method, rates[base, method], seed)
        for base in options.bases
        for seed in range(1, options.seeds + 1)
        for method in methods
        if (base, method) in rates
    ]
    outcomes = run_all(arms, options.workspace, options.workers)
    for base in options.bases:
        print("\n" + table(base, methods, outcomes, rates))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in chosen + outcomes], indent=1))


if __name__ == "__main__":
    main()
