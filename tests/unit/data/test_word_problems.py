"""The generated word problems and their teacher."""

import re
from collections import Counter

import pytest

from luffy.config.data import WordProblemSource
from luffy.types import Prompt
from tests.synthetic.loaded_source import load_source

CHANGES = (
    (r"(?:finds|buys|gets) (\d+) (?!bags)", lambda count, n: count + n),
    (r"(?:gives|loses|sells) (\d+) ", lambda count, n: count - n),
    (r"(?:buys|is given) (\d+) (?:bags of|boxes with) (\d+) ", lambda count, packs, size: count + packs * size),
    (r"(?:gives|loses|sells) half of ", lambda count: count / 2),
    (r"until there are twice as many ", lambda count: 2 * count),
    (r"until there are three times as many ", lambda count: 3 * count),
)
"""What a sentence says, and what it does to the number of items."""


def load(num_prompts: int = 300, purpose: str = "train", seed: int = 0) -> list[Prompt]:
    source = WordProblemSource(kind="word_problems", num_prompts=num_prompts, num_events=(1, 3, 5))
    return load_source(source, purpose, seed).prompts


def answer_of(problem: str) -> str:
    """An independent reading of the problem."""
    start, *changes, question = re.split(r"(?<=[.?]) ", problem)
    assert question.startswith("How many ")
    count = float(re.search(r"\d+", start).group())
    for sentence in changes:
        ((change, match),) = [(c, found) for text, c in CHANGES if (found := re.search(text, sentence))]
        count = change(count, *map(int, match.groups()))
    return f"{count:g}"


def test_the_reference_answer_follows_from_the_problem_and_every_kind_of_event_occurs() -> None:
    prompts = load()
    assert [prompt.ground_truth for prompt in prompts] == [answer_of(prompt.messages[0].content) for prompt in prompts]
    assert all(1 <= int(prompt.ground_truth) <= 301 for prompt in prompts)
    text = " ".join(prompt.messages[0].content for prompt in prompts)
    assert all(re.search(pattern, text) for pattern, _ in CHANGES)


def test_the_trace_calculates_line_by_line_to_the_answer() -> None:
    for prompt in load():
        *lines, last = prompt.traces[0].text.splitlines()
        assert len(lines) == prompt.extra_info["num_events"]
        for calculation in ", ".join(lines).split(", "):
            left, right = calculation.split(" = ")
            assert eval(left) == int(right), calculation
        assert lines[-1].endswith(f" = {prompt.ground_truth}")
        assert last == f"\\boxed{{{prompt.ground_truth}}}"


def test_problems_are_distinct_and_their_lengths_have_equal_shares() -> None:
    prompts = load(100)
    assert len({prompt.uid for prompt in prompts}) == 100
    assert Counter(prompt.extra_info["num_events"] for prompt in prompts) == {1: 34, 3: 33, 5: 33}


@pytest.mark.parametrize(("purpose", "seed"), [("suites.longer", 0), ("train", 1)])
def test_problems_are_a_function_of_seed_and_purpose(purpose: str, seed: int) -> None:
    assert load(20) == load(20)
    assert load(20) == load(30)[:20]
    assert not {prompt.uid for prompt in load(20)} & {prompt.uid for prompt in load(20, purpose, seed)}
