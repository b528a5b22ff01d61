"""Teachers' episodes: each turn of a teacher that is paid for is saved before the environment sees it.

    chat = PaidChat(store, teacher, key, ask, max_response_tokens)
    episode = await player.play_one(start, chat, chat.recording)
    answer = text_episode_answer(start, episode, chat.used)

An episode that a kill interrupted is played again from its start: saved turns are not asked for again, each with the
environment's messages before it. So the conversation stays as the teacher saw it, even where a tool now answers
differently, and the same turns bring the live environment into its state.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from luffy.config.environment import CustomEnvironment, EnvironmentConfig, MixtureEnvironment
from luffy.config.strict import FOR_IDENTITY
from luffy.data.schema import joined_text
from luffy.environments.environment import Environment, ScoringEnvironment, received_messages
from luffy.environments.episodes import Context, Episode
from luffy.environments.live_episode import EpisodeStart, TextEpisode
from luffy.environments.transcript import trace_turns
from luffy.grading.request import Problem
from luffy.rollout.engine import Completion
from luffy.rollout.text_endpoint import TextCompletion, TextRequest
from luffy.stages.answers.paid import completion_in, paid_answer
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.synthesis.ledger import Usage
from luffy.types import FinishReason, Message, Prompt


class RefusedTurn(Exception):
    """The model declined to write a turn."""


class PaidChat:
    """A teacher's side of one episode, whose key in the store is `episode`. `ask` requests a turn that is not saved.

    Raises RefusedTurn if the model declines, and the errors of `ask`.
    """

    def __init__(
        self,
        store: AnswerStore,
        teacher: str,
        episode: str,
        ask: Callable[[TextRequest, int], Awaitable[tuple[TextCompletion, Usage]]],
        max_response_tokens: int,
    ) -> None:
        self.max_response_tokens = max_response_tokens
        self.used = Usage()
        """By all turns so far, those of earlier attempts included."""
        self._store = store
        self._teacher = teacher
        self._episode = episode
        self._ask = ask
        self._next = 0
        self._observed: Sequence[Message] = ()

    def recording(self, environment: Environment) -> Environment:
        """The environment, with the recorded answers to saved turns."""
        return RecordedEnvironment(environment, self)

    def observed(self, live: Sequence[Message] | None) -> Sequence[Message] | None:
        """What the environment writes before the next turn: as recorded, or as it is now."""
        known = self._store.get(self._key(self._next))
        if known is not None:
            return known.turns
        self._observed = live or ()
        return live

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion:
        """The next turn, saved or from the model."""
        turn, self._next = self._next, self._next + 1
        known = self._store.get(self._key(turn))
        if known is None:
            completion, used = await self._ask(request, max_tokens)
            known = paid_answer(completion, used.prompt_tokens, self._observed)
            self._store.add({self._key(turn): known}, self._teacher)
        self.used += Usage.of(known)
        if known.finish_reason is FinishReason.REFUSED:
            raise RefusedTurn
        return completion_in(known)

    def _key(self, turn: int) -> str:
        """The one of a turn, from 0. What the environment wrote before it is saved with it."""
        return hashlib.sha256(json.dumps([self._episode, "turn", turn]).encode()).hexdigest()


class RecordedEnvironment:
    """An environment of a chat, which answers as it did in an earlier attempt as far as that went."""

    def __init__(self, inner: Environment, chat: PaidChat) -> None:
        self._inner = inner
        self._chat = chat

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Begin the episode."""
        return self._chat.observed(received_messages("reset", await self._inner.reset(problem))) or ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        """The recorded answer to the newest turn, or the live one; the live environment sees every turn."""
        found = await self._inner.respond(conversation)
        return self._chat.observed(None if found is None else received_messages("respond", found))

    def counts(self) -> Mapping[str, float]:
        """Counts of the live environment."""
        return self._inner.counts()

    async def score(self, conversation: Sequence[Message]) -> None:
        """Score by the live environment, where it does so itself."""
        if isinstance(self._inner, ScoringEnvironment):
            await self._inner.score(conversation)

    async def close(self) -> None:
        """Close the live environment."""
        await self._inner.close()


_CALL_S = 600.0
"""What both limits of calls were before they could be set."""


def _unused(environment: EnvironmentConfig) -> dict[str, Any]:
    """Fields that the keys of earlier answers do not have, where they are not used: such an episode stays paid."""
    plain = {"group_measures": {}, "timeout_s": _CALL_S}
    unused: dict[str, Any] = {
        "scoring": {name for name, value in plain.items() if getattr(environment.scoring, name) == value}
    }
    if isinstance(environment, CustomEnvironment) and environment.timeout_s == _CALL_S:
        unused["timeout_s"] = True
    if isinstance(environment, MixtureEnvironment):
        unused["parts"] = {name: {"environment": _unused(part.environment)} for name, part in environment.parts.items()}
    return unused


def episode_key(first_turn: str, prompt: Prompt, environment: EnvironmentConfig | None) -> str:
    """Hash of everything that an episode depends on: `first_turn` is the key of its first request."""
    played = ""
    if environment is not None:
        played = environment.model_dump_json(context=FOR_IDENTITY, exclude=_unused(environment))
    problem = [prompt.uid, prompt.ground_truth, prompt.grader, prompt.extra_info]
    asked = json.dumps([first_turn, problem, played], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def text_episode_answer(start: EpisodeStart, episode: TextEpisode, used: Usage) -> ModelAnswer:
    """An episode in text; `used` by all of its turns. DataError where the environment spoke before the teacher."""
    return _answer(start, episode, used)


def token_episode_answer(start: EpisodeStart, episode: Episode) -> ModelAnswer:
    """An episode in tokens. Each turn reads the whole conversation before it, which counts as its prompt."""
    used, place = Usage(), len(episode.prompt_ids)
    for segment in episode.segments:
        if isinstance(segment, Context):
            place = 0  # it begins with the prompt
        elif isinstance(segment, Completion):
            used += Usage(place, len(segment.token_ids))
        place += len(segment.token_ids)
    return _answer(start, episode, used)


def _answer(start: EpisodeStart, episode: TextEpisode | Episode, used: Usage) -> ModelAnswer:
    return ModelAnswer(
        joined_text(episode.completion),
        used.num_tokens,
        episode.finish_reason,
        turns=trace_turns(episode.completion, start.problem.data_source),
        measures=episode.measures,
        prompt_tokens=used.prompt_tokens,
        fault=episode.fault,
    )
