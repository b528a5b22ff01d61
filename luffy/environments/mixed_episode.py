"""Several environments in one run: each prompt is played by the part that names its data source.

Counts are the part's own under its name, `tools/tool_calls`, and `part/<name>` is 1 for the part that played and 0 for
the others.
"""

from collections.abc import Mapping, Sequence

from luffy.data.row_filters import unplayed_source
from luffy.environments.environment import Environment, EnvironmentFactory, ScoringEnvironment
from luffy.grading.request import Problem
from luffy.types import PART_MEASURE, Message


class MixedEpisode:
    """An episode of one of several parts; `sources` says which part plays a data source."""

    def __init__(self, parts: Mapping[str, EnvironmentFactory], sources: Mapping[str, str]) -> None:
        self._parts = parts
        self._sources = sources
        self._name = ""
        self._played: Environment | None = None

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Begin the episode of the problem's part; DataError where no part plays its data source."""
        name = self._sources.get(problem.data_source)
        if name is None:
            raise unplayed_source(problem.data_source, self._sources)
        self._name, self._played = name, self._parts[name]()
        return await self._played.reset(problem)

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """The part's answer."""
        assert self._played is not None, "reset comes first"
        return await self._played.respond(conversation)

    def counts(self) -> Mapping[str, float]:
        """The part's counts under its name; before the episode begins, those of all parts."""
        played = {name: make() for name, make in self._parts.items()} if self._played is None else {}
        if self._played is not None:
            played[self._name] = self._played
        which = {f"{PART_MEASURE}{name}": float(name == self._name) for name in self._parts}
        counted = {name: each.counts().items() for name, each in played.items()}
        return which | {f"{name}/{count}": value for name, items in counted.items() for count, value in items}

    async def score(self, conversation: Sequence[Message]) -> None:
        """Score by the part, where it does so itself."""
        if isinstance(self._played, ScoringEnvironment):
            await self._played.score(conversation)

    async def close(self) -> None:
        """Free what the part holds; nothing where the episode never began."""
        if self._played is not None:
            await self._played.close()

    @property
    def scores_itself(self) -> bool:
        """Whether a part scores its own episodes."""
        return any(isinstance(make(), ScoringEnvironment) for make in self._parts.values())
