"""Tasks that ship with the project: generated chains of operations, whose teacher may leave prompts out, err, or write
in other styles, and the word problems of `data/samples`."""

import hashlib
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

STORIES = Path(__file__).parents[3] / "data/samples"
any_chain = st.tuples(
    st.integers(0, 99), st.lists(st.sampled_from([operation for _, operation in OPERATIONS]), min_size=1, max_size=26)
)


def loaded(purpose="train", seed=0, **changes):
    settings = {"kind": "arithmetic", "num_prompts": 60, "num_operations": (2, 3), **changes}
    return load_source(ArithmeticSource.model_validate(settings), purpose, seed)


def chains(*which, **changes):
    return loaded(*which, **changes).prompts


def taught(**changes):
    return chains("train", 7, num_prompts=64, **changes)


def is_right(prompt, trace):
    return trace.text.endswith(f"\\boxed{{{prompt.ground_truth}}}")


def answer_of_chain(question):
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
def test_the_teacher_of_chains_is_right(chain):
    question, solution = render_question(*chain), render_solution(*chain, follow(*chain), "labelled")
    assert solution.endswith(f"</think>\\boxed{{{answer_of_chain(question)}}}")
    if question == "47 a:+8 b:r c:-3 =":
        assert solution == "<think>47\n a:+8 =55\n b:r =55\n c:-3 =52\n</think>\\boxed{52}"


def test_lengths_styles_and_operations_have_their_shares():
    prompts = chains(num_prompts=91, stepwise_share={2: 0.5, 3: 0.0})
    styles = Counter((prompt.extra_info["num_operations"], prompt.extra_info["style"]) for prompt in prompts)
    assert styles == {(2, "stepwise"): 23, (2, "direct"): 23, (3, "direct"): 45}
    for prompt in prompts:
        (trace,), style = prompt.traces, prompt.extra_info["style"]
        assert ("<think>" in trace.text) == (style == "stepwise")
        assert style == "stepwise" or trace.text == f"\\boxed{{{answer_of_chain(prompt.messages[0].content)}}}"
    weights = {"add": 1.0, "reverse": 3.0}
    prompts = chains(num_prompts=4000, num_operations=(5,), operations=weights, unique=False)
    signs = Counter("".join(prompt.messages[0].content for prompt in prompts))
    assert signs["-"] == 0
    assert signs["r"] / (signs["+"] + signs["r"]) == pytest.approx(0.75, abs=0.02)


def test_the_same_seed_and_purpose_give_the_same_prompts_whatever_the_order_of_mappings():
    assert chains() == chains()
    assert chains() != chains(seed=1)
    assert chains() != chains(purpose="suites.longer")
    mappings = {"operations": {"add": 1.0, "reverse": 2.0, "subtract": 3.0}, "stepwise_share": {2: 0.5, 3: 0.1}}
    assert loaded(**mappings) == loaded(**{name: dict(reversed(each.items())) for name, each in mappings.items()})


def test_unique_prompts_do_not_repeat_and_an_exhausted_space_reports_its_size():
    for lengths in ((1,), (2,), (4, 5, 6)):
        assert len({prompt.uid for prompt in chains(num_prompts=1900, num_operations=lengths)}) == 1900
    with refused("data.train", "5000 distinct prompts with 1 operations", "1900 exist", error=DataError):
        chains(num_prompts=5000, num_operations=(1,))
    assert len(chains(num_prompts=5000, num_operations=(1,), unique=False)) == 5000


def test_a_share_of_the_prompts_has_traces_and_a_smaller_share_is_part_of_a_larger_one():
    few, more = ({p.uid for p in taught(traced_share=share) if p.traces} for share in (1 / 16, 0.25))
    assert (len(few), len(more)) == (4, 16)
    assert few < more
    assert {p.traces for p in taught(traced_share=0.25) if p.traces} <= {p.traces for p in taught()}


def test_a_share_of_the_traces_is_wrong_from_one_step_on():
    found = [p for p in taught(traced_share=0.5, wrong_share=0.25) if p.traces]
    right = [is_right(prompt, *prompt.traces) for prompt in found]
    assert (len(found), right.count(False)) == (32, 8)
    unchanged = {p.uid: p.traces for p in taught()}
    assert [p.traces == unchanged[p.uid] for p in found] == right
    assert taught(wrong_share=0.25) == taught(wrong_share=0.25)
    # A mistake that would cancel out is made in the last step; a direct trace is wrong, too.
    for settings in ({"operations": {"multiply": 1.0}}, {"stepwise_share": 0.0}):
        assert not any(is_right(prompt, *prompt.traces) for prompt in taught(wrong_share=1.0, **settings))
    with pytest.raises(ValidationError, match="makes no mistakes"):
        taught(wrong_share=0.2, by_calculator=("add",))


def test_every_prompt_has_a_trace_in_each_style_with_the_same_answer():
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


@pytest.mark.parametrize(("file", "digest", "events"), [  # how many stories have so many events; digests of 3db71dc0
    ("train", "dab4794492ba3f585ccb64010187ab70cd8f302450fc675201d7e1a4f119797b", {2: 214, 3: 213, 4: 213}),
    ("test", "a5bb51c85fdc62f0b35181f9726378596083f3836a76d839585bb12f3da45306",
     {1: 64, 2: 43, 3: 43, 4: 42, 5: 32, 6: 32}),
])  # fmt: skip
def test_the_trace_of_a_story_calculates_its_answer_line_by_line(file, digest, events):
    """At 3db71dc0 a test that read each story by itself found its answer."""
    path = STORIES / f"word_problems_{file}.jsonl"
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
