"""How much of a trace a guided row is given."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.group import PrefixConfig
from luffy.rl.rows import RolloutTask, Visit
from luffy.rl.trace_starts import prefix_length

LENGTHS = (
    {"kind": "uniform", "low": 0.0, "high": 1.0},
    {"kind": "uniform", "low": {"kind": "cosine", "start": 0.95, "end": 0.05}, "high": 0.95},
    {"kind": "uniform", "low": 0.4, "high": 0.4},
    {"kind": "binomial", "chunks": 5, "probability": {"kind": "cosine", "start": 0.95, "end": 0.0, "over": 0.6}},
    {"kind": "evenly_spaced"},
)


def _config(length: dict, shared: bool = False) -> PrefixConfig:
    return PrefixConfig.model_validate({"length": length, "shared": shared})


def _lengths(length: dict, trace_tokens: int, step: int = 1, total: int = 101, rows: int = 500) -> list[int]:
    config, visit = _config(length), _visit(step)
    return [prefix_length(config, trace_tokens, visit, i, rows, total, 7) for i in range(rows)]


def _visit(step: int, uid: str = "p", repeat: int = 0) -> Visit:
    return Visit(RolloutTask(uid, (), "", ()), step, repeat)


@given(
    length=st.sampled_from(LENGTHS),
    trace_tokens=st.integers(1, 9000),
    index=st.integers(0, 7),
    step=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_a_prefix_leaves_a_token_to_write_and_is_the_same_again(length, trace_tokens, index, step, seed):
    arguments = (_config(length), trace_tokens, _visit(step), index, 8, 50, seed)
    tokens = prefix_length(*arguments)
    assert 0 <= tokens < trace_tokens
    assert tokens == prefix_length(*arguments)


def test_uniform_shares_fill_their_moving_interval() -> None:
    moving = {"kind": "uniform", "low": {"kind": "linear", "start": 0.9, "end": 0.1}, "high": 0.9}
    assert set(_lengths(moving, 1000, step=1)) == {900}
    last = _lengths(moving, 1000, step=101)
    assert 100 <= min(last) < 120 and 880 < max(last) < 900
    assert fmean(last) == pytest.approx(500, abs=4 * 231 / 500**0.5)


def test_a_share_of_one_leaves_the_stop_token_to_write_and_of_zero_everything() -> None:
    falling = {"kind": "linear", "start": 1.0, "end": 0.0}
    length = {"kind": "uniform", "low": falling, "high": falling}
    assert set(_lengths(length, 37, step=1)) == {36}
    assert set(_lengths(length, 37, step=101)) == {0}
    assert set(_lengths({"kind": "uniform", "low": 0.29, "high": 0.29}, 100)) == {29}


def test_binomial_prefixes_end_at_chunks_with_the_binomial_s_shares() -> None:
    length = {"kind": "binomial", "chunks": 4, "probability": 0.5}
    found = _lengths(length, 10, rows=4000)
    assert set(found) == {0, 2, 5, 7, 9}
    for tokens, probability in {0: 1 / 16, 2: 4 / 16, 5: 6 / 16, 7: 4 / 16, 9: 1 / 16}.items():
        error = (probability * (1 - probability) / 4000) ** 0.5
        assert found.count(tokens) / 4000 == pytest.approx(probability, abs=4 * error)


def test_a_trace_shorter_than_its_chunks_is_cut_token_by_token() -> None:
    assert set(_lengths({"kind": "binomial", "chunks": 5, "probability": 0.5}, 3)) == {0, 1, 2}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_trace_that_is_only_its_stop_token_gives_no_prefix(length: dict) -> None:
    assert set(_lengths(length, 1)) == {0}


def test_evenly_spaced_rows_go_from_low_to_high_and_a_lone_one_stands_between() -> None:
    assert _lengths({"kind": "evenly_spaced"}, 100, rows=5) == [0, 25, 50, 75, 99]
    assert _lengths({"kind": "evenly_spaced", "low": 0.2, "high": 0.6}, 100, rows=3) == [20, 40, 60]
    assert _lengths({"kind": "evenly_spaced", "low": 0.2, "high": 0.6}, 100, rows=1) == [40]


def test_shared_prefixes_are_equal_in_a_group_and_drawn_anew_for_every_visit_and_step() -> None:
    config = _config({"kind": "uniform", "low": 0.0, "high": 1.0}, shared=True)

    def tokens(index: int = 0, visit: int = 0, step: int = 1, uid: str = "p") -> int:
        return prefix_length(config, 10**6, _visit(step, uid, visit), index, 4, 10, 7)

    assert len({tokens(index=i) for i in range(4)}) == 1
    assert len({tokens(), tokens(visit=1), tokens(step=2), tokens(uid="q")}) == 4
