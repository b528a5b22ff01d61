"""What the arithmetic teacher does otherwise when asked: fewer traces, wrong ones, other styles."""

import pytest
from pydantic import ValidationError

from luffy.config.data import ArithmeticSource
from luffy.data.sources.arithmetic import ArithmeticPrompts

PLAIN = {"kind": "arithmetic", "num_prompts": 64, "num_operations": [2, 3]}


def prompts(**knobs):
    source = ArithmeticSource.model_validate({**PLAIN, **knobs}, strict=False)
    return list(ArithmeticPrompts(source, "train", 7).rows())


def is_right(prompt, trace):
    return trace.text.endswith(f"\\boxed{{{prompt.ground_truth}}}")


def test_the_knobs_leave_prompts_as_they_are():
    plain = prompts()
    changed = prompts(traced_share=0.25, wrong_share=0.5, styles=["equations", "checked"])
    assert [each.uid for each in changed] == [each.uid for each in plain]


def test_a_share_of_the_prompts_has_traces_and_a_smaller_share_is_part_of_a_larger_one():
    few, more = ({p.uid for p in prompts(traced_share=share) if p.traces} for share in (1 / 16, 0.25))
    assert (len(few), len(more)) == (4, 16)
    assert few < more
    assert {p.traces for p in prompts(traced_share=0.25) if p.traces} <= {p.traces for p in prompts()}


def test_a_share_of_the_traces_is_wrong_from_one_step_on():
    found = [p for p in prompts(traced_share=0.5, wrong_share=0.25) if p.traces]
    right = [is_right(prompt, *prompt.traces) for prompt in found]
    assert (len(found), right.count(False)) == (32, 8)
    unchanged = {p.uid: p.traces for p in prompts()}
    assert all((p.traces == unchanged[p.uid]) == ok for p, ok in zip(found, right, strict=True))
    assert prompts(wrong_share=0.25) == prompts(wrong_share=0.25)


def test_a_mistake_that_would_cancel_out_is_made_in_the_last_step():
    multiplying = prompts(wrong_share=1.0, operations={"multiply": 1.0})
    assert not any(is_right(prompt, *prompt.traces) for prompt in multiplying)


def test_every_prompt_has_a_trace_in_each_style_with_the_same_answer():
    (plain, *_), (styled, *_) = prompts(), prompts(styles=["equations", "checked", "labelled"])
    equations, checked, labelled = (trace.text for trace in styled.traces)
    assert labelled == plain.traces[0].text
    steps = equations.removeprefix("<think>").partition("\n</think>")[0].split("\n")
    assert len(steps) == styled.extra_info["num_operations"]
    assert [step[-2:] for step in steps] == [line[-2:] for line in labelled.partition("\n</think>")[0].split("\n")[1:]]
    assert checked.count("=") == 2 * labelled.count("=")
    assert all(is_right(styled, trace) for trace in styled.traces)


def test_a_direct_trace_is_wrong_too_and_a_calculator_makes_no_mistakes():
    assert not any(is_right(p, *p.traces) for p in prompts(wrong_share=1.0, stepwise_share=0.0))
    with pytest.raises(ValidationError, match="makes no mistakes"):
        prompts(wrong_share=0.2, by_calculator=["add"])
