"""Measures of finished episodes, and their weighted sum, the reward."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from luffy.config.environment import ANSWER, EpisodeScoring, JudgeMeasure
from luffy.environments.environment import finite_number
from luffy.environments.limits import LimitedCalls
from luffy.errors import ConfigError, LostError
from luffy.grading.extract import final_reply
from luffy.grading.judge import Judges
from luffy.grading.request import TOKENS, JudgeRequest
from luffy.import_paths import imported_setting
from luffy.types import Message, Outcome

_WHERE = "environment.scoring"
_MEASURES_AT_ONCE = 16
TURNS = "turns"
"""Counted in every episode: the policy's turns, given ones included."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """Input of a measure, whose parameters are named like these fields; `**kwargs` takes all others."""

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
_Function = Callable[..., object]


class NoVerdict(Exception):
    """A judge was asked about an episode and gave no verdict; the message is the reason."""


class EpisodeScorer:
    """Measures episodes and computes their reward as a weighted sum.

    Raises ConfigError for a function that cannot be imported or has other parameters, and for a weight of a name that
    nothing measures. `counted` are the names that the environment counts, `of_parts` those of them that only one part
    of a mixture counts; they are 0 in episodes of other parts. `scores_itself`: the environment grades episodes itself,
    so demonstrations have to be played to be graded. `judges` sends the requests to judges.
    """

    def __init__(
        self,
        config: EpisodeScoring,
        counted: Sequence[str],
        *,
        scores_itself: bool = False,
        judges: Judges | None = None,
        of_parts: Sequence[str] = (),
    ) -> None:
        functions = {name: path for name, path in config.measures.items() if isinstance(path, str)}
        self._measures = {name: _loaded(f"measures.{name}", path) for name, path in functions.items()}
        self._judged = {name: kind for name, kind in config.measures.items() if isinstance(kind, JudgeMeasure)}
        self._judges = judges
        self._calls = LimitedCalls(f"{_WHERE}.timeout_s", _MEASURES_AT_ONCE)
        self._timeout_s = config.timeout_s
        self._weights = config.weights
        self._of_parts = frozenset(of_parts)
        self._weighted_counts = self._weights.keys() & (set(counted) - self._of_parts)
        self.needs_demonstrations = scores_itself or not config.is_answer_alone
        """Whether demonstrations are played, too, since their reward depends on more than their answer."""
        known = {ANSWER, TURNS, TOKENS, *counted, *config.measures}
        if twice := sorted({ANSWER, TURNS, TOKENS, *counted} & config.measures.keys()):
            raise ConfigError(f"{_WHERE}.measures: the environment counts {twice[0]} already; choose another name")
        if unknown := sorted(set(self._weights) - known):
            raise ConfigError(f"{_WHERE}.weights: nothing measures {unknown[0]}; there are {', '.join(sorted(known))}")

    async def measure(self, view: EpisodeView) -> dict[str, float]:
        """All measures of an episode.

        Passes on exceptions of the functions; raises LateCall for one that does not end in time, TypeError for a result
        that is not a number and for a weighted count that is missing, NoVerdict for a judge's reply without a verdict,
        LostError for a judge that cannot be reached.
        """
        if missing := sorted(self._weighted_counts - view.counts.keys()):
            raise TypeError(f"counts returned no {missing[0]}, which {_WHERE}.weights names")
        found = {
            name: finite_number(f"measure {name}", await self._result(name, function, view))
            for name, function in self._measures.items()
        }
        return found | {name: await self._judgement(name, kind, view) for name, kind in self._judged.items()}

    def reward(self, answer: float, measures: Mapping[str, float]) -> float:
        """The weighted sum; `answer` is the grader's reward."""
        found = {**measures, ANSWER: answer}
        weights = self._weights.items()
        return sum(weight * found[name] for name, weight in weights if name in found or name not in self._of_parts)

    async def _result(self, name: str, function: _Function, view: EpisodeView) -> object:
        self._calls.refuse_when_full()
        named = _named(function)
        takes_all = len(named) < len(inspect.signature(function).parameters)
        wanted = view.__dataclass_fields__ if takes_all else named
        call = partial(function, **{parameter: _plain(getattr(view, parameter)) for parameter in wanted})
        if inspect.iscoroutinefunction(function):
            awaited = cast(Callable[[], Awaitable[object]], call)
            return (await self._calls.in_loop(f"measure {name}", awaited, self._timeout_s)).result()
        # A function that computes for long must not hold up the other episodes.
        return (await self._calls.in_thread(f"measure {name}", call, self._timeout_s)).result()

    async def _judgement(self, name: str, kind: JudgeMeasure, view: EpisodeView) -> float:
        assert self._judges is not None, "judges are opened with the player"
        question = next((turn.content for turn in reversed(view.prompt) if turn.role == "user"), "")
        shown = "\n\n".join(f"{turn.role}: {turn.content}" for turn in view.completion)
        if kind.shows == "reply":
            turns = [turn.content for turn in view.completion if turn.role == "assistant"]
            shown = (final_reply(turns[-1]) or "").strip() if turns else ""
        grade = await asyncio.wrap_future(self._judges.submit(JudgeRequest(kind.grader, shown, view.answer, question)))
        if grade.is_unjudged:
            raise LostError(f"measure {name}: {grade.reason}; the same command continues")
        if grade.outcome not in (Outcome.CORRECT, Outcome.WRONG):
            raise NoVerdict(f"measure {name}: {grade.reason}")
        return float(grade.outcome is Outcome.CORRECT)


def _loaded(name: str, path: str) -> _Function:
    where = f"{_WHERE}.{name}"
    function = imported_setting(path, where)
    if not callable(function):
        raise ConfigError(f"{where}: {path} is not a function")
    try:
        named = _named(function)
    except ValueError:
        raise ConfigError(f"{where}: {path} does not tell its parameters; call it in a function of your own") from None
    if unknown := sorted(named - set(_VIEWS)):
        raise ConfigError(f"{where}: {path} asks for {unknown[0]}; a measure may take {', '.join(_VIEWS)}")
    return function


def _named(function: _Function) -> set[str]:
    """Names of the parameters, without `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def _plain(value: object) -> object:
    """Messages as mappings, which is what functions written for verifiers expect."""
    if isinstance(value, Message):
        return {"role": value.role, "content": value.content}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
