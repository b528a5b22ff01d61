"""Models that are paid for by the answer: each response, and each turn of an episode, is saved before anything sees it.

    endpoint = PaidEndpoint(TextEndpoint.connect(...), open_paid(out))

The key of an answer covers everything that is sent with the request and its full seed. So answers stay valid after any
change of the stage, and other stages of the workspace adopt them.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from luffy.config.environment import EnvironmentConfig
from luffy.data.prompt_templates import chat_messages, is_chat, prompt_text, template_opener
from luffy.environments.live_episode import TextEpisode
from luffy.environments.registry import open_text_player
from luffy.environments.transcript import headed
from luffy.errors import LuffyError
from luffy.grading.judge import Judges
from luffy.pipeline.reuse import PAID_ANSWERS
from luffy.rollout.engine import SamplingParams, end_of_first
from luffy.rollout.text_endpoint import TextCompletion, TextEndpoint, TextRequest
from luffy.stages.answers.clients import Questions, RenderedPrompt, episode_start
from luffy.stages.answers.store import AnswerStore, ModelAnswer, siblings
from luffy.stop_request import check_stop_request
from luffy.types import FinishReason, Message, Prompt, Source


def open_paid(out: Path) -> AnswerStore:
    """The paid answers of a stage, which may adopt those of the others beside it."""
    others = [folder / PAID_ANSWERS for folder in siblings(out) if (folder / PAID_ANSWERS).is_file()]
    return AnswerStore(out / PAID_ANSWERS, others)


def paid_answer(completion: TextCompletion, prompt_tokens: int | None, observed: Sequence[Message] = ()) -> ModelAnswer:
    """A completion for the store; `observed` is what an environment wrote before this turn."""
    reason = FinishReason.REFUSED if completion.is_refusal else completion.finish_reason
    return ModelAnswer(
        completion.text, completion.num_tokens, reason, turns=tuple(observed), prompt_tokens=prompt_tokens
    )


def completion_in(answer: ModelAnswer) -> TextCompletion:
    """The completion that `paid_answer` saved."""
    assert answer.text is not None
    is_refusal = answer.finish_reason is FinishReason.REFUSED
    reason = FinishReason.STOP if is_refusal else answer.finish_reason
    return TextCompletion(answer.text, answer.num_tokens, reason, answer.prompt_tokens, is_refusal)


class PaidEndpoint:
    """A text endpoint whose responses are in `store` as they arrive; those that are there are not requested again."""

    def __init__(self, endpoint: TextEndpoint, store: AnswerStore) -> None:
        self._endpoint = endpoint
        self._store = store
        self._places = asyncio.Semaphore(endpoint.concurrency)

    def generate(self, requests: Sequence[TextRequest], params: SamplingParams) -> list[TextCompletion]:
        """One completion per request, in order.

        Raises ConfigError for a request that the endpoint rejects, and ClusterError when it fails after all retries.
        """
        self._store.adopt([self._endpoint.key_of(request, params) for request in requests])
        return self._endpoint.run(self._generate(requests, params))

    async def complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        """The completion of one request, for callers with an event loop of their own; raises as `generate` does.

        A caller that is cancelled leaves the request running: it is paid for, and its response is saved.
        """
        return await asyncio.shield(asyncio.wrap_future(self._endpoint.submit(self._complete(request, params, ()))))

    async def _generate(self, requests: Sequence[TextRequest], params: SamplingParams) -> list[TextCompletion]:
        failures: list[LuffyError] = []

        async def complete(request: TextRequest) -> TextCompletion | None:
            try:
                return await self._complete(request, params, failures)
            except LuffyError as error:
                failures.append(error)
                return None

        # After the first failure no more requests are sent, but running ones, which are paid for, are awaited.
        completions = await asyncio.gather(*map(complete, requests))
        if failures:
            raise failures[0]
        return [completion for completion in completions if completion is not None]

    async def _complete(
        self, request: TextRequest, params: SamplingParams, failures: Sequence[LuffyError]
    ) -> TextCompletion:
        """The completion; raises the first failure of other requests before it is sent."""
        key, store = self._endpoint.key_of(request, params), self._store
        if (known := store.get(key)) is None:
            async with self._places:
                if failures:
                    raise LuffyError("another request failed")  # `complete` raises that failure, whose traceback ends
                check_stop_request("all responses that had been requested are kept")
                completion = await self._endpoint.complete(request, params)
            # To an evaluation a refusal is a response like any other.
            known = paid_answer(replace(completion, is_refusal=False), completion.prompt_tokens)
            store.add([(key, known)])
        return completion_in(known)


class TextClient:
    """A model served by a text endpoint, which also counts the tokens; with an environment, its answers are episodes.

    `judges` as in `open_text_player`.
    """

    def __init__(self, environment: EnvironmentConfig | None, endpoint: PaidEndpoint, judges: Judges) -> None:
        self._endpoint = endpoint
        self._player = None if environment is None else open_text_player(environment, judges)

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        """One answer per sample, in order; a single turn is cut after its first stop text."""
        params = batch.params(())
        if self._player is not None:
            starts = list(map(episode_start, batch.samples))
            return map(_of_episode, self._player.play(starts, self._endpoint, params))
        requests = [
            TextRequest(sample.rendered.messages or sample.rendered.text, sample.seed) for sample in batch.samples
        ]
        opener = template_opener(None, batch.protocol.template)

        def answer(completion: TextCompletion) -> ModelAnswer:
            end = end_of_first(completion.text, params.stop)  # endpoints may generate past it
            reason = completion.finish_reason if end is None else FinishReason.STOP
            return ModelAnswer(opener + completion.text[:end], completion.num_tokens, reason)

        return map(answer, self._endpoint.generate(requests, params))


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
        measures=episode.measures,
    )
