"""Opens environments, and players of their episodes, from the configuration of an environment.

A new kind needs a config class in `luffy/config/environment.py`, added to its union, and an entry in `_FACTORIES`.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import (
    CustomEnvironment,
    EnvironmentConfig,
    GuessNumberEnvironment,
    MixtureEnvironment,
    ToolsEnvironment,
    VerifiersEnvironment,
    single_environments,
)
from luffy.data.conversations import ConversationEncoder
from luffy.data.row_filters import unplayed_source
from luffy.environments.call_formats import CALL_FORMATS
from luffy.environments.environment import Environment, EnvironmentFactory, ScoringEnvironment
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.guess_number import GuessingGame
from luffy.environments.limits import with_time_limit
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.text_episodes import TextEpisodePlayer
from luffy.environments.tool_functions import Tool, load_tools
from luffy.environments.tools import SandboxOfLoop, ToolEpisode, ToolRunner, python_tool
from luffy.environments.verifiers_episode import VerifiersEpisode, hosted_tools
from luffy.errors import ConfigError, DataError
from luffy.grading.judge import Judges
from luffy.grading.request import Problem
from luffy.hosted.verifiers_process import shared_process
from luffy.import_paths import imported_setting
from luffy.sandbox import open_sandbox
from luffy.types import PART_MEASURE, Message

_FACTORY = "environment.factory"
_AWAITED = ("reset", "respond", "close")


def open_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Return the factory that makes an environment per episode; ConfigError when the user's code cannot be used."""
    return _FACTORIES[type(config)](config)


def instructions_of(config: EnvironmentConfig) -> str:
    """Return the text that the system message of every prompt ends with, "" for none; ConfigError as above."""
    match config:
        case ToolsEnvironment():
            return _described(config, _loaded(config)) if config.describe else ""
        case CustomEnvironment():
            return config.instructions
        case VerifiersEnvironment():
            tools = hosted_tools(shared_process(config).description, config.calls)
            return CALL_FORMATS[config.calls].instructions(tools) if config.describe and tools else ""
        case GuessNumberEnvironment():
            return ""  # the prompt has the rules
    raise AssertionError(f"the parts of a {type(config).__name__} have instructions of their own")


def instructions_by_source(config: EnvironmentConfig) -> dict[str | None, str]:
    """Return `instructions_of` for each data source that a mixture plays; without a mixture, for all under None."""
    if not isinstance(config, MixtureEnvironment):
        return {None: instructions_of(config)}
    found = {name: instructions_of(part.environment) for name, part in config.parts.items()}
    return {source: found[name] for source, name in config.sources.items()}


def _tools(config: ToolsEnvironment) -> EnvironmentFactory:
    tools = _loaded(config)
    if "python" in config.tools:
        asyncio.run(open_sandbox(config.sandbox))  # refused now, not in the first episode
    _described(config, tools)  # refuses tools that cannot be called in this format
    runner = ToolRunner()
    return lambda: ToolEpisode(config, tools, runner)


def _loaded(config: ToolsEnvironment) -> Mapping[str, Tool]:
    sandbox = SandboxOfLoop(config.sandbox)
    return load_tools(config.tools, "environment.tools", {"python": python_tool(sandbox.open_session)})


def _described(config: ToolsEnvironment, tools: Mapping[str, Tool]) -> str:
    return CALL_FORMATS[config.calls].instructions({name: tool.schema for name, tool in tools.items()})


def _custom(config: CustomEnvironment) -> EnvironmentFactory:
    made = imported_setting(config.factory, _FACTORY)
    if not isinstance(made, type):
        raise ConfigError(f"{_FACTORY}: {config.factory} is a {type(made).__name__}; it has to be a class")
    for name in _AWAITED:
        if not inspect.iscoroutinefunction(getattr(made, name, None)):
            raise ConfigError(
                f"{_FACTORY}: {config.factory} needs `async def {name}`; see luffy.environments.Environment"
            )
    if not callable(counts := getattr(made, "counts", None)) or inspect.iscoroutinefunction(counts):
        raise ConfigError(f"{_FACTORY}: {config.factory} needs `def counts`; see luffy.environments.Environment")
    try:
        inspect.signature(made).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"{_FACTORY}: {config.factory} does not take environment.options: {error}") from None
    try:
        dict(made(**config.options).counts())  # one environment, as a test
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{_FACTORY}: {config.factory} fails before the first episode: {type(error).__name__}: {error}"
        ) from error
    return lambda: with_time_limit(cast(Environment, made(**config.options)), config.timeout_s)


