from hypothesis import given
from hypothesis import strategies as st

from luffy.cluster.ray_engine import shares
from luffy.rollout.engine import RolloutRequest

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=30)


def requests_of(prompts):
    return [RolloutRequest(prompt, seed=i) for i, prompt in enumerate(prompts)]


@given(PROMPTS, st.integers(1, 4))
def test_each_request_goes_to_one_engine_and_prompts_stay_together(prompts, num_engines):
    parts = shares(requests_of(prompts), num_engines)
    assert sorted(i for part in parts.values() for i in part) == list(range(len(prompts)))
    assert all(parts.values())
    assert set(parts) <= set(range(num_engines))
    for prompt in prompts:
        assert sum(any(prompts[i] == prompt for i in part) for part in parts.values()) == 1


def test_the_engine_with_the_fewest_tokens_gets_the_next_prompt():
    prompts = [(1,) * 9, (1,) * 9, (2,) * 5, (3,) * 5, (4,) * 5, (5,)]
    assert shares(requests_of(prompts), 2) == {0: [0, 1], 1: [2, 3, 4, 5]}


def test_equal_prompts_are_spread_evenly():
    assert shares(requests_of([(i,) for i in range(6)]), 3) == {0: [0, 3], 1: [1, 4], 2: [2, 5]}


def test_the_turns_of_an_episode_stay_at_one_engine_and_episodes_at_several() -> None:
    """Whatever else is in the call."""
    prompts = [(i, 7) for i in range(32)]
    turns = [RolloutRequest(prompt, seed=0, shares_cache_with="play 1") for prompt in prompts]
    together = {turns[i].prompt_ids: engine for engine, part in shares(turns, 3).items() for i in part}
    alone = {turn.prompt_ids: next(iter(shares([turn], 3))) for turn in turns}
    assert together == alone
    assert {*alone.values()} == {0, 1, 2}
