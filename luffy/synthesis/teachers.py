"""Teachers answer questions in order, each answer into the log, until the ledger's limit is reached."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.answers import TeacherConfig
from luffy.config.environment import EnvironmentConfig
from luffy.data.row_filters import with_instructions
from luffy.data.templates import decode, encode_traces, prompt_opener, render_prompts, stop_token_ids
from luffy.data.tokenizer import is_same_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.limits import FailedShare
from luffy.environments.live_episode import EpisodeStart
from luffy.grading.request import problem_of
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.stop_request import check_stop_request
from luffy.synthesis.answer_log import AnswerFacts, AnswerLog, AnswerStatus, TeacherAnswer
from luffy.synthesis.episode_answers import token_episode_answer
from luffy.synthesis.ledger import Ledger, Usage
from luffy.types import FinishReason, Message, Prompt


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
        """Get the answers to questions, in order, into the log; returns their keys there.

        Questions that the budget does not allow are left out at the end.
        """
        ...

    def close(self) -> None:
        """Free the model, or the connection to it."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """The settings, log and ledger that a teacher works with."""

    name: str
    config: TeacherConfig
    log: AnswerLog
    ledger: Ledger
    answered: Callable[[int], None]
    """Called with the number of answers that have come."""
    environment: EnvironmentConfig | None = None
    """With an environment, an answer is an episode."""
    instructions: Mapping[str | None, str] = field(default_factory=dict)
    """The environment's by data source (None: all others), for a system prompt of the teacher's own; the prompt's own
    system message has them."""

    def take(self, key: str) -> bool:
        """Whether the log has the answer already; if so, it is entered into the ledger."""
        facts = self.log.find(key)
        if facts is None:
            return False
        self.ledger.settle(self.name, _usage(facts))
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
        self._policy = policy
        self._has_policy_tokens = is_same_tokenizer(tokenizer, policy)
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
        desk.log.add(desk.name, dict(zip(batch, answers, strict=True)))
        for start, answer in zip(starts, answers, strict=True):
            used = Usage(answer.prompt_tokens, answer.num_tokens)
            desk.ledger.settle(desk.name, used, self._most(start.prompt_ids))
        desk.answered(len(answers))

    def _answers(self, starts: Sequence[EpisodeStart]) -> list[TeacherAnswer]:
        params = self._desk.params(stop_token_ids(self._tokenizer))
        if self._player is not None:
            assert self._failures is not None, "counted where episodes are played"
            episodes = self._player.play(starts, self._engine, params)
            self._failures.add([episode.finish_reason is FinishReason.ENVIRONMENT_ERROR for episode in episodes])
            return [token_episode_answer(*each) for each in zip(starts, episodes, strict=True)]
        requests = [RolloutRequest(start.prompt_ids, start.seed) for start in starts]
        completions = self._engine.generate(requests, params)
        return [self._answer(*each) for each in zip(requests, completions, strict=True)]

    def _answer(self, request: RolloutRequest, completion: Completion) -> TeacherAnswer:
        ids = completion.token_ids
        text = prompt_opener(self._tokenizer) + decode(self._tokenizer, ids)
        is_complete = completion.finish_reason is FinishReason.STOP
        logprobs = None
        if self._has_policy_tokens and is_complete and encode_traces(self._policy, [text])[0] == list(ids):
            logprobs = tuple(min(value, 0.0) for value in completion.logprobs)  # rounding may leave 1e-9 above
        status = AnswerStatus.COMPLETE if is_complete else AnswerStatus.TRUNCATED
        return TeacherAnswer(text, status, len(request.prompt_ids), len(ids), logprobs)

    def _most(self, ids: Sequence[int]) -> Usage:
        most = self._desk.config.max_response_tokens
        if self._player is None:
            return Usage(len(ids), most)
        return Usage(self._player.limits.max_turns * (len(ids) + most), most)

    def _key(self, question: Question, ids: Sequence[int]) -> str:
        asked = [self._scope, self._desk.name, list(ids), question.seed]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def start_of(question: Question, messages: tuple[Message, ...], prompt_ids: tuple[int, ...] = ()) -> EpisodeStart:
    """The question as it is put to a teacher, with `messages`."""
    prompt = question.prompt
    return EpisodeStart(problem_of(prompt), prompt.ground_truth, messages, prompt_ids, question.seed)


def _usage(facts: AnswerFacts) -> Usage:
    return Usage(facts.prompt_tokens, facts.num_tokens)


def answer_without_text(status: AnswerStatus, used: Usage) -> TeacherAnswer:
    """A question that was refused, or that failed; the turns of an episode before that have `used` something."""
    return TeacherAnswer("", status, used.prompt_tokens, used.num_tokens)
