"""Models that are paid for by the answer: each response, and each turn of an episode, is saved before anything sees it.

    endpoint = PaidEndpoint(TextEndpoint.connect(...), open_paid(out))

The key of an answer covers everything that is sent with the request and its full seed. So answers stay valid after any
change of the stage, and other stages of the workspace adopt them.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from luffy.config.environment import EnvironmentConfig
from luffy.config.strict import FOR_IDENTITY
from luffy.data.prompt_templates import chat_messages, is_chat, prompt_text, template_opener
from luffy.data.templates import with_opened_thinking
from luffy.environments.live_episode import TextEpisode, results_of
from luffy.environments.registry import open_text_player
from luffy.environments.transcript import headed
from luffy.errors import LuffyError, UserError
from luffy.grading.judge import Judges
from luffy.pipeline.reuse import PAID_ANSWERS
from luffy.rollout.engine import SamplingParams, end_of_first
from luffy.rollout.text_endpoint import RequestRejected, TextCompletion, TextEndpoint, TextRequest, UnreadableAnswer
from luffy.stages.answers.clients import Questions, RenderedPrompt, SampleRequest, as_trace, episode_start
from luffy.stages.answers.store import AnswerStore, ModelAnswer, siblings
from luffy.stop_request import check_stop_request
from luffy.types import FinishReason, Message, Prompt, Source

_HALF_ANSWERS = 3
"""Attempts to get a complete answer, where the endpoint returns incomplete ones."""
_REJECTIONS = 8
"""Rejected requests for each that may fail: an endpoint rejects single prompts that are too long, and all prompts when
the account is empty."""
_TOKENS_OF_TURN = 32
"""Bound for the tokens that a chat template puts around a message."""


def open_paid(out: Path, *stages: str) -> AnswerStore:
    """The paid answers of a stage, which may adopt those of the others beside it, and of all of the kinds `stages`."""
    kinds = [out, *(out.parent.with_name(stage) / out.name for stage in stages)]
    files = [each / PAID_ANSWERS for kind in kinds if kind.parent.is_dir() for each in siblings(kind)]
    return AnswerStore(out / PAID_ANSWERS, [file for file in files if file.is_file()])


class PaidEndpoint:
    """A text endpoint whose responses are in `store` as they arrive; those that are there are not requested again.

    The first failure is raised, and nothing more is requested after it. An endpoint that writes traces, for their
    `author`, may fail up to `misses` requests in a row, and reject eight times as many, which come as completions with
    that finish reason and are not saved. More of them, or nothing else (`finish`), are a fault of the endpoint.
    """

    def __init__(self, endpoint: TextEndpoint, store: AnswerStore, author: str = "", misses: int = 0) -> None:
        self.endpoint = endpoint
        self.store = store
        self.author = author
        self.watch: Callable[[int, int], None] = lambda finished, tokens: None
        """Called with numbers of finished requests and of their new tokens."""
        self._misses = misses
        self._missed: list[LuffyError] = []
        """Since the last response."""
        self._fault: LuffyError | None = None
        self._places = asyncio.Semaphore(endpoint.concurrency)

    def generate(self, requests: Sequence[TextRequest], params: SamplingParams) -> list[TextCompletion]:
        """One completion per request, in order.

        Raises ConfigError for a request that the endpoint rejects, and ClusterError when it fails after all retries.
        """
        self.store.adopt([self.endpoint.key_of(request, params) for request in requests])
        return self.endpoint.run(self._generate(requests, params))

    async def complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        """The completion of one request, for callers with an event loop of their own; raises as `generate` does.

        A caller that is cancelled leaves the request running: it is paid for, and its response is saved.
        """
        return await asyncio.shield(asyncio.wrap_future(self.endpoint.submit(self._complete(request, params))))

    def save(self, key: str, answer: ModelAnswer) -> None:
        """Save an answer that is made of responses, from another thread than that in which they are saved."""

        async def add() -> None:
            self.store.add([(key, answer)], self.author)

        self.endpoint.run(add())

    def finish(self) -> None:
        """Raise what was missed if the author has never given a response."""
        if self._missed and not self.store.has_answered(self.author):
            raise self._missed[0]

    async def _generate(self, requests: Sequence[TextRequest], params: SamplingParams) -> list[TextCompletion]:
        # After a failure running requests, which are paid for, are awaited.
        found = await asyncio.gather(*(self._complete(each, params) for each in requests), return_exceptions=True)
        return results_of(found)

    async def _complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        key, num_tokens = self.endpoint.key_of(request, params), 0
        if (known := self.store.get(key)) is None:
            async with self._places:
                if self._fault is not None:
                    raise self._fault.with_traceback(None)  # which would grow with each request
                check_stop_request("all responses that had been requested are kept")
                try:
                    completion = await self._requested(request, params)
                except LuffyError as error:
                    known = self._missing(error)
                else:
                    self._missed.clear()
                    # To an evaluation a refusal is a response like any other.
                    is_refused = completion.is_refusal and self._misses
                    reason = FinishReason.REFUSED if is_refused else completion.finish_reason
                    counted, num_tokens = completion.prompt_tokens, completion.num_tokens
                    most = _most_tokens(request.prompt) if counted is None else counted
                    known = ModelAnswer(completion.text, num_tokens, reason, prompt_tokens=most)
                    self.store.add([(key, known)], self.author)
        self.watch(1, num_tokens)
        assert known.text is not None
        return TextCompletion(known.text, known.num_tokens, known.finish_reason, known.prompt_tokens)

    async def _requested(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        for _ in range(_HALF_ANSWERS - 1):
            with suppress(UnreadableAnswer):
                return await self.endpoint.complete(request, params)
        return await self.endpoint.complete(request, params)

    def _missing(self, error: LuffyError) -> ModelAnswer:
        """What stands for a response that did not come; raises `error` where that is the endpoint's fault."""
        self._missed.append(error)
        is_rejected = isinstance(error, RequestRejected)
        failed = sum(not isinstance(each, RequestRejected) for each in self._missed)
        is_gone = failed > self._misses or len(self._missed) > _REJECTIONS * self._misses
        if is_gone or (isinstance(error, UserError) and not is_rejected):
            self._fault = self._fault or error
            raise self._fault
        return ModelAnswer("", 0, FinishReason.REFUSED if is_rejected else FinishReason.FAILED, prompt_tokens=0)


