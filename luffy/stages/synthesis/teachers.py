"""Teachers that are paid for: each turn is saved before the environment sees it.

An episode that a kill interrupted is played again from its start: saved turns are not asked for again, each with the
environment's messages before it. So the conversation stays as the teacher saw it, even where a tool now answers
differently, and the same turns bring the live environment into its state.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luffy.config.environment import EnvironmentConfig
from luffy.config.strict import FOR_IDENTITY
from luffy.data.schema import joined_text
from luffy.environments.environment import Environment, ScoringEnvironment, received_messages
from luffy.environments.live_episode import CHARACTERS_PER_TOKEN
from luffy.environments.registry import open_text_player
from luffy.environments.transcript import trace_turns
from luffy.errors import EnvironmentFault, LuffyError, UserError
from luffy.grading.request import Problem
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import RequestRejected, TextCompletion, TextEndpoint, TextRequest, UnreadableAnswer
from luffy.stages.answers.clients import Questions, SampleRequest, episode_start
from luffy.stages.answers.paid import completion_in, paid_answer
from luffy.stages.answers.store import ModelAnswer
from luffy.stages.synthesis.ledger import Usage
from luffy.stages.synthesis.rounds import Work
from luffy.stop_request import StoppedOnRequest, stop_is_requested
from luffy.types import FinishReason, Message, Prompt

_HALF_ANSWERS = 3
"""Attempts to get a complete answer, where the endpoint returns incomplete ones."""
_FAILED_IN_A_ROW, _UNANSWERED_IN_A_ROW = 8, 64
"""So many failures, or questions without an answer for any reason, with no answer in between, count as a fault of the
endpoint. The second limit is higher: an endpoint rejects single prompts that are too long, and all prompts when the
account is empty."""
_TOKENS_OF_TURN = 32
"""Bound for the tokens that a chat template puts around a message."""


class PaidTeacher:
    """The client of a teacher behind an endpoint: each answer, and each turn of an episode, is saved as it arrives.

    A question that fails, or is rejected, while others are answered has that as its outcome. Where none is answered,
    the fault is the endpoint's: `generate` raises it, and the unanswered questions are asked again when the stage
    resumes. With an environment an answer is an episode.
    """

    def __init__(self, name: str, endpoint: TextEndpoint, work: Work) -> None:
        config = work.settings.synthesize.teachers[name]
        self.name = name
        self.params = SamplingParams(config.temperature, config.max_response_tokens, (), config.top_p)
        self._endpoint = endpoint
        self.store = work.store_of(name)
        self._environment = work.settings.environment
        self._player = None if self._environment is None else open_text_player(self._environment, work.judges)
        self._work = work
        self._has_answered = self.store.has_answered(name)
        self._unanswered: list[tuple[str, ModelAnswer, LuffyError]] = []
        """Since the last answer; not in the store yet."""
        self._fault: LuffyError | None = None

    def keyed(self, samples: Sequence[SampleRequest]) -> list[SampleRequest]:
        keys = [self._endpoint.key_of(TextRequest(each.rendered.messages, each.seed), self.params) for each in samples]
        if self._player is not None:
            played = self._environment
            keys = [episode_key(key, each.prompt, played) for key, each in zip(keys, samples, strict=True)]
        return [replace(sample, key=key) for sample, key in zip(samples, keys, strict=True)]

    def most(self, sample: SampleRequest) -> Usage:
        most, once = self.params.max_response_tokens, _most_tokens(sample.rendered.messages)
        if self._player is None:
            return Usage(once, most)
        limits = self._player.limits
        # The prompt of each turn holds what was written before it; a token has at least one character.
        observed = limits.max_turns * (CHARACTERS_PER_TOKEN * limits.max_observation_tokens + _TOKENS_OF_TURN)
        return Usage(limits.max_turns * (once + most + observed), most)

    def generate(self, batch: Questions) -> list[ModelAnswer]:
        """Ask concurrently, up to the server's `concurrency`.

        Raises ConfigError where the endpoint refuses the key, the model or every request, and LostError where it is
        gone.
        """
        try:
            answers = self._endpoint.run(self._ask_all(batch.samples))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # such as a full disk, from one of the tasks
        if self._fault is not None:
            raise self._fault
        return answers

    def finish(self) -> None:
        """At the end of a round: what was not answered is the outcome of its question, unless nothing ever was."""
        if self._unanswered and not self._has_answered:
            raise self._unanswered[0][2]
        self._save_unanswered()

    def _save_unanswered(self) -> None:
        self.store.add([(key, answer) for key, answer, _ in self._unanswered], self.name)
        self._unanswered.clear()

    async def _ask_all(self, samples: Sequence[SampleRequest]) -> list[ModelAnswer]:
        """One answer per sample; fewer where there is a fault."""
        places = asyncio.Semaphore(self._endpoint.concurrency)

        async def ask(sample: SampleRequest) -> ModelAnswer | None:
            async with places:
                if stop_is_requested():
                    self._fault = self._fault or StoppedOnRequest("all answers that had been requested are kept")
                return None if self._fault is not None else await self._answer(sample)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(sample)) for sample in samples]
        return [answer for task in tasks if (answer := task.result()) is not None]

    async def _answer(self, sample: SampleRequest) -> ModelAnswer | None:
        """The answer to one question, saved unless it did not come; None for a fault, which `generate` raises."""
        played = _PaidEpisode(self, sample.key)
        try:
            if self._player is None:
                request = TextRequest(sample.rendered.messages, sample.seed)
                completion, used = await self.ask(request, self.params.max_response_tokens)
                answer = paid_answer(completion, used.prompt_tokens)
            else:
                episode = await self._player.play_one(episode_start(sample), played, played.around)
                # DataError where the environment spoke before the teacher.
                answer = ModelAnswer(
                    joined_text(episode.completion),
                    played.used.num_tokens,
                    episode.finish_reason,
                    turns=trace_turns(episode.completion, sample.prompt.data_source),
                    measures=episode.measures,
                    prompt_tokens=played.used.prompt_tokens,
                    fault=episode.fault,
                )
            # The asker keeps crashed episodes unless there are too many: then the stage ends, and with the environment
            # corrected it plays the same turns again.
            if not answer.has_failed:
                self.store.add([(sample.key, answer)], self.name)
        except _RefusedTurn:
            answer = _without_text(FinishReason.REFUSED, played.used)
            self.store.add([(sample.key, answer)], self.name)
        except RequestRejected as error:
            answer = self._missed(sample.key, _without_text(FinishReason.REFUSED, played.used), error)
        except (UserError, EnvironmentFault) as error:
            self._fault = error
            return None
        except LuffyError as error:
            answer = self._missed(sample.key, _without_text(FinishReason.FAILED, played.used), error)
        self._work.progress(1)
        # The asker needs its numbers alone: the texts of a batch may be gigabytes.
        return answer if answer.has_failed else replace(answer, text="", turns=(), measures={})

    async def ask(self, request: TextRequest, max_tokens: int) -> tuple[TextCompletion, Usage]:
        """A turn and what it used; where the endpoint does not count the prompt's tokens, their bound counts."""
        params = replace(self.params, max_response_tokens=max_tokens)
        for attempt in range(1, _HALF_ANSWERS + 1):
            try:
                completion = await self._endpoint.complete(request, params)
                break
            except UnreadableAnswer:
                if attempt == _HALF_ANSWERS:
                    raise
        self._has_answered = True
        self._save_unanswered()
        counted = completion.prompt_tokens
        return completion, Usage(_most_tokens(request.prompt) if counted is None else counted, completion.num_tokens)

    def _missed(self, key: str, answer: ModelAnswer, error: LuffyError) -> ModelAnswer:
        self._unanswered.append((key, answer, error))
        failed = sum(each.finish_reason is FinishReason.FAILED for _, each, _ in self._unanswered)
        if failed >= _FAILED_IN_A_ROW or len(self._unanswered) >= _UNANSWERED_IN_A_ROW:
            self._fault = self._fault or error
        return answer


