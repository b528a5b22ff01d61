"""Two evaluations beside each other: which problems changed, and how the whole compares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from synthetic.result_rows import sample_record

from luffy.errors import DataError
from luffy.evaluation.changes import find_changes
from luffy.evaluation.results import EvaluationResults
from luffy.evaluation.sample_files import SampleRecord
from luffy.statistics.paired import compare_paired


@dataclass(frozen=True, slots=True)
class InMemory:
    """A finished evaluation that no file holds."""

    directory: Path
    results: EvaluationResults
    saved: list[SampleRecord]

    def records(self) -> Iterator[SampleRecord]:
        return iter(self.saved)


def evaluation(name: str, answers: Mapping[str, str], suite: str = "s") -> InMemory:
    """A model that answers the problems so, a letter a response; `1` is right and `-` no answer."""
    records = [
        sample_record(suite, uid, said == "1", sample=i, answer=None if said == "-" else said, ground_truth="1")
        for uid, all_said in answers.items()
        for i, said in enumerate(all_said)
    ]
    return InMemory(Path(name), EvaluationResults(checkpoint="rl", confidence=0.95, rows=()), records)


def test_the_largest_change_comes_first_and_shares_are_compared_over_other_numbers_of_responses():
    first = evaluation("a", {"p0": "1222", "p1": "2222", "p2": "1111", "p3": "1122"})
    second = evaluation("b", {"p0": "11", "p1": "22", "p2": "11", "p3": "21"})
    (part,) = find_changes(first, second).cells
    assert [(problem.uid, problem.first.share, problem.second.share) for problem in part.changed] == [("p0", 0.25, 1.0)]
    assert part.changed[0].first.counts == {"2": 3, "1": 1}


def test_the_comparison_is_the_paired_one_over_the_problems_that_both_have():
    first = evaluation("a", {"only": "1", **{f"p{i}": "1" if i < 20 else "2" for i in range(40)}})
    second = evaluation("b", {"else": "1", **{f"p{i}": "1" if i % 3 else "2" for i in range(39, -1, -1)}})
    (part,) = find_changes(first, second).cells
    shares = [[float(i < 20) for i in range(40)], [float(i % 3 > 0) for i in range(40)]]
    assert part.comparison.paired == compare_paired(*shares, 1, 0.95)
    assert (part.only_first, part.only_second) == (1, 1)


def test_suites_that_one_of_them_lacks_are_named_and_nothing_shared_is_an_error():
    first, other = evaluation("a", {"p0": "1"}), evaluation("b", {"p0": "1"}, suite="t")
    both = InMemory(Path("c"), first.results, first.saved + other.saved)
    assert find_changes(first, both).left_out == (("t", "greedy"),)
    with pytest.raises(DataError, match="a and b share no problem: the first has s, greedy, the second t, greedy"):
        find_changes(first, other)


def test_other_references_are_counted():
    first, second = evaluation("a", {"p0": "1"}), evaluation("b", {"p0": "1"})
    second.saved[0] = replace(second.saved[0], ground_truth="2")
    assert find_changes(first, second).cells[0].other_reference == 1


@pytest.mark.parametrize("suite", ["GPQA_diamond", "s"])
def test_a_confidential_problem_is_marked(suite):
    first, second = evaluation("a", {"p0": "1"}, suite), evaluation("b", {"p0": "2"}, suite)
    if suite == "s":
        second.saved[0] = replace(second.saved[0], confidential=True)
    assert find_changes(first, second).cells[0].changed[0].confidential
