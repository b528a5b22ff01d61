"""Measures of finished episodes, and the reward that their weights make of them."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from luffy.config.environment import ANSWER, EpisodeScoring
from luffy.errors import ConfigError
from luffy.import_paths import imported_setting
from luffy.types import Message

_WHERE = "environment.scoring"
TURNS = "turns"
"""Counted in every episode: the policy's turns, given ones included."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """What a measure may look at; its parameters have these names."""

    prompt: Sequence[Message]
    completion: Sequence[Message]
    """Everything after the prompt: the policy's turns and the environment's messages."""
    answer: str
    """The reference answer."""
    info: Mapping[str, object]
    """`Prompt.extra_info`."""
    task: str
    """The problem's data source."""
    counts: Mapping[str, float]


_VIEWS = tuple(EpisodeView.__dataclass_fields__)


class EpisodeScorer:
    """Measures episodes and weighs what was found.

    Raises ConfigError for a function that cannot be imported or asks for something else, and for a weight of a name
    that nothing measures; `counted` are the names that the environment counts. `scores_itself` says that grades may be
    the environment's own, which a demonstration has only once it is played.
    """

    def __init__(self, config: EpisodeScoring, counted: Sequence[str], *, scores_itself: bool = False) -> None:
        self._measures = {name: _loaded(name, path) for name, path in config.measures.items()}
        self._weights = config.weights
        self.needs_demonstrations = scores_itself or not config.is_answer_alone
        """Whether demonstrations are played, too, since their reward depends on more than their answer."""
        known = {ANSWER, TURNS, *counted, *self._measures}
        if twice := sorted({ANSWER, TURNS, *counted} & set(self._measures)):
            raise ConfigError(f"{_WHERE}.measures: the environment counts {twice[0]} already; choose another name")
        if unknown := sorted(set(self._weights) - known):
            raise ConfigError(f"{_WHERE}.weights: nothing measures {unknown[0]}; there are {', '.join(sorted(known))}")

    async def measure(self, view: EpisodeView) -> dict[str, float]:
        """Each measure of an episode. Passes on what a function raises; TypeError for a result that is no number."""
        return {name: await _measured(name, function, view) for name, function in self._measures.items()}

    def reward(self, answer: float, measures: Mapping[str, float]) -> float:
        """The weighted sum; `answer` is the grader's reward."""
        found = {**measures, ANSWER: answer}
        return sum(weight * found[name] for name, weight in self._weights.items())


def _loaded(name: str, path: str) -> Callable[..., object]:
    where = f"{_WHERE}.measures.{name}"
    function = imported_setting(path, where)
    if not callable(function):
        raise ConfigError(f"{where}: {path} is not a function")
    if unknown := sorted(set(inspect.signature(function).parameters) - set(_VIEWS)):
        raise ConfigError(f"{where}: {path} asks for {unknown[0]}; a measure may take {', '.join(_VIEWS)}")
    return function


async def _measured(name: str, function: Callable[..., object], view: EpisodeView) -> float:
    wanted = inspect.signature(function).parameters
    arguments = {parameter: _plain(getattr(view, parameter)) for parameter in wanted}
    # A function that computes for long must not hold up the other episodes.
    found = (
        await function(**arguments)
        if inspect.iscoroutinefunction(function)
        else await asyncio.to_thread(function, **arguments)
    )
    if not isinstance(found, Real) or not math.isfinite(found):
        raise TypeError(f"measure {name} returned {found!r:.80}, which is no finite number")
    return float(found)


def _plain(value: object) -> object:
    """Messages as mappings, which is what functions written for verifiers expect."""
    if isinstance(value, tuple | list) and all(isinstance(turn, Message) for turn in value):
        return [{"role": turn.role, "content": turn.content} for turn in value]
    return value
