"""Texts that end a response: what is kept of a completion, token for token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.rollout.engine import Completion, StopTexts
from luffy.types import FinishReason

PIECES = ("a", "b", "</", "answer", ">", ">b", "</answer>", "é")
"""The text of each token."""
STOP = "</answer>"


def _decode(ids: tuple[int, ...]) -> str:
    return "".join(PIECES[i] for i in ids)


STOPS = StopTexts((STOP,), _decode)
_IDS = st.lists(st.sampled_from(range(len(PIECES))), max_size=12).map(tuple)


def _completion(ids: tuple[int, ...], reason: FinishReason = FinishReason.LENGTH) -> Completion:
    return Completion(ids, tuple(-0.1 * i for i in range(len(ids))), reason, tuple(range(len(ids))))


def test_the_text_ends_with_the_stop_text_and_the_tokens_with_the_one_that_completes_it() -> None:
    ids = (0, 2, 3, 5, 0)  # a </ answer >b a
    assert STOPS.read(ids) == ("a</answer>", 4)
    assert STOPS.text(ids) == STOPS.text(ids[:4]) == "a</answer>"
    assert STOPS.text(ids[:3]) == "a</answer"
    cut = STOPS.cut(_completion(ids))
    assert cut == Completion(ids[:4], (0.0, -0.1, -0.2, pytest.approx(-0.3)), FinishReason.STOP, (0, 1, 2, 3))


def test_a_completion_without_a_stop_text_stays_as_it_is() -> None:
    completion = _completion((0, 2, 3, 0))
    assert STOPS.cut(completion) is completion
    assert StopTexts((), _decode).cut(_completion((6,))).token_ids == (6,)


@pytest.mark.parametrize(("ids", "kept"), [((0, 6, 1), 1), ((0, 2, 3, 4), 3), ((0, 1), 2), ((6,), 0)])
def test_a_prefix_ends_before_the_token_that_completes_a_stop_text(ids: tuple[int, ...], kept: int) -> None:
    assert STOPS.before_first(ids) == kept


@given(given_ids=_IDS, ids=_IDS.filter(bool))
def test_what_is_kept_holds_a_stop_text_and_one_token_less_does_not(given_ids, ids):
    given_ids = given_ids[: STOPS.before_first(given_ids)]
    cut = STOPS.cut(_completion(ids), given_ids)
    assert STOP not in _decode(given_ids + cut.token_ids[:-1])
    assert cut.token_ids == ids[: len(cut.token_ids)]
    assert (cut.finish_reason is FinishReason.STOP) == (STOP in _decode(given_ids + cut.token_ids))
    assert cut.finish_reason is FinishReason.STOP or cut.token_ids == ids
