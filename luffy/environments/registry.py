"""Opens environments, and players of their episodes, from the configuration of an environment.

A new kind needs a config class in `luffy/config/environment.py`, added to its union, and a case in `open_environment`
and in `instructions_of`.
"""

import asyncio
import inspect
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import cast

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
from luffy.environments.call_formats import CALL_FORMATS, BrokenCall, CallSyntax
from luffy.environments.environment import Environment, EnvironmentFactory, ScoringEnvironment, writable
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.guess_number import GuessingGame
from luffy.environments.limits import with_time_limit
from luffy.environments.live_episode import TextEpisodePlayer
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.tool_functions import Tool, load_tools
from luffy.environments.tools import ToolEpisode, ToolRunner, python_tool
from luffy.errors import ConfigError, DataError, LuffyError
from luffy.grading.judge import Judges
from luffy.grading.request import Problem
from luffy.hosted.verifiers_process import VerifiersProcess, shared_process
from luffy.import_paths import imported_setting
from luffy.sandbox import SandboxOfLoop, open_sandbox
from luffy.types import PART_MEASURE, Message

logger = logging.getLogger(__name__)

TASK = "verifiers_task"
"""Key of `extra_info` that says which task of the environment a prompt is."""
_REWARD = "reward"
_ANSWERED = "tool"
_WRITTEN_BY_POLICY = "assistant"
_FACTORY = "environment.factory"
_AWAITED = ("reset", "respond", "close")


def open_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Return the factory that makes an environment per episode; ConfigError when the user's code cannot be used."""
    match config:
        case ToolsEnvironment():
            tools = _loaded(config)
            if "python" in config.tools:
                asyncio.run(open_sandbox(config.sandbox))  # refused now, not in the first episode
            runner = ToolRunner()
            return lambda: ToolEpisode(config, tools, runner)
        case GuessNumberEnvironment():
            return GuessingGame
        case CustomEnvironment():
            return _custom(config)
        case VerifiersEnvironment():
            shared_process(config)  # refused now, not in the first episode
            return lambda: VerifiersEpisode(shared_process(config), CALL_FORMATS[config.calls])
        case MixtureEnvironment():
            parts = {name: open_environment(part.environment) for name, part in config.parts.items()}
            return lambda: MixedEpisode(parts, config.sources)


def instructions_of(config: EnvironmentConfig) -> str:
    """Return the text that the system message of every prompt ends with, "" for none; ConfigError as above."""
    match config:
        case ToolsEnvironment():
            schemas = {name: tool.schema for name, tool in _loaded(config).items()} if config.describe else {}
            return CALL_FORMATS[config.calls].instructions(schemas) if schemas else ""
        case CustomEnvironment():
            return config.instructions
        case VerifiersEnvironment():
            tools = {tool["function"]["name"]: dict(tool) for tool in shared_process(config).description.tools}
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


def _loaded(config: ToolsEnvironment) -> Mapping[str, Tool]:
    sandbox = SandboxOfLoop(config.sandbox)
    return load_tools(config.tools, "environment.tools", {"python": python_tool(sandbox.open_session)})


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
        assert self._played is not None, "reset comes first"
        return await self._played.respond(conversation)

    def counts(self) -> Mapping[str, float]:
        """The part's counts under its name; before the episode begins, those of all parts."""
        parts = self._parts.items()
        played = {name: make() for name, make in parts} if self._played is None else {self._name: self._played}
        which = {f"{PART_MEASURE}{name}": float(name == self._name) for name in self._parts}
        counted = {name: each.counts().items() for name, each in played.items()}
        return which | {f"{name}/{count}": value for name, items in counted.items() for count, value in items}

    async def score(self, conversation: Sequence[Message]) -> None:
        if isinstance(self._played, ScoringEnvironment):
            await self._played.score(conversation)

    async def close(self) -> None:
        if self._played is not None:
            await self._played.close()

    @property
    def scores_itself(self) -> bool:
        """Whether a part scores its own episodes."""
        return any(isinstance(make(), ScoringEnvironment) for make in self._parts.values())


class VerifiersEpisode:
    """One episode: the environment answers the turns, and scores the episode at the end."""

    def __init__(self, process: VerifiersProcess, syntax: CallSyntax) -> None:
        self._process = process
        self._syntax = syntax
        self._number: int | None = None
        self._num_seen = 0
        """Messages of the conversation that the environment knows."""
        self._scores = dict.fromkeys((_REWARD, *process.description.functions), 0.0)

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Begin the task that the problem names; DataError where it names none, or one that has changed."""
        task = problem.extra_info.get(TASK)
        if not isinstance(task, dict) or task.keys() != {"split", "row", "digest"}:
            raise DataError(
                f"{problem.data_source}: environment.kind: verifiers plays the prompts of a source of kind: verifiers; "
                f"this one has no extra_info.{TASK}"
            )
        self._number = self._process.new_episode()
        return self._messages(await self._process.awaited("reset", episode=self._number, **task))

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """Pass the newest turn on; HostedFault where the environment fails."""
        return await self._respond(conversation, is_cut=False)

    async def score(self, conversation: Sequence[Message]) -> None:
        """Have the environment score the episode; a last turn that was cut is part of it."""
        if len(conversation) > self._num_seen and conversation[-1].role == _WRITTEN_BY_POLICY:
            await self._respond(conversation, is_cut=True)
        found = cast(Mapping[str, object], await self._process.awaited("score", episode=self._number))
        self._scores |= cast(Mapping[str, float], found["metrics"])
        self._scores[_REWARD] = cast(float, found[_REWARD])

    def counts(self) -> Mapping[str, float]:
        """The reward, and the value of each reward function by its name; 0 until the episode is scored."""
        return dict(self._scores)

    async def close(self) -> None:
        if self._number is None:
            return
        try:
            await self._process.awaited("close", episode=self._number)
        except LuffyError as fault:  # the episode has its outcome already
            logger.debug("closing an episode: %s", fault)

    async def _respond(self, conversation: Sequence[Message], *, is_cut: bool) -> Sequence[Message] | None:
        self._num_seen = len(conversation)
        text = conversation[-1].content
        calls = [
            # The environment answers a broken call as it answers arguments that are not JSON.
            {"name": "", "arguments": call.reason}
            if isinstance(call, BrokenCall)
            else {"name": call.name, "arguments": json.dumps(call.arguments)}
            for call in (self._syntax.parse(text) if self._process.description.tools else ())
        ]
        found = await self._process.awaited("respond", episode=self._number, text=text, calls=calls, is_cut=is_cut)
        return None if found is None else self._messages(found)

    def _messages(self, found: object) -> list[Message]:
        """The environment's messages, with results of tools as the policy's format has them."""
        messages: list[Message] = []
        sent = [Message(each["role"], writable(each["content"])) for each in cast(list[dict[str, str]], found)]
        for is_result, group in itertools.groupby(sent, key=lambda message: message.role == _ANSWERED):
            run = list(group)
            messages += self._syntax.results([message.content for message in run]) if is_result else run
        return messages


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
