"""What a `kill -9` of a stage in the test's process would leave: a copy of its folder, made at the moment.

    with left_at(before_update(4), out) as left:
        run_stage(config, "rl", out, inputs)             # goes on to its end, and is what the resumed one must equal
    assert run_stage(config, "rl", left, inputs).resumed_from == 1

Buffers that a real kill loses are not in the copy either. `test_resume` compares the copy with what a real kill leaves.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from luffy.pipeline.events import EventWriter
from luffy.stages.answers.store import AnswerStore
from luffy.training.policy import Policy

Strike = Callable[[], None]
Place = Callable[[Strike], AbstractContextManager[None]]
"""Calls the strike when the work within its block comes to a place."""


@contextmanager
def left_at(place: Place, out: Path) -> Iterator[Path]:
    """Yields the folder that will have, after the block, what lay in `out` when the work came to `place`."""
    left = out.with_name(f"{out.name}-left")

    def strike() -> None:
        if not left.exists():
            shutil.copytree(out, left)

    with place(strike):
        yield left
    assert left.exists(), "the work has not come to the place"


def before_update(number: int) -> Place:
    """Right before an optimizer step of the policy, counted from 1."""
    return _before_call(Policy, "update", number)


def before_answers(number: int) -> Place:
    """Right before a batch of answers is stored, counted from 1."""
    return _before_call(AnswerStore, "add", number)


def within_checkpoint(step: int) -> Place:
    """After a step was journalled, learned from and logged, while its checkpoint is not complete."""

    @contextmanager
    def placed(strike: Strike) -> Iterator[None]:
        tell = EventWriter.progress

        def progress(events: EventWriter, at: int, total: int, **metrics: float) -> None:
            tell(events, at, total, **metrics)
            complete = events._file.path.parent / f"checkpoints/step_{at:06d}/COMPLETE"
            if at == step:
                complete.unlink()
                strike()
                complete.touch()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EventWriter, "progress", progress)
            yield

    return placed


def _before_call(owner: type, name: str, number: int) -> Place:
    @contextmanager
    def placed(strike: Strike) -> Iterator[None]:
        called, calls = getattr(owner, name), iter(range(number - 1))

        def counted(*arguments: Any, **named: Any) -> Any:
            if next(calls, None) is None:
                strike()
            return called(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, counted)
            yield

    return placed
