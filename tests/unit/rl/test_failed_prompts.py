"""Prompts that no rollout solved, waiting for a supervised step."""

import json

from luffy.rl.replay import FailedPrompts
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


def _group(uid: str, *corrects: bool, source: Source = Source.ON_POLICY) -> Group:
    return Group(
        uid,
        tuple(
            Trajectory(
                (1,), (2,), (source,), (0.0,), (0,), float(correct),
                Outcome.CORRECT if correct else Outcome.WRONG, FinishReason.STOP,
            )
            for correct in corrects
        ),
    )  # fmt: skip


def _waiting(*uids: str) -> FailedPrompts:
    failed = FailedPrompts("oldest")
    failed.observe([_group(uid, False, False) for uid in uids], lambda uid: True)
    return failed


def test_only_prompts_that_every_rollout_failed_and_that_have_a_trace_are_queued() -> None:
    failed = FailedPrompts("newest")
    groups = [_group("some", True, False), _group("none", False, False), _group("bare", False, False)]
    failed.observe([*groups, _group("guided", False, source=Source.OFF_POLICY)], lambda uid: uid != "bare")
    assert failed.take(1) == ["none"]
    assert len(failed) == 0


def test_a_full_queue_gives_the_longest_waiting_and_keeps_the_rest() -> None:
    failed = _waiting("a", "b", "c")
    assert failed.take(4) is None
    assert failed.take(2) == ["a", "b"]
    assert failed.take(1) == ["c"]


def test_the_newest_step_is_taken_first_in_its_own_order() -> None:
    failed = FailedPrompts("newest")
    for uids in ("ab", "cd", "ae"):
        failed.observe([_group(uid, False) for uid in uids], lambda uid: True)
    assert failed.take(3) == ["a", "e", "c"]  # a failed again, and waits once
    assert failed.take(2) == ["d", "b"]


def test_a_prompt_waits_once_in_its_old_place_and_may_come_back() -> None:
    failed = _waiting("a", "b", "a")
    assert len(failed) == 2
    assert failed.take(1) == ["a"]
    failed.observe([_group("a", False)], lambda uid: True)
    assert failed.take(2) == ["b", "a"]


def test_its_state_survives_a_checkpoint() -> None:
    failed, again = _waiting("b", "a", "c"), _waiting("gone")
    again.restore(json.loads(json.dumps(failed.state())))
    assert again.take(3) == ["b", "a", "c"]