class _RefusedTurn(Exception):
    """The model declined to write a turn."""


@dataclass(slots=True)
class _PaidEpisode:
    """A teacher's side of one episode, and its environment, which answers as it did in an earlier attempt as far as
    that went. The live environment sees every turn.

    Raises _RefusedTurn if the model declines, and the errors of the endpoint.
    """

    teacher: PaidTeacher
    key: str
    """The episode's, in the store."""
    inner: Environment = field(init=False)
    used: Usage = field(default_factory=Usage)
    """By all turns so far, those of earlier attempts included."""
    turn: int = 0
    """Number of turns so far."""
    before: Sequence[Message] = ()
    """What the environment wrote before the next turn, which is saved with it."""

    def around(self, environment: Environment) -> Environment:
        self.inner = environment
        return self

    @property
    def max_response_tokens(self) -> int:
        return self.teacher.params.max_response_tokens

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion:
        """The next turn, saved or from the model."""
        key, store = self._turn_key, self.teacher.store
        self.turn += 1
        if (known := store.get(key)) is None:
            completion, used = await self.teacher.ask(request, max_tokens)
            known = paid_answer(completion, used.prompt_tokens, self.before)
            store.add([(key, known)], self.teacher.name)
        self.used += Usage.of(known)
        if known.finish_reason is FinishReason.REFUSED:
            raise _RefusedTurn
        return completion_in(known)

    async def reset(self, problem: Problem) -> Sequence[Message]:
        return self._observed(received_messages("reset", await self.inner.reset(problem))) or ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        found = await self.inner.respond(conversation)
        return self._observed(None if found is None else received_messages("respond", found))

    def counts(self) -> Mapping[str, float]:
        return self.inner.counts()

    async def score(self, conversation: Sequence[Message]) -> None:
        if isinstance(self.inner, ScoringEnvironment):
            await self.inner.score(conversation)

    async def close(self) -> None:
        await self.inner.close()

    @property
    def _turn_key(self) -> str:
        """The one of the next turn."""
        return hashlib.sha256(json.dumps([self.key, "turn", self.turn]).encode()).hexdigest()

    def _observed(self, live: Sequence[Message] | None) -> Sequence[Message] | None:
        """What the environment writes before the next turn: as recorded, or as it is now."""
        if (known := self.teacher.store.get(self._turn_key)) is not None:
            return known.turns
        self.before = live or ()
        return live


