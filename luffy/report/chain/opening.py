"""The paragraph on top of the report: what was done and what came out, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from luffy.evaluation.checkpoint_scores import CheckpointScores
from luffy.evaluation.results import ResultRow, checkpoint_name
from luffy.report import wording
from luffy.report.chain.inputs import FinishedChain
from luffy.statistics.paired import BenchmarkComparison


@dataclass(frozen=True, slots=True)
class Headline:
    """A checkpoint's accuracy on the first suite."""

    checkpoint: str
    accuracy: str
    interval: str


def headlines(chain: FinishedChain) -> list[Headline]:
    """Each checkpoint on the first suite under the first decoding."""
    return [
        Headline(checkpoint_name(name), wording.percent(row.accuracy), wording.interval(*row.interval))
        for name, row in _first_rows(chain)
    ]


def summarise(chain: FinishedChain) -> str:
    """The paragraph, as plain text."""
    sentences = [_accuracies(chain), *_step_sentences(chain), *_elsewhere(chain), *_rewards(chain)]
    return " ".join((*sentences, _cost(chain)))


def _accuracies(chain: FinishedChain) -> str:
    suite, decoding = chain.suites[0], chain.decodings[0]
    rows = _first_rows(chain)
    way = ", ".join(f"{checkpoint_name(name)} {wording.accuracy(row)}" for name, row in rows)
    problems = wording.count(rows[0][1].num_problems, "problem")
    level = f"{100 * chain.evaluations[0].results.confidence:g}"
    return f"Accuracy on {suite} ({problems}, {decoding} decoding, {level}{wording.NBSP}% intervals): {way}."


def _step_sentences(chain: FinishedChain) -> list[str]:
    sentences = []
    for first, second in chain.transitions:
        row = chain.comparison(first, second, chain.decodings[0]).on(chain.suites[0])
        verdict = "a clear difference" if row.is_significant else "not distinguishable from no change"
        names = f"{checkpoint_name(second.checkpoint)} minus {checkpoint_name(first.checkpoint)}"
        sentences.append(
            f"{names} on the same problems: {wording.points(row.paired)} points ({verdict}{_correction(chain, row)})."
        )
    return sentences


def _correction(chain: FinishedChain, row: BenchmarkComparison) -> str:
    """The p-value and over how many suites it was corrected."""
    over = f" after Holm's correction over {len(chain.suites)} suites" if len(chain.suites) > 1 else ""
    return f", {wording.adjusted_p(row)}{over}"


def _elsewhere(chain: FinishedChain) -> list[str]:
    """The other suites, first checkpoint against last."""
    if len(chain.suites) < 2 or len(chain.evaluations) < 2:
        return []
    first, last = chain.evaluations[0], chain.evaluations[-1]
    comparison = chain.comparison(first, last, chain.decodings[0])
    changes: dict[bool, list[str]] = {True: [], False: []}
    for suite in chain.suites[1:]:
        changes[comparison.on(suite).is_significant].append(_change(chain, first, last, suite))
    clear = f"clearly on {_enumerate(changes[True])}" if changes[True] else ""
    noise = f"within the noise on {_enumerate(changes[False])}" if changes[False] else ""
    names = f"{checkpoint_name(first.checkpoint)} to {checkpoint_name(last.checkpoint)}"
    return [f"From {names}, accuracy changed {', '.join(filter(None, (clear, noise)))}."]


def _change(chain: FinishedChain, first: CheckpointScores, last: CheckpointScores, suite: str) -> str:
    cell = (suite, chain.decodings[0])
    before, after = first.row(cell), last.row(cell)
    assert before is not None
    assert after is not None
    return f"{suite} ({wording.percent(before.accuracy)} → {wording.percent(after.accuracy)}{wording.NBSP}%)"


def _enumerate(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _rewards(chain: FinishedChain) -> list[str]:
    rows = chain.metrics.get("rl", [])
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if not rewards:
        return []
    method = f" ({chain.config.method})" if chain.config.method else ""
    stretch = max(1, len(rewards) // 10)
    early, late = fmean(rewards[:stretch]), fmean(rewards[-stretch:])
    over = "step" if stretch == 1 else f"{stretch} steps"
    return [
        f"Over {wording.count(len(rewards), 'RL step')}{method} the mean reward of rollouts went from {early:.2f} "
        f"(first {over}) to {late:.2f} (last {over})."
    ]


def _cost(chain: FinishedChain) -> str:
    total = sum(manifest.total_s for manifest in chain.manifests.values())
    return f"The {wording.count(len(chain.manifests), 'stage')} took {wording.duration(total)} in all."


def _first_rows(chain: FinishedChain) -> Sequence[tuple[str, ResultRow]]:
    cell = (chain.suites[0], chain.decodings[0])
    found = ((evaluation.checkpoint, evaluation.row(cell)) for evaluation in chain.evaluations)
    return [(name, row) for name, row in found if row is not None]
