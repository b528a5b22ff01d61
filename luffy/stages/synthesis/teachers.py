"""Teachers answer questions in order, each answer into the store, until the ledger's limit is reached."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.answers import TeacherConfig
from luffy.config.environment import EnvironmentConfig
from luffy.config.execution import ServerConfig
from luffy.data.row_filters import with_instructions
from luffy.data.templates import prompt_opener, render_prompts, stop_token_ids
from luffy.data.tokenizer import is_same_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.limits import FailedShare, refuse_failures
from luffy.environments.live_episode import CHARACTERS_PER_TOKEN, EpisodeStart, TextEpisodePlayer
from luffy.errors import EnvironmentFault, LuffyError, UserError
from luffy.grading.request import problem_of
from luffy.rollout.engine import RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.text_endpoint import (
    CHAT,
    RequestRejected,
    TextCompletion,
    TextEndpoint,
    TextRequest,
    UnreadableAnswer,
)
from luffy.stages.answers.clients import TokenModelClient
from luffy.stages.answers.paid import paid_answer
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.synthesis.ledger import Ledger, Usage
from luffy.stages.synthesis.paid_episodes import (
    PaidChat,
    RefusedTurn,
    episode_key,
    text_episode_answer,
    token_episode_answer,
)
from luffy.stop_request import StoppedOnRequest, check_stop_request, stop_is_requested
from luffy.types import FinishReason, Message, Prompt

_HALF_ANSWERS = 3
"""Attempts to get a complete answer, where the endpoint returns incomplete ones."""
_FAILED_IN_A_ROW, _UNANSWERED_IN_A_ROW = 8, 64
"""So many failures, or questions without an answer for any reason, with no answer in between, count as a fault of the
endpoint. The second limit is higher: an endpoint rejects single prompts that are too long, and all prompts when the
account is empty."""
_TOKENS_OF_TURN = 32
"""Bound for the tokens that a chat template puts around a message."""


@dataclass(frozen=True, slots=True)
class Question:
    """One answer to request."""

    prompt: Prompt
    sample: int
    seed: int
    asked: tuple[Message, ...] = ()
    """Messages to send instead of the prompt's; empty: the prompt's own."""

    @property
    def asked_prompt(self) -> Prompt:
        """The prompt with the messages to send."""
        return replace(self.prompt, messages=self.asked) if self.asked else self.prompt


class Teacher(Protocol):
    """A model that answers questions."""

    def ask(self, questions: Sequence[Question]) -> list[str]:
        """Get the answers to questions, in order, into the store; returns their keys there.

        Questions that the budget does not allow are left out at the end.
        """
        ...

    def close(self) -> None:
        """Free the model, or the connection to it."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """The settings, store and ledger that a teacher works with."""

    name: str
    config: TeacherConfig
    store: AnswerStore
    ledger: Ledger
    answered: Callable[[int], None]
    """Called with the number of answers that have come."""
    environment: EnvironmentConfig | None = None
    """With an environment, an answer is an episode."""
    instructions: Mapping[str | None, str] = field(default_factory=dict)
    """The environment's by data source (None: all others), for a system prompt of the teacher's own; the prompt's own
    system message has them."""

    def take(self, key: str) -> bool:
        """Whether the store has the answer already; if so, it is entered into the ledger."""
        if key not in self.store:
            return False
        self.ledger.settle(self.name, Usage.of(self.store[key]))
        self.answered(1)
        return True

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """Messages to the teacher: the prompt's, under the teacher's own system prompt if it has one."""
        system = self.config.system_prompt
        if system is None:
            return prompt.messages
        others = tuple(message for message in prompt.messages if message.role != "system")
        own = (Message("system", system), *others) if system else others
        if not self.instructions:
            return own
        return with_instructions([replace(prompt, messages=own)], self.instructions)[0].messages

    def params(self, stop: tuple[int, ...] = ()) -> SamplingParams:
        """How answers are sampled."""
        return SamplingParams(self.config.temperature, self.config.max_response_tokens, stop, self.config.top_p)


class FolderTeacher:
    """A model folder, answered by an engine. Answers are saved batch by batch.

    `scope` distinguishes this stage's answers from those of other stages, whose folder may have held other weights.
    With a `player` an answer is an episode.
    """

    def __init__(
        self,
        desk: Desk,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        policy: PreTrainedTokenizerBase,
        batch_size: int,
        scope: str,
        player: EpisodePlayer | None = None,
    ) -> None:
        self._desk = desk
        self._engine = engine
        self._tokenizer = tokenizer
        self._client = TokenModelClient(engine, tokenizer, policy if is_same_tokenizer(tokenizer, policy) else None)
        self._batch_size = batch_size
        self._scope = scope
        self._player = player
        self._failures = None if player is None else FailedShare(player.limits)

    def ask(self, questions: Sequence[Question]) -> list[str]:
        """Generate in batches of consecutive questions."""
        desk, keys = self._desk, list[str]()
        batch: dict[str, EpisodeStart] = {}
        prompts = [desk.messages(question.asked_prompt) for question in questions]
        for question, ids in zip(questions, render_prompts(self._tokenizer, prompts), strict=True):
            if batch and (len(batch) == self._batch_size or desk.ledger.may_be_spent):
                self._generate(batch)
                batch = {}
            if desk.ledger.is_spent:
                break
            key = self._key(question, ids)
            keys.append(key)
            if not desk.take(key):
                batch[key] = start_of(question, desk.messages(question.asked_prompt), tuple(ids))
                desk.ledger.reserve(desk.name, self._most(ids))
        if batch:
            self._generate(batch)
        return keys

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _generate(self, batch: dict[str, EpisodeStart]) -> None:
        check_stop_request("all answers are kept")
        desk, starts = self._desk, list(batch.values())
        answers = self._answers(starts)
        desk.store.add(dict(zip(batch, answers, strict=True)), desk.name)
        for start, answer in zip(starts, answers, strict=True):
            desk.ledger.settle(desk.name, Usage.of(answer), self._most(start.prompt_ids))
        desk.answered(len(answers))

    def _answers(self, starts: Sequence[EpisodeStart]) -> list[ModelAnswer]:
        params = self._desk.params(stop_token_ids(self._tokenizer))
        if self._player is not None:
            assert self._failures is not None, "counted where episodes are played"
            episodes = self._player.play(starts, self._engine, params)
            self._failures.add([episode.finish_reason is FinishReason.ENVIRONMENT_ERROR for episode in episodes])
            return [token_episode_answer(*each) for each in zip(starts, episodes, strict=True)]
        requests = [RolloutRequest(start.prompt_ids, start.seed) for start in starts]
        answers = self._client.complete(requests, params, prompt_opener(self._tokenizer))
        return [
            replace(answer, prompt_tokens=len(start.prompt_ids)) for start, answer in zip(starts, answers, strict=True)
        ]

    def _most(self, ids: Sequence[int]) -> Usage:
        most = self._desk.config.max_response_tokens
        if self._player is None:
            return Usage(len(ids), most)
        return Usage(self._player.limits.max_turns * (len(ids) + most), most)

    def _key(self, question: Question, ids: Sequence[int]) -> str:
        asked = [self._scope, self._desk.name, list(ids), question.seed]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


class EndpointTeacher:
    """Asks an endpoint. A question that fails, or is rejected, while others are answered has that as its outcome.

    Where none is answered, the fault is the endpoint's: `ask` raises it, and the unanswered questions are asked again
    when the stage resumes. With a `player` an answer is an episode, each turn of which is saved as it arrives.
    """

    def __init__(self, desk: Desk, server: ServerConfig, player: TextEpisodePlayer | None = None) -> None:
        setting = f"execution.teachers.{desk.name}"
        assert desk.config.endpoint is not None
        self._desk = desk
        self._endpoint = TextEndpoint.connect(desk.config.endpoint, server, (CHAT,), setting)
        self._has_answered = desk.store.has_answered(desk.name)
        self._unanswered: list[tuple[str, ModelAnswer, LuffyError]] = []
        """Since the last answer; not in the store yet."""
        self._player = player
        self._crashed: dict[str, ModelAnswer] = {}
        """Episodes in which the environment failed. `ask` saves them at its end unless there are too many: then the
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
        requests = [TextRequest(desk.messages(question.asked_prompt), question.seed) for question in questions]
        wanted = [self._key(*each) for each in zip(questions, requests, strict=True)]
        desk.store.adopt(wanted)
        async with asyncio.TaskGroup() as group:
            for question, request, key in zip(questions, requests, wanted, strict=True):
                while running and (len(running) >= self._endpoint.concurrency or desk.ledger.may_be_spent):
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if stop_is_requested():
                    self._fault = self._fault or StoppedOnRequest("all answers that had been requested are kept")
                if self._fault is not None or desk.ledger.is_spent:
                    break
                keys.append(key)
                if not desk.take(key):
                    desk.ledger.reserve(desk.name, self._most(request))
                    running.add(group.create_task(self._answer(question, request, key)))
        return keys

    def _key(self, question: Question, request: TextRequest) -> str:
        key = self._endpoint.key_of(request, self._desk.params())
        return key if self._player is None else episode_key(key, question.prompt, self._desk.environment)

    async def _answer(self, question: Question, request: TextRequest, key: str) -> None:
        """Send one question and save its answer; an error is stored for `ask` to raise."""
        desk = self._desk
        chat = PaidChat(desk.store, desk.name, key, self._turn, desk.config.max_response_tokens)
        try:
            answer = await self._answered(question, request, chat)
            if answer.has_failed:
                self._crashed[key] = answer
            else:
                desk.store.add({key: answer}, desk.name)
        except RequestRejected as error:
            self._miss(key, FinishReason.REFUSED, chat.used, error)
        except (UserError, EnvironmentFault) as error:
            self._fault = error
        except LuffyError as error:
            self._miss(key, FinishReason.FAILED, chat.used, error)
        finally:
            desk.ledger.settle(desk.name, chat.used, self._most(request))
        desk.answered(1)

    async def _answered(self, question: Question, request: TextRequest, chat: PaidChat) -> ModelAnswer:
        """The answer: a single turn, or an episode whose first turn has this request."""
        if self._player is None:
            completion, chat.used = await self._turn(request, self._desk.config.max_response_tokens)
            return paid_answer(completion, chat.used.prompt_tokens)
        assert not isinstance(request.prompt, str)
        start = start_of(question, request.prompt)
        try:
            episode = await self._player.play_one(start, chat, chat.recording)
        except RefusedTurn:
            return answer_without_text(FinishReason.REFUSED, chat.used)
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
                return await self._endpoint.complete(request, params)
            except UnreadableAnswer:
                continue
        return await self._endpoint.complete(request, params)

    def _miss(self, key: str, reason: FinishReason, used: Usage, error: LuffyError) -> None:
        self._unanswered.append((key, answer_without_text(reason, used), error))
        failed = sum(answer.finish_reason is FinishReason.FAILED for _, answer, _ in self._unanswered)
        if failed >= _FAILED_IN_A_ROW or len(self._unanswered) >= _UNANSWERED_IN_A_ROW:
            self._fault = self._fault or error

    def _save_unanswered(self) -> None:
        """The endpoint works, so that they are outcomes of their questions."""
        for key, answer, _ in self._unanswered:
            self._desk.store.add({key: answer}, self._desk.name)
        self._unanswered.clear()

    def _save_crashed(self, keys: Sequence[str]) -> None:
        if self._player is None:
            return
        store = self._desk.store
        reasons = [(self._crashed.get(key) or store[key]).finish_reason for key in keys]
        refuse_failures(reasons, self._player.limits)
        if self._crashed:
            self._desk.store.add(self._crashed, self._desk.name)
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


def start_of(question: Question, messages: tuple[Message, ...], prompt_ids: tuple[int, ...] = ()) -> EpisodeStart:
    """The question as it is put to a teacher, with `messages`."""
    prompt = question.prompt
    return EpisodeStart(problem_of(prompt), prompt.ground_truth, messages, prompt_ids, question.seed)


def answer_without_text(reason: FinishReason, used: Usage) -> ModelAnswer:
    """A question that was refused, or that failed; the turns of an episode before that have `used` something."""
    return ModelAnswer("", used.num_tokens, reason, prompt_tokens=used.prompt_tokens)


def _most_tokens(prompt: str | Sequence[Message]) -> int:
    """A bound for the tokens of a prompt whose tokenizer is unknown: no token is shorter than a byte."""
    texts = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
    return sum(len(text.encode()) + _TOKENS_OF_TURN for text in texts)
