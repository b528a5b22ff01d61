"""A teacher on an OpenAI-compatible server: concurrent questions, each answer saved as it arrives."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from luffy.config.execution import ServerConfig
from luffy.environments.limits import refuse_failures
from luffy.environments.text_episodes import CHARACTERS_PER_TOKEN, TextEpisodePlayer
from luffy.errors import EnvironmentFault, LuffyError, UserError
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import CHAT, RequestRejected, TextEndpoint, TextRequest, UnreadableAnswer
from luffy.stop_request import StoppedOnRequest, stop_is_requested
from luffy.synthesis.answer_log import AnswerStatus, TeacherAnswer
from luffy.synthesis.episode_answers import (
    PaidChat,
    PaidTurns,
    RefusedTurn,
    episode_key,
    text_episode_answer,
)
from luffy.synthesis.ledger import Usage
from luffy.synthesis.teachers import Desk, Question, answer_without_text, start_of
from luffy.types import FinishReason, Message

_HALF_ANSWERS = 3
"""Attempts to get a complete answer, where the endpoint returns incomplete ones."""
_FAILED_IN_A_ROW, _UNANSWERED_IN_A_ROW = 8, 64
"""So many failures, or questions without an answer for any reason, with no answer in between, count as a fault of the
endpoint. The second limit is higher: an endpoint rejects single prompts that are too long, and all prompts when the
account is empty."""
_TOKENS_OF_TURN = 32
"""Bound for the tokens that a chat template puts around a message."""


class EndpointTeacher:
    """Asks an endpoint. A question that fails, or is rejected, while others are answered has that as its outcome.

    Where none is answered, the fault is the endpoint's: `ask` raises it, and the unanswered questions are asked again
    when the stage resumes. With a `player` an answer is an episode, each turn of which is saved as it arrives.
    """

    def __init__(self, desk: Desk, server: ServerConfig, player: TextEpisodePlayer | None = None) -> None:
        setting = f"execution.teachers.{desk.name}"
        assert desk.config.endpoint is not None
        self._desk = desk
        self._endpoint = TextEndpoint.connect(desk.config.endpoint, server, (CHAT,), None, setting)
        self._has_answered = desk.log.has_answered(desk.name)
        self._unanswered: list[tuple[str, TeacherAnswer, LuffyError]] = []
        """Since the last answer; not in the log yet."""
        self._player = player
        self._crashed: dict[str, TeacherAnswer] = {}
        """Episodes in which the environment failed. `ask` logs them at its end unless there are too many: then the
        stage ends, and with the environment corrected it plays the same turns again."""
        self._fault: LuffyError | None = None

    def ask(self, questions: Sequence[Question]) -> list[str]:
        """Send questions concurrently, up to the server's `concurrency` and the budget.

        Raises ConfigError where the endpoint refuses the key, the model or every request, LostError where it is gone,
        and EnvironmentFault where the environment fails in too many episodes.
        """
        try:
            keys = self._endpoint.run(self._ask(questions))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # such as a full disk, from one of the tasks
        if self._unanswered and not self._has_answered:
            self._fault = self._fault or self._unanswered[0][2]
        if self._fault is not None:
            raise self._fault
        self._save_unanswered()
        self._save_crashed(keys)
        return keys

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    async def _ask(self, questions: Sequence[Question]) -> list[str]:
        desk, keys, running = self._desk, list[str](), set[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as group:
            for question in questions:
                while running and (len(running) >= self._endpoint.concurrency or desk.ledger.may_be_spent):
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if stop_is_requested():
                    self._fault = self._fault or StoppedOnRequest("all answers that had been requested are kept")
                if self._fault is not None or desk.ledger.is_spent:
                    break
                request = TextRequest(desk.messages(question.asked_prompt), question.seed)
                key = self._endpoint.key_of(request, desk.params())
                key = key if self._player is None else episode_key(key, question.prompt, desk.environment)
                keys.append(key)
                if not desk.take(key):
                    desk.ledger.reserve(desk.name, self._most(request))
                    running.add(group.create_task(self._answer(question, request, key)))
        return keys

    async def _answer(self, question: Question, request: TextRequest, key: str) -> None:
        """Send one question and save its answer; an error is stored for `ask` to raise."""
        desk = self._desk
        chat = PaidChat(PaidTurns(desk.log, desk.name, key), self._turn, desk.config.max_response_tokens)
        try:
            answer = await self._answered(question, request, chat)
            if answer.status is AnswerStatus.CRASHED:
                self._crashed[key] = answer
            else:
                desk.log.add(desk.name, {key: answer})
        except RequestRejected as error:
            self._miss(key, AnswerStatus.REFUSED, chat.used, error)
        except (UserError, EnvironmentFault) as error:
            self._fault = error
        except LuffyError as error:
            self._miss(key, AnswerStatus.FAILED, chat.used, error)
        finally:
            desk.ledger.settle(desk.name, chat.used, self._most(request))
        desk.answered(1)

    async def _answered(self, question: Question, request: TextRequest, chat: PaidChat) -> TeacherAnswer:
        """The answer: a single turn, or an episode whose first turn has this request."""
        if self._player is None:
            completion, chat.used = await self._turn(request, self._desk.config.max_response_tokens)
            return _answer_of(completion, chat.used)
        assert not isinstance(request.prompt, str)
        start = start_of(question, request.prompt)
        try:
            episode = await self._player.play_one(start, chat, chat.recording)
        except RefusedTurn:
            return answer_without_text(AnswerStatus.REFUSED, chat.used)
        return text_episode_answer(start, episode, chat.used)

    async def _turn(self, request: TextRequest, max_tokens: int) -> tuple[TextCompletion, Usage]:
        """A turn and what it used; where the endpoint does not count the prompt's tokens, their bound counts."""
        completion = await self._complete(request, replace(self._desk.params(), max_response_tokens=max_tokens))
        counted = completion.prompt_tokens
        used = Usage(_most_tokens(request.prompt) if counted is None else counted, completion.num_tokens)
        self._has_answered = True
        self._save_unanswered()
        return completion, used

    async def _complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        for _ in range(_HALF_ANSWERS - 1):
            try:
                return await self._endpoint.complete_unsaved(request, params)
            except UnreadableAnswer:
                continue
        return await self._endpoint.complete_unsaved(request, params)

    def _miss(self, key: str, status: AnswerStatus, used: Usage, error: LuffyError) -> None:
        self._unanswered.append((key, answer_without_text(status, used), error))
        failed = sum(answer.status is AnswerStatus.FAILED for _, answer, _ in self._unanswered)
        if failed >= _FAILED_IN_A_ROW or len(self._unanswered) >= _UNANSWERED_IN_A_ROW:
            self._fault = self._fault or error

    def _save_unanswered(self) -> None:
        """The endpoint works, so that they are outcomes of their questions."""
        for key, answer, _ in self._unanswered:
            self._desk.log.add(self._desk.name, {key: answer})
        self._unanswered.clear()

    def _save_crashed(self, keys: Sequence[str]) -> None:
        if self._player is None:
            return
        known = [self._desk.log.find(key) for key in keys]
        crashed = [
            key in self._crashed or (facts is not None and facts.status is AnswerStatus.CRASHED)
            for key, facts in zip(keys, known, strict=True)
        ]
        reasons = [FinishReason.ENVIRONMENT_ERROR if each else FinishReason.STOP for each in crashed]
        refuse_failures(reasons, self._player.limits)
        if self._crashed:
            self._desk.log.add(self._desk.name, self._crashed)
            self._crashed = {}

    def _most(self, request: TextRequest) -> Usage:
        most = self._desk.config.max_response_tokens
        once = _most_tokens(request.prompt)
        if self._player is None:
            return Usage(once, most)
        limits = self._player.limits
        # The prompt of each turn holds what was written before it; a token has at least one character.
        observed = limits.max_turns * (CHARACTERS_PER_TOKEN * limits.max_observation_tokens + _TOKENS_OF_TURN)
        return Usage(limits.max_turns * (once + most + observed), most)


def _answer_of(completion: TextCompletion, used: Usage) -> TeacherAnswer:
    is_complete = completion.finish_reason is FinishReason.STOP
    status = AnswerStatus.COMPLETE if is_complete else AnswerStatus.TRUNCATED
    if completion.is_refusal:
        status = AnswerStatus.REFUSED
    return TeacherAnswer(completion.text, status, used.prompt_tokens, used.num_tokens)


def _most_tokens(prompt: str | Sequence[Message]) -> int:
    """A bound for the tokens of a prompt whose tokenizer is unknown: no token is shorter than a byte."""
    texts = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
    return sum(len(text.encode()) + _TOKENS_OF_TURN for text in texts)