class TextClient:
    """A model served by a text endpoint, which also counts the tokens; with an environment, its answers are episodes.

    `judges` as in `open_text_player`. With `for_traces` the answers are as traces have them (`as_trace`), and each
    episode is saved as it ends, under a key that covers all that it depends on.
    """

    def __init__(
        self, environment: EnvironmentConfig | None, endpoint: PaidEndpoint, judges: Judges, *, for_traces: bool = False
    ) -> None:
        self._endpoint = endpoint
        self._environment = environment
        self._player = None if environment is None else open_text_player(environment, judges)
        self._for_traces = for_traces

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        """One answer per sample, in order; a single turn is cut after its first stop text."""
        params = batch.params(())
        answers = self._single_turns if self._player is None else self._episodes
        found = answers(batch, params)
        self._endpoint.finish()
        return found

    def _single_turns(self, batch: Questions, params: SamplingParams) -> Iterable[ModelAnswer]:
        opener = template_opener(None, batch.protocol.template)

        def answer(completion: TextCompletion) -> ModelAnswer:
            end = end_of_first(completion.text, params.stop)  # endpoints may generate past it
            reason = completion.finish_reason if end is None else FinishReason.STOP
            text = opener + completion.text[:end]
            text = with_opened_thinking(text) if self._for_traces else text
            return ModelAnswer(text, completion.num_tokens, reason, prompt_tokens=completion.prompt_tokens)

        return map(answer, self._endpoint.generate([_first_request(sample) for sample in batch.samples], params))

    def _episodes(self, batch: Questions, params: SamplingParams) -> Iterable[ModelAnswer]:
        assert self._player is not None and self._environment is not None
        endpoint, samples = self._endpoint, batch.samples
        if not self._for_traces:
            episodes = self._player.play(list(map(episode_start, samples)), endpoint, params)
            return (replace(_of_episode(episode), turns=()) for episode in episodes)
        firsts = [endpoint.endpoint.key_of(_first_request(sample), params) for sample in samples]
        keys = [episode_key(first, each.prompt, self._environment) for first, each in zip(firsts, samples, strict=True)]
        known = [endpoint.store.get(key) for key in keys]
        left = [place for place, answer in enumerate(known) if answer is None]

        def ended(number: int, episode: TextEpisode) -> None:
            place = left[number]
            # DataError where the environment spoke before the teacher.
            known[place] = answer = as_trace(samples[place], _of_episode(episode))
            # Another is played again, with the turns that are paid for: once its environment is corrected, perhaps.
            if not answer.is_missing:
                endpoint.save(keys[place], answer)

        self._player.play([episode_start(samples[place]) for place in left], endpoint, params, ended)
        return [answer for answer in known if answer is not None]


