"""An episode with an environment of the package verifiers, which runs in a process of its own."""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import cast

from luffy.config.environment import CallFormat
from luffy.environments.call_formats import BrokenCall, CallSyntax, Tools
from luffy.environments.environment import writable
from luffy.environments.tool_functions import json_types, parameters_of
from luffy.errors import ConfigError, DataError, LuffyError
from luffy.grading.request import Problem
from luffy.hosted.verifiers_process import HostedDescription, VerifiersProcess
from luffy.types import Message

logger = logging.getLogger(__name__)

TASK = "verifiers_task"
"""Key of `extra_info` that says which task of the environment a prompt is."""
_REWARD = "reward"
_ANSWERED = "tool"
_WRITTEN_BY_POLICY = "assistant"


def hosted_tools(description: HostedDescription, calls: CallFormat) -> Tools:
    """The environment's tools by name; ConfigError where they cannot be called in this format."""
    tools = {str(schema["function"]["name"]): dict(schema) for schema in description.tools}
    for tool, schema in tools.items() if calls == "xml" else ():
        for name, parameter in parameters_of(schema).items():
            try:
                json_types(parameter)
            except (KeyError, TypeError):
                raise ConfigError(
                    f"environment.calls: xml cannot write `{name}` of the environment's tool {tool}, whose type is not "
                    "plain; choose hermes"
                ) from None
    return tools


class VerifiersEpisode:
    """One episode: the environment answers the turns, and scores the episode at the end."""

    def __init__(self, process: VerifiersProcess, syntax: CallSyntax, tools: Tools) -> None:
        self._process = process
        self._syntax = syntax
        self._tools = tools
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
        """End the episode in the environment's process."""
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
            for call in (self._syntax.parse(text, self._tools) if self._tools else ())
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
