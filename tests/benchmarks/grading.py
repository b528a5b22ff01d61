"""Grades a second: the pool against plain serial math-verify on the same answers in one run.

Run: python tests/benchmarks/grading.py [answers] [timeout_s]

Answers are distinct and the pool remembers nothing; both sides have the same time limit (whole seconds: math-verify's
alarm knows no others), and both have loaded before the clock starts. Three lists: ordinary answers, the same with 1 %
of formulas that never end, and with 1 % of such as look ordinary, which no check beforehand can know. The time per
grade is that of a pool of one worker asked one answer at a time.
"""

import statistics
import time
from collections import Counter

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from measuring import numbers, show
from synthetic.answers import ENDLESS, TOWERS, Pair, ordinary_pairs

from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

WORKERS = 2
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def with_hostile(pairs: list[Pair], templates: tuple[str, ...]) -> list[Pair]:
    """The list with every hundredth answer replaced."""
    return [
        (templates[index // 100 % len(templates)].replace("%d", str(index // 100 + 2)), gold)
        if index % 100 == 50
        else (answer, gold)
        for index, (answer, gold) in enumerate(pairs)
    ]


def serially(pairs: list[Pair], timeout_s: int) -> tuple[float, int]:
    """Seconds and correct answers of math-verify as its documentation uses it."""
    verify(parse("$x+1$"), parse("$1+x$"))
    started, correct = time.perf_counter(), 0
    for answer, gold in pairs:
        reference = parse(f"\\boxed{{{gold}}}", extraction_config=_EXTRACTION, parsing_timeout=timeout_s)
        target = parse(f"\\boxed{{{answer}}}", extraction_config=_EXTRACTION, parsing_timeout=timeout_s)
        correct += verify(reference, target, timeout_seconds=timeout_s)
    return time.perf_counter() - started, correct


def pooled(pairs: list[Pair], timeout_s: int) -> tuple[float, Counter[Outcome]]:
    """Seconds and outcomes of the pool."""
    with GraderPool(WORKERS, timeout_s, memo_size=0) as pool:
        pool.grade([GradeRequest(f"\\boxed{{x+{n}}}", f"{n}+x") for n in range(8)])
        started = time.perf_counter()
        grades = pool.grade([GradeRequest(f"\\boxed{{{answer}}}", gold) for answer, gold in pairs])
        return time.perf_counter() - started, Counter(grade.outcome for grade in grades)


def times(pairs: list[Pair], timeout_s: int) -> list[float]:
    """Seconds of each grade, one after the other."""
    seconds = []
    with GraderPool(1, timeout_s, memo_size=0) as pool:
        pool.grade_one(r"\boxed{x+1}", "1+x")
        for answer, gold in pairs:
            started = time.perf_counter()
            pool.grade_one(f"\\boxed{{{answer}}}", gold)
            seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Print one line a list."""
    count, timeout_s = numbers(1000, 5)
    ordinary = ordinary_pairs(count, seed=1)
    lists = {
        "ordinary": ordinary,
        "1 % towers": with_hostile(ordinary, TOWERS),
        "1 % endless": with_hostile(ordinary, ENDLESS),
    }
    rows = []
    for name, pairs in lists.items():
        alone, correct = serially(pairs, timeout_s)
        together, outcomes = pooled(pairs, timeout_s)
        cuts = statistics.quantiles(times(pairs, timeout_s), n=100)
        speeds = f"{count / alone:.0f}", f"{count / together:.0f}", f"{alone / together:.2f}"
        milliseconds = f"{cuts[49] * 1e3:.2f}", f"{cuts[98] * 1e3:.1f}"
        found = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        rows.append((name, *speeds, *milliseconds, f"{correct} / {outcomes[Outcome.CORRECT]}", found))
    show(
        ("answers", "math-verify /s", f"pool of {WORKERS} /s", "ratio", "p50 ms", "p99 ms", "correct", "outcomes"), rows
    )


if __name__ == "__main__":
    main()
