"""Who answers an evaluation's prompts: an engine of token ids with the model's tokenizer, or an endpoint of text."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import SuiteProtocol
from luffy.data.prompt_templates import OWN, ask, prompt_text, stops_of, template_opener
from luffy.data.templates import decode, stop_token_ids
from luffy.evaluation.asking import Ask, AskedPrompt, Response
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import TextEndpoint, TextRequest
from luffy.types import FinishReason, Message, Prompt


class Respondent(Protocol):
    """A model that answers."""

    def ask(self, prompts: Sequence[Prompt], template: str) -> list[AskedPrompt]:
        """Each prompt under the template of that name; DataError for one that it cannot ask."""
        ...

    def respond(
        self, prompts: Sequence[AskedPrompt], seeds: Sequence[int], how: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """One response a prompt, in their order: all are generated on return, and read as they are taken."""
        ...


class TokenRespondent:
    """The model behind an engine of token ids."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def ask(self, prompts: Sequence[Prompt], template: str) -> list[AskedPrompt]:
        """By `ask_by_ids`."""
        return ask_by_ids(self._tokenizer)(prompts, template)

    def respond(
        self, prompts: Sequence[AskedPrompt], seeds: Sequence[int], how: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """Generate by the engine; the texts that end a response stay in it."""
        params = _params(how, max_response_tokens, stop_token_ids(self._tokenizer))
        requests = [RolloutRequest(prompt.ids, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        opener = template_opener(self._tokenizer, how.template)
        return map(partial(self._read, stops=params.stop, opener=opener), self._engine.generate(requests, params))

    def _read(self, completion: Completion, stops: Sequence[str], opener: str) -> Response:
        """The text up to the first of the texts that end it, and how many tokens that took."""
        ids = completion.token_ids
        text = decode(self._tokenizer, ids)
        end = _end_of_first(text, stops)
        if end is None:
            return Response(opener + text, len(ids), completion.finish_reason)
        num_tokens = _fewest(len(ids), lambda n: _end_of_first(decode(self._tokenizer, ids[:n]), stops) is not None)
        return Response(opener + text[:end], num_tokens, FinishReason.STOP)


class TextRespondent:
    """A model that others serve."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    def ask(self, prompts: Sequence[Prompt], template: str) -> list[AskedPrompt]:
        """By `ask_by_text`."""
        return ask_by_text(prompts, template)

    def respond(
        self, prompts: Sequence[AskedPrompt], seeds: Sequence[int], how: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """Generate at the endpoint, which counts the tokens."""
        params = _params(how, max_response_tokens, ())
        requests = [
            TextRequest(prompt.messages or prompt.text, seed) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        opener = template_opener(None, how.template)
        return map(partial(_read_text, stops=params.stop, opener=opener), self._endpoint.generate(requests, params))


def ask_by_ids(tokenizer: PreTrainedTokenizerBase) -> Ask:
    """Prompts by the ids that `tokenizer` makes of them under a template."""

    def ask_all(prompts: Sequence[Prompt], template: str) -> list[AskedPrompt]:
        return [AskedPrompt(decode(tokenizer, ids), ids=tuple(ids)) for ids in ask(tokenizer, prompts, template)]

    return ask_all


def ask_by_text(prompts: Sequence[Prompt], template: str) -> list[AskedPrompt]:
    """Prompts by their turns, to which a server applies its model's own template, or by the text of another template.

    DataError for one that the template cannot ask.
    """
    if template == OWN:
        return [AskedPrompt(_as_text(prompt.messages), messages=prompt.messages) for prompt in prompts]
    return [AskedPrompt(prompt_text(prompt, template)) for prompt in prompts]


def _read_text(completion: TextCompletion, stops: Sequence[str], opener: str) -> Response:
    """Up to the first of the texts that end it, should the endpoint have gone on."""
    end = _end_of_first(completion.text, stops)
    if end is None:
        return Response(opener + completion.text, completion.num_tokens, completion.finish_reason)
    return Response(opener + completion.text[:end], completion.num_tokens, FinishReason.STOP)


def _params(how: SuiteProtocol, max_response_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    stop = (*stops_of(how.template), *how.stop)
    return SamplingParams(how.temperature, max_response_tokens, stop_token_ids, how.top_p, stop)


def _as_text(messages: Sequence[Message]) -> str:
    """The turns of a chat, which nobody here sees as the model does."""
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in messages)


def _end_of_first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop texts in `text` ends; None without one."""
    ends = [start + len(stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(ends, default=None)


def _fewest(most: int, holds: Callable[[int], bool]) -> int:
    """The least n in 1..most for which `holds`, which holds for `most` and, once it does, for every greater n."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
