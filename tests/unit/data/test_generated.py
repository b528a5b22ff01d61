"""Tasks that ship with the project: generated chains of operations, whose teacher may leave prompts out, err, or write
in other styles, and the word problems of `data/samples`."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.refusals import refused
from synthetic.loaded_source import load_file, load_source

from luffy.config.data import ArithmeticSource
from luffy.data.sources.arithmetic import OPERATIONS, follow, render_question, render_solution
from luffy.errors import DataError
from luffy.types import Prompt, Trace

ROOT = Path(__file__).parents[3]
any_chain = st.tuples(
    st.integers(0, 99), st.lists(st.sampled_from([operation for _, operation in OPERATIONS]), min_size=1, max_size=26)
)


def source(**changes: object) -> ArithmeticSource:
    settings: dict[str, object] = {"kind": "arithmetic", "num_prompts": 60, "num_operations": (2, 3)}
    return ArithmeticSource.model_validate({**settings, **changes})


def chains(purpose: str = "train", seed: int = 0, **changes: object) -> list[Prompt]:
    return load_source(source(**changes), purpose, seed).prompts


def taught(**changes: object) -> list[Prompt]:
    return chains(seed=7, num_prompts=64, **changes)


def is_right(prompt: Prompt, trace: Trace) -> bool:
    return trace.text.endswith(f"\\boxed{{{prompt.ground_truth}}}")


def answer_of_chain(question: str) -> str:
    """An independent reading of the question."""
    start, *operations, _ = question.split()
    number = int(start)
    for operation in operations:
        symbol = operation.partition(":")[2]
        if symbol == "r":
            number = int(f"{number:02d}"[::-1])
        elif symbol.startswith("*"):
            number = number * int(symbol[1:]) % 100
        else:
            number = (number + int(symbol)) % 100
    return f"{number:02d}"


@given(any_chain)
@example((47, [OPERATIONS[place][1] for place in (7, 18, 11)]))
def test_the_teacher_of_chains_is_right(chain: tuple[int, list]) -> None:
    question, solution = render_question(*chain), render_solution(*chain, follow(*chain), "labelled")
    assert solution.endswith(f"</think>\\boxed{{{answer_of_chain(question)}}}")
    if question == "47 a:+8 b:r c:-3 =":
        assert solution == "<think>47\n a:+8 =55\n b:r =55\n c:-3 =52\n</think>\\boxed{52}"


def test_lengths_and_styles_have_their_shares() -> None:
    prompts = chains(num_prompts=91, stepwise_share={2: 0.5, 3: 0.0})
    styles = Counter((prompt.extra_info["num_operations"], prompt.extra_info["style"]) for prompt in prompts)
    assert styles == {(2, "stepwise"): 23, (2, "direct"): 23, (3, "direct"): 45}
    direct = [p for p in prompts if p.extra_info["style"] == "direct"]
    assert all(p.traces[0].text == f"\\boxed{{{answer_of_chain(p.messages[0].content)}}}" for p in direct)
    assert all(("<think>" in p.traces[0].text) == (p.extra_info["style"] == "stepwise") for p in prompts)


def test_the_same_seed_and_purpose_give_the_same_prompts_whatever_the_order_of_mappings() -> None:
    assert chains() == chains()
    assert chains() != chains(seed=1)
    assert chains() != chains(purpose="suites.longer")
    weights, shares = {"add": 1.0, "reverse": 2.0, "subtract": 3.0}, {2: 0.5, 3: 0.1}
    forward = source(operations=weights, stepwise_share=shares)
    backward = source(operations=dict(reversed(weights.items())), stepwise_share=dict(reversed(shares.items())))
    assert load_source(forward) == load_source(backward)


def test_operations_have_their_frequencies() -> None:
    weights = {"add": 1.0, "reverse": 3.0}
    prompts = chains(num_prompts=4000, num_operations=(5,), operations=weights, unique=False)
    text = " ".join(prompt.messages[0].content for prompt in prompts)
    added, reversed_ = len(re.findall(r"\+", text)), text.count("r")
    assert "-" not in text
    assert reversed_ / (added + reversed_) == pytest.approx(0.75, abs=0.02)


def test_unique_prompts_do_not_repeat_and_an_exhausted_space_reports_its_size() -> None:
    for lengths in ((1,), (2,), (4, 5, 6)):
        prompts = chains(num_prompts=1900, num_operations=lengths)
        assert len({prompt.uid for prompt in prompts}) == 1900
    with refused("data.train", "5000 distinct prompts with 1 operations", "1900 exist", error=DataError):
        chains(num_prompts=5000, num_operations=(1,))
    assert len(chains(num_prompts=5000, num_operations=(1,), unique=False)) == 5000


def test_a_share_of_the_prompts_has_traces_and_a_smaller_share_is_part_of_a_larger_one() -> None:
    few, more = ({p.uid for p in taught(traced_share=share) if p.traces} for share in (1 / 16, 0.25))
    assert (len(few), len(more)) == (4, 16)
    assert few < more
    assert {p.traces for p in taught(traced_share=0.25) if p.traces} <= {p.traces for p in taught()}


def test_a_share_of_the_traces_is_wrong_from_one_step_on() -> None:
    found = [p for p in taught(traced_share=0.5, wrong_share=0.25) if p.traces]
    right = [is_right(prompt, *prompt.traces) for prompt in found]
    assert (len(found), right.count(False)) == (32, 8)
    unchanged = {p.uid: p.traces for p in taught()}
    assert all((p.traces == unchanged[p.uid]) == ok for p, ok in zip(found, right, strict=True))
    assert taught(wrong_share=0.25) == taught(wrong_share=0.25)
    # A mistake that would cancel out is made in the last step; a direct trace is wrong, too.
    for settings in ({"operations": {"multiply": 1.0}}, {"stepwise_share": 0.0}):
        assert not any(is_right(prompt, *prompt.traces) for prompt in taught(wrong_share=1.0, **settings))
    with pytest.raises(ValidationError, match="makes no mistakes"):
        taught(wrong_share=0.2, by_calculator=("add",))


def test_every_prompt_has_a_trace_in_each_style_with_the_same_answer() -> None:
    plain, styled = taught(), taught(styles=("equations", "checked", "labelled"))
    others = taught(traced_share=0.25, wrong_share=0.5, styles=("equations", "checked"))
    assert [each.uid for each in plain] == [each.uid for each in styled] == [each.uid for each in others]
    equations, checked, labelled = (trace.text for trace in styled[0].traces)
    assert labelled == plain[0].traces[0].text
    steps = equations.removeprefix("<think>").partition("\n</think>")[0].split("\n")
    assert len(steps) == styled[0].extra_info["num_operations"]
    assert [step[-2:] for step in steps] == [line[-2:] for line in labelled.partition("\n</think>")[0].split("\n")[1:]]
    assert checked.count("=") == 2 * labelled.count("=")
    assert all(is_right(styled[0], trace) for trace in styled[0].traces)


STORIES = {  # file: its digest, and how many stories have so many events
    "train": ("dab4794492ba3f585ccb64010187ab70cd8f302450fc675201d7e1a4f119797b", {2: 214, 3: 213, 4: 213}),
    "test": (
        "a5bb51c85fdc62f0b35181f9726378596083f3836a76d839585bb12f3da45306",
        {1: 64, 2: 43, 3: 43, 4: 42, 5: 32, 6: 32},
    ),
}
"""Of 3db71dc0, where a test that read each story by itself found its answer."""


@pytest.mark.parametrize("file", STORIES)
def test_the_trace_of_a_story_calculates_its_answer_line_by_line(file) -> None:
    path, (digest, events) = ROOT / f"data/samples/word_problems_{file}.jsonl", STORIES[file]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    prompts = load_file(path).prompts
    assert len({prompt.uid for prompt in prompts}) == len(prompts)
    assert Counter(prompt.extra_info["num_events"] for prompt in prompts) == events
    for prompt in prompts:
        *lines, last = prompt.traces[0].text.splitlines()
        assert len(lines) == prompt.extra_info["num_events"]
        for calculation in ", ".join(lines).split(", "):
            left, right = calculation.split(" = ")
            assert eval(left) == int(right), calculation
        assert lines[-1].endswith(f" = {prompt.ground_truth}")
        assert last == f"\\boxed{{{prompt.ground_truth}}}"
