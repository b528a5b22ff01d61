"""Which graded answers become traces, and in which order."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.answers import KeepAnswers
from luffy.data.kept_answers import farthest_first, kept_traces, may_be_kept
from luffy.data.overlap import words
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.row_filters import with_verdict
from luffy.types import FinishReason, Message, Outcome, Prompt, Trace

RULES = st.builds(KeepAnswers, choose=st.sampled_from(["first", "shortest"]), max_per_prompt=st.integers(1, 6)) | (
    st.builds(KeepAnswers, choose=st.just("diverse"), max_per_prompt=st.integers(2, 6))
)
TEXTS = st.lists(st.sampled_from("abcde"), max_size=6).map(" ".join)


def answer(text: str, num_tokens: int = 5) -> Trace:
    return Trace(text, "policy", verified=True, num_tokens=num_tokens)


def kept(answers: list[Trace], choose: str, most: int) -> list[str]:
    rule = KeepAnswers.model_validate({"choose": choose, "max_per_prompt": most})
    return [each.text for each in kept_traces(answers, rule)]


@pytest.mark.parametrize(
    ("text", "outcome", "reason", "expected"),
    [
        ("right", Outcome.CORRECT, FinishReason.STOP, True),
        ("w", Outcome.WRONG, FinishReason.STOP, False),
        ("cut", Outcome.CORRECT, FinishReason.LENGTH, False),
        ("  ", Outcome.CORRECT, FinishReason.STOP, False),
        ("\\boxed{2} \ufffd", Outcome.CORRECT, FinishReason.STOP, False),
    ],
)
def test_only_correct_text_that_ended_by_itself_may_be_kept(text, outcome, reason, expected):
    assert may_be_kept(text, outcome, reason) is expected


@pytest.mark.parametrize(
    ("answers", "choose", "most", "expected"),
    [
        ([], "shortest", 4, []),
        ([answer("1 + 1\n= 2"), answer("1 + 1 = 2 "), answer("2")], "first", 3, ["1 + 1\n= 2", "2"]),
        ([answer("long", 9), answer("b", 3), answer("a", 3), answer("c", 4)], "shortest", 3, ["b", "a", "c"]),
    ],
    ids=["none", "equal but for space", "shortest as sampled"],
)
def test_different_answers_are_kept_in_the_order_of_choice(answers, choose, most, expected):
    assert kept(answers, choose, most) == expected


def test_diverse_takes_the_first_and_then_what_is_farthest_from_it():
    near, far = "first add 3 and 4 to get 7", "the result is simply seven"
    answers = [answer("first add 3 and 4 to get seven"), answer(near), answer(far)]
    assert kept(answers, "diverse", 2) == [answers[0].text, far]
    assert kept(answers, "diverse", 9) == [answers[0].text, far, near]


def distance(one: str, other: str) -> float:
    """Jaccard's, over the sets of word triples."""
    texts = words(one), words(other)
    sizes = [min(3, len(found)) for found in texts]
    runs = [
        {tuple(found[at : at + size]) for at in range(len(found) - size + 1)} if found else set()
        for found, size in zip(texts, sizes, strict=True)
    ]
    union = runs[0] | runs[1]
    return 1 - len(runs[0] & runs[1]) / len(union) if union else 0.0


def test_case_and_punctuation_make_no_distance():
    assert farthest_first(["a b c d e", "A b, c d e", "a b c d f", ""], 4) == [0, 3, 2, 1]


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), count=st.integers(1, 8))
def test_each_choice_is_the_farthest_from_those_before(texts: list[str], count: int):
    order = farthest_first(texts, count)
    assert order[0] == 0
    assert len(order) == len(set(order)) == min(count, len(texts))

    def nearest(index: int, chosen: list[int]) -> float:
        return min(distance(texts[index], texts[other]) for other in chosen)

    for place in range(1, len(order)):
        before = order[:place]
        left = [index for index in range(len(texts)) if index not in before]
        best = max(nearest(index, before) for index in left)
        assert order[place] == next(index for index in left if nearest(index, before) == best)


@given(texts=st.lists(TEXTS, max_size=8), rule=RULES)
def test_fewer_are_a_prefix_of_more(texts: list[str], rule: KeepAnswers):
    answers = [answer(text, len(text)) for text in texts]
    more = rule.model_copy(update={"max_per_prompt": rule.max_per_prompt + 1})
    found = kept_traces(answers, rule)
    assert found == kept_traces(answers, more)[: rule.max_per_prompt]
    assert len({" ".join(each.text.split()) for each in found}) == len(found) <= rule.max_per_prompt


def test_what_is_known_of_an_answer_is_written_and_read_back(tmp_path: Path):
    sampled = dataclasses.replace(
        answer("\\boxed{2}", 4), model="base", decoding="temperature 1", logprobs=(-0.5, -0.25, 0.0, -1.0)
    )
    (trace,) = kept_traces([sampled], KeepAnswers())
    prompt = Prompt("u", "s", (Message("user", "1+1"),), "2", (trace,))
    write_prompts(tmp_path / "a.parquet", [prompt])
    assert read_prompts(tmp_path / "a.parquet") == [prompt]
    assert (trace.author, trace.model, trace.decoding, trace.num_tokens) == ("policy", "base", "temperature 1", 4)
    assert (trace.verified, trace.logprobs) == (True, (-0.5, -0.25, 0.0, -1.0))
    assert with_verdict(trace, Outcome.CORRECT) == trace
