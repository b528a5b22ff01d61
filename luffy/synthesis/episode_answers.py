"""Teachers' episodes: each turn of a teacher that is paid for is in the log before the environment sees it.

    chat = PaidChat(turns, ask, max_response_tokens)
    episode = await player.play_one(start, chat, chat.recording)
    answer = text_episode_answer(start, episode, chat.used)

An episode that a kill interrupted is played again from its start: turns in the log are taken from there, each with the
environment's messages before it. So the conversation stays as the teacher saw it, even where a tool now answers
differently, and the same turns bring the live environment into its state.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from luffy.config.environment import EnvironmentConfig
from luffy.config.strict import FOR_IDENTITY
from luffy.data.schema import joined_text
from luffy.environments.environment import Environment, ScoringEnvironment, received_messages
from luffy.environments.episodes import Context, Episode
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.text_episodes import TextEpisode
from luffy.environments.transcript import trace_turns
from luffy.grading.request import Problem
from luffy.rollout.engine import Completion
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import TextRequest
from luffy.synthesis.answer_log import AnswerLog, AnswerStatus, TeacherAnswer
from luffy.synthesis.ledger import Usage
from luffy.types import FinishReason, Message, Prompt

_STATUS = {
    FinishReason.STOP: AnswerStatus.COMPLETE,
    FinishReason.LENGTH: AnswerStatus.TRUNCATED,
    FinishReason.TURN_LENGTH: AnswerStatus.TRUNCATED,
    FinishReason.TURNS: AnswerStatus.OUT_OF_TURNS,
    FinishReason.ENVIRONMENT_ERROR: AnswerStatus.CRASHED,
}


class RefusedTurn(Exception):
    """The model declined to write a turn."""


@dataclass(frozen=True, slots=True)
class PaidTurns:
    """The turns of one episode in the log, from 0. `episode` is the episode's key there."""

    log: AnswerLog
    teacher: str
    episode: str

    def find(self, turn: int) -> TeacherAnswer | None:
        """The turn, with what the environment wrote before it; None where it was not paid for yet."""
        key = self._key(turn)
        return self.log.read(key) if self.log.find(key) is not None else None

    def add(self, turn: int, answer: TeacherAnswer) -> None:
        """Save a turn; it survives a power cut as soon as this returns."""
        self.log.add(self.teacher, {self._key(turn): answer})

    def _key(self, turn: int) -> str:
        return hashlib.sha256(json.dumps([self.episode, "turn", turn]).encode()).hexdigest()


class PaidChat:
    """A teacher's side of one episode. `ask` requests a turn that is not in the log.

    Raises RefusedTurn if the model declines, and the errors of `ask`.
    """

    def __init__(
        self,
        turns: PaidTurns,
        ask: Callable[[TextRequest, int], Awaitable[tuple[TextCompletion, Usage]]],
        max_response_tokens: int,
    ) -> None:
        self.max_response_tokens = max_response_tokens
        self.used = Usage()
        """By all turns so far, those of earlier attempts included."""
        self._turns = turns
        self._ask = ask
        self._next = 0
        self._observed: Sequence[Message] = ()

    def recording(self, environment: Environment) -> Environment:
        """The environment, with the recorded answers to turns that the log has."""
        return RecordedEnvironment(environment, self)

    def observed(self, live: Sequence[Message] | None) -> Sequence[Message] | None:
        """What the environment writes before the next turn: as recorded, or as it is now."""
        known = self._turns.find(self._next)
        if known is not None:
            return known.turns
        self._observed = live or ()
        return live

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion:
        """The next turn, from the log or from the model."""
        turn, self._next = self._next, self._next + 1
        known = self._turns.find(turn)
        if known is None:
            completion, used = await self._ask(request, max_tokens)
            known = _turn_answer(completion, used, self._observed)
            self._turns.add(turn, known)
        self.used += Usage(known.prompt_tokens, known.num_tokens)
        if known.status is AnswerStatus.REFUSED:
            raise RefusedTurn
        reason = FinishReason.STOP if known.status is AnswerStatus.COMPLETE else FinishReason.LENGTH
        return TextCompletion(known.text, known.num_tokens, reason, known.prompt_tokens)


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


def episode_key(first_turn: str, prompt: Prompt, environment: EnvironmentConfig | None) -> str:
    """Hash of everything that an episode depends on: `first_turn` is the key of its first request."""
    played = environment.model_dump_json(context=FOR_IDENTITY) if environment is not None else ""
    problem = [prompt.uid, prompt.ground_truth, prompt.grader, prompt.extra_info]
    asked = json.dumps([first_turn, problem, played], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def text_episode_answer(start: EpisodeStart, episode: TextEpisode, used: Usage) -> TeacherAnswer:
    """An episode in text; `used` by all of its turns. DataError where the environment spoke before the teacher."""
    return _answer(start, episode, used)


def token_episode_answer(start: EpisodeStart, episode: Episode) -> TeacherAnswer:
    """An episode in tokens. Each turn reads the whole conversation before it, which counts as its prompt."""
    used, place = Usage(), len(episode.prompt_ids)
    for segment in episode.segments:
        if isinstance(segment, Context):
            place = 0  # it begins with the prompt
        elif isinstance(segment, Completion):
            used += Usage(place, len(segment.token_ids))
        place += len(segment.token_ids)
    return _answer(start, episode, used)


def _answer(start: EpisodeStart, episode: TextEpisode | Episode, used: Usage) -> TeacherAnswer:
    status = _STATUS[episode.finish_reason]
    turns = trace_turns(episode.completion, start.problem.data_source)
    return TeacherAnswer(
        joined_text(episode.completion),
        status,
        used.prompt_tokens,
        used.num_tokens,
        turns=turns,
        measures=episode.measures,
        reason=episode.fault,
    )


def _turn_answer(completion: TextCompletion, used: Usage, observed: Sequence[Message]) -> TeacherAnswer:
    is_complete = completion.finish_reason is FinishReason.STOP
    status = AnswerStatus.COMPLETE if is_complete else AnswerStatus.TRUNCATED
    if completion.is_refusal:
        status = AnswerStatus.REFUSED
    return TeacherAnswer(completion.text, status, used.prompt_tokens, used.num_tokens, turns=tuple(observed))