def _verifiers(config: VerifiersEnvironment) -> EnvironmentFactory:
    tools = hosted_tools(shared_process(config).description, config.calls)
    CALL_FORMATS[config.calls].instructions(tools)  # refuses tools that cannot be called in this format
    return lambda: VerifiersEpisode(shared_process(config), CALL_FORMATS[config.calls], tools)


def _mixture(config: MixtureEnvironment) -> EnvironmentFactory:
    parts = {name: open_environment(part.environment) for name, part in config.parts.items()}
    sources = config.sources
    return lambda: MixedEpisode(parts, sources)


_FACTORIES: Mapping[type, Callable[[Any], EnvironmentFactory]] = {
    ToolsEnvironment: _tools,
    GuessNumberEnvironment: lambda config: GuessingGame,
    CustomEnvironment: _custom,
    VerifiersEnvironment: _verifiers,
    MixtureEnvironment: _mixture,
}


class MixedEpisode:
    """An episode of one of several parts: that which plays the prompt's data source, as `sources` has it.

    Counts are the part's own under its name, `tools/tool_calls`, and `part/<name>` is 1 for the part that played and 0
    for the others.
    """

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


def open_player(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, lanes: int, judges: Judges
) -> EpisodePlayer:
    """A player of the environment's episodes; `lanes` as in `EpisodePlayer`, `judges` for measures that need one.

    Raises ConfigError for an environment that cannot be loaded, and DataError for a chat template that rewrites earlier
    turns or cannot write the results of tools.
    """
    encoder = ConversationEncoder(tokenizer, config.limits.history)
    check_template(config, encoder)
    make, scorer = open_scored(config, judges)
    return EpisodePlayer(make, encoder, config.limits, scorer, lanes)


def check_template(config: EnvironmentConfig, encoder: ConversationEncoder) -> None:
    """Raise DataError where the chat template cannot write the results of one call, or of two, of a tool."""
    for single in single_environments(config):
        if not isinstance(single, ToolsEnvironment | VerifiersEnvironment):
            continue
        if isinstance(single, VerifiersEnvironment) and not shared_process(single).description.tools:
            continue
        syntax = CALL_FORMATS[single.calls]
        for results in (["0"], ["0", "0"]):
            answer = syntax.results(results)
            try:
                encoder.between(answer)
            except DataError as error:
                role = answer[0].role
                raise DataError(
                    f"environment.calls: results of tools are messages of the role {role}: {error}"
                ) from None


def open_text_player(config: EnvironmentConfig, judges: Judges) -> TextEpisodePlayer:
    """A player for models that answer with text; ConfigError for an environment that cannot be loaded."""
    make, scorer = open_scored(config, judges)
    return TextEpisodePlayer(make, config.limits, scorer)


def open_scored(config: EnvironmentConfig, judges: Judges | None = None) -> tuple[EnvironmentFactory, EpisodeScorer]:
    """The factory of environments and the scorer of their episodes; ConfigError where one cannot be loaded."""
    make = open_environment(config)
    environment = make()
    scores_itself = isinstance(environment, ScoringEnvironment)
    if isinstance(environment, MixedEpisode):
        scores_itself = environment.scores_itself
    counted = tuple(environment.counts())
    of_parts = counted if isinstance(environment, MixedEpisode) else ()
    scorer = EpisodeScorer(config.scoring, counted, scores_itself=scores_itself, judges=judges, of_parts=of_parts)
    return make, scorer
