"""A teacher behind an endpoint of OpenAI's protocol: many questions at once, each answer saved as it arrives."""

import asyncio
from collections.abc import Sequence

from luffy.config.execution import ServerConfig
from luffy.errors import ConfigError, LuffyError
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import CHAT, RequestRejected, TextEndpoint, TextRequest, UnreadableAnswer
from luffy.synthesis.answer_log import AnswerStatus, TeacherAnswer
from luffy.synthesis.ledger import Usage
from luffy.synthesis.teachers import Desk, Question, answer_without_text
from luffy.types import FinishReason, Message

_HALF_ANSWERS = 3
"""Attempts at a whole answer, where the endpoint gives half ones."""
_FAILED_IN_A_ROW, _UNANSWERED_IN_A_ROW = 8, 64
"""Failures, and questions without an answer for any reason, that are the endpoint's fault when no answer comes between
them. Rejections are no sign of trouble where prompts are too long, and one where the account is empty."""
_TOKENS_OF_TURN = 32
"""Bound for the tokens that a chat template puts around a message."""


class EndpointTeacher:
    """Asks an endpoint. A question that fails, or is rejected, while others are answered has that as its outcome.

    Where none is answered, the fault is the endpoint's: `ask` raises it, and the unanswered questions are asked again
    when the stage resumes.
    """

    def __init__(self, desk: Desk, server: ServerConfig) -> None:
        setting = f"execution.teachers.{desk.name}"
        assert desk.config.endpoint is not None
        self._desk = desk
        self._endpoint = TextEndpoint.connect(desk.config.endpoint, server, (CHAT,), None, setting)
        self._has_answered = desk.log.has_answered(desk.name)
        self._unanswered: list[tuple[str, AnswerStatus, LuffyError]] = []
        """Since the last answer; not in the log yet."""
        self._fault: LuffyError | None = None

    def ask(self, questions: Sequence[Question]) -> list[str]:
        """Ask as many at once as the server's `concurrency` and the budget allow.

        Raises ConfigError where the endpoint refuses the key, the model or every request, LostError where it is gone.
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
                if self._fault is not None or desk.ledger.is_spent:
                    break
                request = TextRequest(desk.messages(question.messages), question.seed)
                key = self._endpoint.key_of(request, desk.params())
                keys.append(key)
                if not desk.take(key):
                    desk.ledger.reserve(desk.name, self._most(request))
                    running.add(group.create_task(self._answer(request, key)))
        return keys

    async def _answer(self, request: TextRequest, key: str) -> None:
        """Ask one question and save its answer; what goes wrong is kept for `ask`."""
        desk, most = self._desk, self._most(request)
        used = Usage()
        try:
            answer = _answer_of(await self._complete(request), most)
            used = Usage(answer.prompt_tokens, answer.num_tokens)
            self._has_answered = True
            self._save_unanswered()
            desk.log.add(desk.name, {key: answer})
        except RequestRejected as error:
            self._miss(key, AnswerStatus.REFUSED, error)
        except ConfigError as error:
            self._fault = error
        except LuffyError as error:
            self._miss(key, AnswerStatus.FAILED, error)
        finally:
            desk.ledger.settle(desk.name, used, most)
        desk.answered(1)

    async def _complete(self, request: TextRequest) -> TextCompletion:
        for _ in range(_HALF_ANSWERS - 1):
            try:
                return await self._endpoint.complete_unsaved(request, self._desk.params())
            except UnreadableAnswer:
                continue
        return await self._endpoint.complete_unsaved(request, self._desk.params())

    def _miss(self, key: str, status: AnswerStatus, error: LuffyError) -> None:
        self._unanswered.append((key, status, error))
        failed = sum(status is AnswerStatus.FAILED for _, status, _ in self._unanswered)
        if failed >= _FAILED_IN_A_ROW or len(self._unanswered) >= _UNANSWERED_IN_A_ROW:
            self._fault = self._fault or error

    def _save_unanswered(self) -> None:
        """The endpoint works, so that they are outcomes of their questions."""
        for key, status, _ in self._unanswered:
            self._desk.log.add(self._desk.name, {key: answer_without_text(status)})
        self._unanswered.clear()

    def _most(self, request: TextRequest) -> Usage:
        return Usage(_most_tokens(request.prompt), self._desk.config.max_response_tokens)


def _answer_of(completion: TextCompletion, most: Usage) -> TeacherAnswer:
    """The answer; where the endpoint does not count the prompt's tokens, their bound counts."""
    counted = completion.prompt_tokens
    prompt_tokens = most.prompt_tokens if counted is None else counted
    is_complete = completion.finish_reason is FinishReason.STOP
    status = AnswerStatus.COMPLETE if is_complete else AnswerStatus.TRUNCATED
    if completion.is_refusal:
        status = AnswerStatus.REFUSED
    return TeacherAnswer(completion.text, status, prompt_tokens, completion.num_tokens)


def _most_tokens(prompt: str | Sequence[Message]) -> int:
    """A bound for the tokens of a prompt whose tokenizer is unknown: no token is shorter than a byte."""
    texts = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
    return sum(len(text.encode()) + _TOKENS_OF_TURN for text in texts)
