"""Model clients, which render prompts and generate responses: an engine with a tokenizer, or a text endpoint."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import SuiteProtocol
from luffy.data.prompt_templates import OWN, ask, prompt_text, stops_of, template_opener
from luffy.data.templates import decode, stop_token_ids
from luffy.evaluation.requests import Render, RenderedPrompt, Response, SampleRequest
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams, StopTexts, end_of_first
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import TextEndpoint, TextRequest
from luffy.types import FinishReason, Message, Prompt


class ModelClient(Protocol):
    """A model that can be evaluated."""

    def render(self, prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        """Each prompt in the template of that name; DataError for one that does not fit it."""
        ...

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """One response per sample, in order: all are generated when this returns, and decoded as they are consumed."""
        ...


class TokenModelClient:
    """A model served by an engine that takes and returns token ids."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def render(self, prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return render_as_ids(self._tokenizer)(prompts, template)

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """Generate with the engine; a stop text stays in its response."""
        params = sampling_params(protocol, max_response_tokens, stop_token_ids(self._tokenizer))
        stops = StopTexts(params.stop, partial(decode, self._tokenizer))
        requests = [RolloutRequest(sample.rendered.ids, sample.seed) for sample in samples]
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        opener = template_opener(self._tokenizer, protocol.template)
        return map(partial(_read_tokens, stops=stops, opener=opener), self._engine.generate(requests, params))


class TextModelClient:
    """A model served through a text API."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    def render(self, prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return render_as_text(prompts, template)

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """Generate with the endpoint, which also counts the tokens."""
        params = sampling_params(protocol, max_response_tokens, ())
        requests = [TextRequest(sample.rendered.messages or sample.rendered.text, sample.seed) for sample in samples]
        opener = template_opener(None, protocol.template)
        return map(partial(_read_text, stops=params.stop, opener=opener), self._endpoint.generate(requests, params))


def render_as_ids(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Renders prompts as token ids."""

    def render(prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return [RenderedPrompt(decode(tokenizer, ids), ids=tuple(ids)) for ids in ask(tokenizer, prompts, template)]

    return render


def render_as_text(prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
    """Prompts as chat messages, to which the server applies its model's template, or as the text of another template.

    DataError for a prompt that does not fit the template.
    """
    if template == OWN:
        return [RenderedPrompt(_as_text(prompt.messages), messages=prompt.messages) for prompt in prompts]
    return [RenderedPrompt(prompt_text(prompt, template)) for prompt in prompts]


def _read_tokens(completion: Completion, stops: StopTexts, opener: str) -> Response:
    """The text up to and including the first stop text, and its number of tokens."""
    text, num_tokens = stops.read(completion.token_ids)
    if num_tokens is None:
        return Response(opener + text, len(completion.token_ids), completion.finish_reason)
    return Response(opener + text, num_tokens, FinishReason.STOP)


def _read_text(completion: TextCompletion, stops: Sequence[str], opener: str) -> Response:
    """The text up to and including the first stop text; endpoints may generate past it."""
    end = end_of_first(completion.text, stops)
    if end is None:
        return Response(opener + completion.text, completion.num_tokens, completion.finish_reason)
    return Response(opener + completion.text[:end], completion.num_tokens, FinishReason.STOP)


def sampling_params(
    protocol: SuiteProtocol, max_response_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """The engine's parameters for a suite."""
    stop = (*stops_of(protocol.template), *protocol.stop)
    return SamplingParams(protocol.temperature, max_response_tokens, stop_token_ids, protocol.top_p, stop)


def _as_text(messages: Sequence[Message]) -> str:
    """The messages as written to records; the rendered prompt exists only on the server."""
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in messages)
