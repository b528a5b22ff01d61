"""The generated task and its teacher, which may leave prompts out, err, or write in other styles."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from luffy.config.data import ArithmeticSource
from luffy.data.sources.arithmetic import OPERATIONS, follow, render_question, render_solution
from luffy.errors import DataError
from luffy.types import Prompt, Trace
from tests.synthetic.loaded_source import load_source

_chains = st.tuples(
    st.integers(0, 99), st.lists(st.sampled_from([operation for _, operation in OPERATIONS]), min_size=1, max_size=26)
)


def source(**changes: object) -> ArithmeticSource:
    settings: dict[str, object] = {"kind": "arithmetic", "num_prompts": 60, "num_operations": (2, 3)}
    return ArithmeticSource.model_validate({**settings, **changes})


def load(settings: ArithmeticSource, purpose: str = "train", seed: int = 0) -> list[Prompt]:
    return load_source(settings, purpose, seed).prompts


def answer_of(question: str) -> str:
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


def test_the_format() -> None:
    plus_8, minus_3, reverse = OPERATIONS[7][1], OPERATIONS[11][1], OPERATIONS[18][1]
    chain = (47, [plus_8, reverse, minus_3])
    assert render_question(*chain) == "47 a:+8 b:r c:-3 ="
    solution = render_solution(*chain, follow(*chain), "labelled")
    assert solution == "<think>47\n a:+8 =55\n b:r =55\n c:-3 =52\n</think>\\boxed{52}"


@given(_chains)
def test_the_teacher_is_right(chain: tuple[int, list]) -> None:
    expected = answer_of(render_question(*chain))
    assert render_solution(*chain, follow(*chain), "labelled").endswith(f"</think>\\boxed{{{expected}}}")


def test_lengths_and_styles_have_their_shares() -> None:
    prompts = load(source(num_prompts=91, num_operations=(2, 3), stepwise_share={2: 0.5, 3: 0.0}))
    lengths = Counter(prompt.extra_info["num_operations"] for prompt in prompts)
    styles = Counter((prompt.extra_info["num_operations"], prompt.extra_info["style"]) for prompt in prompts)
    assert lengths == {2: 46, 3: 45}
    assert styles == {(2, "stepwise"): 23, (2, "direct"): 23, (3, "direct"): 45}
    direct = [p for p in prompts if p.extra_info["style"] == "direct"]
    assert all(p.traces[0].text == f"\\boxed{{{answer_of(p.messages[0].content)}}}" for p in direct)
    assert all(("<think>" in p.traces[0].text) == (p.extra_info["style"] == "stepwise") for p in prompts)


def test_the_same_seed_and_purpose_give_the_same_prompts_whatever_the_order_of_mappings() -> None:
    assert load(source()) == load(source())
    assert load(source()) != load(source(), seed=1)
    assert load(source()) != load(source(), purpose="suites.longer")
    weights, shares = {"add": 1.0, "reverse": 2.0, "subtract": 3.0}, {2: 0.5, 3: 0.1}
    forward = source(operations=weights, stepwise_share=shares)
    backward = source(operations=dict(reversed(weights.items())), stepwise_share=dict(reversed(shares.items())))
    one, other = (load_source(settings, "train", 0) for settings in (forward, backward))
    assert one == other


def test_operations_have_their_frequencies() -> None:
    settings = source(num_prompts=4000, num_operations=(5,), operations={"add": 1.0, "reverse": 3.0}, unique=False)
    text = " ".join(prompt.messages[0].content for prompt in load(settings))
    added, reversed_ = len(re.findall(r"\+", text)), text.count("r")
    assert "-" not in text
    assert reversed_ / (added + reversed_) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("lengths", [(1,), (2,), (4, 5, 6)])
def test_unique_prompts_do_not_repeat(lengths: tuple[int, ...]) -> None:
    prompts = load(source(num_prompts=1900, num_operations=lengths))
    assert len({prompt.uid for prompt in prompts}) == 1900


def test_an_exhausted_space_reports_its_size() -> None:
    with pytest.raises(DataError, match=r"data\.train: 5000 distinct prompts with 1 operations requested, 1900 exist"):
        load(source(num_prompts=5000, num_operations=(1,)))
    assert len(load(source(num_prompts=5000, num_operations=(1,), unique=False))) == 5000


def taught(**settings: object) -> list[Prompt]:
    return load(source(num_prompts=64, **settings), seed=7)


def is_right(prompt: Prompt, trace: Trace) -> bool:
    return trace.text.endswith(f"\\boxed{{{prompt.ground_truth}}}")


def test_the_knobs_leave_prompts_as_they_are() -> None:
    plain = taught()
    changed = taught(traced_share=0.25, wrong_share=0.5, styles=("equations", "checked"))
    assert [each.uid for each in changed] == [each.uid for each in plain]


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


def test_every_prompt_has_a_trace_in_each_style_with_the_same_answer() -> None:
    (plain, *_), (styled, *_) = taught(), taught(styles=("equations", "checked", "labelled"))
    equations, checked, labelled = (trace.text for trace in styled.traces)
    assert labelled == plain.traces[0].text
    steps = equations.removeprefix("<think>").partition("\n</think>")[0].split("\n")
    assert len(steps) == styled.extra_info["num_operations"]
    assert [step[-2:] for step in steps] == [line[-2:] for line in labelled.partition("\n</think>")[0].split("\n")[1:]]
    assert checked.count("=") == 2 * labelled.count("=")
    assert all(is_right(styled, trace) for trace in styled.traces)


def test_a_calculator_makes_no_mistakes() -> None:
    with pytest.raises(ValidationError, match="makes no mistakes"):
        taught(wrong_share=0.2, by_calculator=("add",))