_FIELDS_THAT_ARE_GONE = (
    (r'(?<=\]),"calls":', ',"version":0,"calls":'),
    (r',"sandbox":\{', ',"max_calls":16,"max_result_characters":8192,"sandbox":{'),
    (r'"sandbox":\{"kind":"bubblewrap",', '"sandbox":{"kind":"bubblewrap","unsafe_local":false,'),
    (r',"memory_mib":', ',"interrupt_grace_s":1.0,"session_cpu_s":120.0,"session_wall_s":3600.0,"memory_mib":'),
    (r',"max_threads":', ',"tmp_mib":64,"file_mib":64,"max_files":2000,"max_open_files":64,"max_threads":'),
    (r'("max_threads":\d+)', r'\1,"shown_output_bytes":8192,"printed_bytes":1048576'),
    (r'("max_tokens":\d+),"timeout_s"', r'\1,"max_answer_chars":8000,"timeout_s"'),
    (r'("factory":"[^"]*"),', r'\1,"version":0,'),
    (r',"weights":\{', ',"group_measures":{},"weights":{'),
    (r'("weights":\{[^}]*\},"timeout_s":[^,}]+)', r'\1,"version":0'),
)
"""Answers have been paid for under keys that have these fields, and are not to be paid for again."""


def episode_key(first_turn: str, prompt: Prompt, environment: EnvironmentConfig) -> str:
    """Hash of everything that an episode depends on: `first_turn` is the key of its first request."""
    played = environment.model_dump_json(context=FOR_IDENTITY)
    for written, as_it_was in _FIELDS_THAT_ARE_GONE:
        played = re.sub(written, as_it_was, played)
    problem = [prompt.uid, prompt.ground_truth, prompt.grader, prompt.extra_info]
    asked = json.dumps([first_turn, problem, played], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def _first_request(sample: SampleRequest) -> TextRequest:
    return TextRequest(sample.rendered.messages or sample.rendered.text, sample.seed)


def _most_tokens(prompt: str | Sequence[Message]) -> int:
    """A bound for the tokens of a prompt that the endpoint does not count: no token is shorter than a byte."""
    texts = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
    return sum(len(text.encode()) + _TOKENS_OF_TURN for text in texts)


def render_as_text(prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
    """Prompts as chat messages, to which the server applies its model's template, or as the text of another template.

    DataError for a prompt that does not fit the template.
    """
    if not is_chat(template):
        return [RenderedPrompt(prompt_text(prompt, template)) for prompt in prompts]
    # The text is for records: the rendered prompt exists only on the server.
    return [
        RenderedPrompt("\n\n".join(f"{turn.role}: {turn.content}" for turn in messages), messages=messages)
        for messages in (chat_messages(prompt, template) for prompt in prompts)
    ]


def _of_episode(episode: TextEpisode) -> ModelAnswer:
    written = [
        (Source.ON_POLICY if message.role == "assistant" else Source.ENVIRONMENT, message.content)
        for message in episode.completion
    ]
    replies = [text for who, text in written if who is Source.ON_POLICY]
    return ModelAnswer(
        text=headed(written),
        num_tokens=episode.num_tokens,
        finish_reason=episode.finish_reason,
        reply=replies[-1] if replies else "",
        turns=episode.completion,
        measures=episode.measures,
        prompt_tokens=episode.prompt_tokens,
        fault=episode.fault,
    )
