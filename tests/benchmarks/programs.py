"""Programs a second that the grader `code` runs, by the number of their test cases.

Run: python tests/benchmarks/programs.py [programs] [workers]

Programs are distinct and right (a sum of two numbers from standard input), so every case runs; those of the last row
fail at their second case, which is run again alone. The sandbox has run once before the clock starts.
"""

import json
import time

from measuring import numbers, show

from luffy.config.grading import CodeGrader
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome


def seconds(count: int, workers: int, cases: int, answer: str) -> tuple[float, int]:
    """Time for all programs, and how many were correct."""
    inputs = [f"{n} {n + 1}\n" for n in range(cases)]
    gold = json.dumps({"inputs": inputs, "outputs": [str(2 * n + 1) for n in range(cases)]})
    kind = CodeGrader()
    with GraderPool(workers, 5.0) as pool:
        pool.grade_one("```python\nprint(1)\n```", gold, kind=kind)
        started = time.perf_counter()
        grades = pool.grade([GradeRequest(f"```python\n# {n}\n{answer}\n```", gold, kind=kind) for n in range(count)])
        return time.perf_counter() - started, sum(grade.outcome is Outcome.CORRECT for grade in grades)


def main() -> None:
    """Print one line for each number of cases."""
    count, workers = numbers(100, 2)
    adds, rows = "print(sum(map(int, input().split())))", []
    for cases, answer in ((1, adds), (10, adds), (100, adds), (10, "print(1)")):
        taken, correct = seconds(count, workers, cases, answer)
        rows.append((str(cases), f"{count / taken:.1f}", f"{taken / count * 1e3:.0f}", f"{correct} of {count}"))
    show(("cases", f"programs /s with {workers} workers", "ms a program", "correct"), rows)


if __name__ == "__main__":
    main()
