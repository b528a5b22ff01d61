"""Engine actors as one engine: who gets which requests, and calls to all of them, of which one is dead."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.cluster import ray_engine
from luffy.cluster.ray_engine import RayEngine, shares
from luffy.cluster.supervision import Member, MemberDied
from luffy.rollout.engine import RolloutRequest


class Engines:
    """Starts engines, supervises them, and writes down which of them were put to sleep."""

    ray = SimpleNamespace(call_timeout_s=1.0, start_timeout_s=1.0)

    def __init__(self) -> None:
        self.asleep: list[str] = []
        self._dead: set[str] = set()

    def started(self, name: str, *, is_dead: bool = False) -> Member:
        self._dead |= {name} if is_dead else set()
        handle: Any = SimpleNamespace(sleep=SimpleNamespace(remote=lambda: name))
        return Member(name, handle, Path("no log"))

    def start(self, place: int) -> Member:
        return self.started(f"another {place}")

    def open(self, members: Sequence[Member]) -> list[str]:
        return []

    def answers(self, members: Sequence[Member], asked: Sequence[str], timeout_s: float) -> list[None]:
        for member, name in zip(members, asked, strict=False):
            if name in self._dead:
                raise MemberDied(member, "died")
            self.asleep.append(name)
        return [None for _ in asked]

    def check_open(self) -> None: ...


def test_the_replacement_of_a_dead_engine_is_put_to_sleep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Awake, it would hold the memory of the GPU that it shares with a rank of the trainer."""
    monkeypatch.setattr(ray_engine.ray, "kill", lambda handle: None)
    engines: Any = Engines()
    members = [engines.started("first", is_dead=True), engines.started("second")]
    engine = RayEngine(members, engines, engines, load=lambda fresh: [])
    engine.ask("sleep")
    assert engines.asleep == ["another 0", "second"]
    assert engine.num_restarts == 1


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
