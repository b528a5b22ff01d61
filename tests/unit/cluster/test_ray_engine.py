"""Calls to all engines of a cluster, of which one is dead."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luffy.cluster import ray_engine
from luffy.cluster.ray_engine import RayEngine
from luffy.cluster.supervision import Member, MemberDied


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