_FIELDS_THAT_ARE_GONE = (
    ('"sandbox":{"kind":"bubblewrap",', '"sandbox":{"kind":"bubblewrap","unsafe_local":false,'),
    (',"weights":{', ',"group_measures":{},"weights":{'),
)
"""Answers have been paid for under keys that have these fields, and are not to be paid for again."""


def episode_key(first_turn: str, prompt: Prompt, environment: EnvironmentConfig | None) -> str:
    """Hash of everything that an episode depends on: `first_turn` is the key of its first request."""
    played = ""
    if environment is not None:
        played = environment.model_dump_json(context=FOR_IDENTITY)
        for written, as_it_was in _FIELDS_THAT_ARE_GONE:
            played = played.replace(written, as_it_was)
    problem = [prompt.uid, prompt.ground_truth, prompt.grader, prompt.extra_info]
    asked = json.dumps([first_turn, problem, played], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def _without_text(reason: FinishReason, used: Usage) -> ModelAnswer:
    """A question that was refused, or that failed; the turns of an episode before that have `used` something."""
    return ModelAnswer("", used.num_tokens, reason, prompt_tokens=used.prompt_tokens)


def _most_tokens(prompt: str | Sequence[Message]) -> int:
    """A bound for the tokens of a prompt whose tokenizer is unknown: no token is shorter than a byte."""
    texts = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
    return sum(len(text.encode()) + _TOKENS_OF_TURN for text in texts)
