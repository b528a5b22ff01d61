"""What a step may know of earlier ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

V = TypeVar("V")
Event = Sequence[Any]
"""What one group has shown; JSON."""


class Fold(Generic[V]):
    """A memory of what steps have observed, limited to what each step may know when it is planned.

    With `ahead` (`rl.max_staleness`) k, step s is planned after training on step s - 1 - k, so it knows what steps up
    to that one observed. A resumed run may have observed later ones, but ignores them, and so plans the same. A pure
    function of the observed events, which enter in the order of their steps.
    """

    def __init__(
        self,
        enter: Callable[[dict[str, V], int, Sequence[Event]], None],
        ahead: int,
        value: Callable[[Any], V] = lambda value: value,
    ) -> None:
        """`enter(memory, step, events)` changes the memory's values by replacing them; they and the events are JSON, or
        tuples, of which `value` makes a value again."""
        self._enter = enter
        self._ahead = ahead
        self._value = value
        self._settled: dict[str, V] = {}
        """After the last observed step minus `ahead`."""
        self._recent: dict[int, Sequence[Event]] = {}
        """Events by observed step after that."""

    def add(self, step: int, events: Sequence[Event]) -> None:
        """Record what a step has observed; called once per step, in order."""
        self._recent[step] = events
        for earlier in [s for s in self._recent if s <= step - self._ahead]:
            self._enter(self._settled, earlier, self._recent.pop(earlier))

    def known_to(self, step: int) -> dict[str, V]:
        """The memory that the plan of `step` may use."""
        known = dict(self._settled)
        for earlier, events in sorted(self._recent.items()):
            if earlier <= step - 1 - self._ahead:
                self._enter(known, earlier, events)
        return known

    @property
    def recent(self) -> Mapping[int, Sequence[Event]]:
        """Events by step, of observed steps of which the next plan may not know yet."""
        return self._recent

    def state(self) -> dict[str, object]:
        return {
            "settled": {name: _plain(value) for name, value in self._settled.items()},
            "recent": {str(step): _plain(events) for step, events in self._recent.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._settled = {name: self._value(value) for name, value in state["settled"].items()}
        self._recent = {int(step): events for step, events in state["recent"].items()}


def _plain(value: object) -> object:
    """As JSON gives it back."""
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
