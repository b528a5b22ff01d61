"""A model behind an OpenAI-compatible endpoint: text in, text out, without token ids.

    endpoint = TextEndpoint.connect(EndpointModel(name="gpt-x"), ServerConfig(urls=(url,)), [CHAT])
    completion = endpoint.run(endpoint.complete(TextRequest(messages, seed), params))

Chats go to `/chat/completions`, where the server applies the model's own template, and texts to `/completions`. Many
endpoints follow `seed` only approximately, and some ignore it. The endpoint's other sampling defaults (such as
llama.cpp's `top_k` and `min_p`) stay in force unless `model.endpoint.request` sets them.
"""

import concurrent.futures
import difflib
import hashlib
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.errors import ConfigError, LostError
from luffy.files import write_atomic
from luffy.http_client import HTTPClient, LoopThread, NoAnswer, Refused
from luffy.rollout.engine import SamplingParams
from luffy.types import FinishReason, Message

logger = logging.getLogger(__name__)
_FILE = "endpoint.json"
CHAT = "/chat/completions"
TEXT = "/completions"
_UNAUTHORISED = (401, 403)
_NO_SUCH_PATH = (404, 405, 501)
_REDIRECTED = (301, 302, 303, 307, 308)
_BAD_REQUEST = 400
_OF_THIS_REQUEST = (_BAD_REQUEST, 413, 422)
"""Statuses that concern a single request: its prompt is too long, or violates a policy."""
_MAX_TOKENS, _MAX_COMPLETION_TOKENS = "max_tokens", "max_completion_tokens"
_LONGEST_COMPLAINT = 500
_SHORTEST_QUOTE = 12
_SEED_LIMIT = 2**31
"""Several endpoints accept only smaller seeds."""
_FILTERED = "content_filter"
_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    _FILTERED: FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
}
"""OpenAI's names, and those of Together (`eos`), TGI (`eos_token`, `stop_sequence`) and Mistral (`model_length`)."""
_STOPPED_AT = ("stop_reason", "matched_stop")
"""Fields in which vLLM and SGLang name the stop string that ended a response; null or an id where a token did."""
_REASONING = ("reasoning_content", "reasoning")
_Result = TypeVar("_Result")
_SERVER_SETTING = "execution.server"
"""The section of the configuration that says where evaluated models are served."""


class RequestRejected(ConfigError):
    """The endpoint rejects this request for good, but may accept others."""


class UnreadableAnswer(LostError):
    """The endpoint's answer is not a complete completion; another attempt may return one."""


def write_endpoint(folder: Path, model: EndpointModel) -> None:
    """Save the description of an endpoint's model in `folder`, which holds the weights of other models."""
    folder.mkdir(exist_ok=True)
    write_atomic(folder / _FILE, model.model_dump_json(indent=1) + "\n")


def read_endpoint(folder: Path) -> EndpointModel | None:
    """The description saved by `write_endpoint`; None for a folder with weights."""
    file = folder / _FILE
    return EndpointModel.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One response to generate."""

    prompt: str | tuple[Message, ...]
    """A text to continue, or the turns of a chat."""
    seed: int

    @property
    def path(self) -> str:
        return TEXT if isinstance(self.prompt, str) else CHAT


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """A generated response as text."""

    text: str
    num_tokens: int
    """Completion tokens as the endpoint counts them, reasoning included."""
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    """Prompt tokens as the endpoint counts them; None: it does not say."""
    is_refusal: bool = False
    """Whether the endpoint's content filter ended it, or the model declined in the protocol's own field."""


class TextEndpoint:
    """Generates with one model on any number of servers; each request goes to the least busy one.

    `setting` is the section of the configuration that errors name. `luffy.stages.answers.paid` saves the responses.
    """

    def __init__(self, model: EndpointModel, config: ServerConfig, setting: str = _SERVER_SETTING) -> None:
        self._loop = LoopThread()
        self._clients = [HTTPClient.to_server(url, config, setting) for url in config.api_roots]
        self._num_running = [0] * len(self._clients)
        self.concurrency = config.concurrency * len(self._clients)
        """Requests that may be under way at the same time."""
        self._model = model
        self._setting = setting
        self._key_variable = config.api_key_variable
        self._limit_name = _MAX_TOKENS
        self._num_filtered = 0

    @classmethod
    def connect(
        cls, model: EndpointModel, config: ServerConfig, paths: Sequence[str], setting: str = _SERVER_SETTING
    ) -> "TextEndpoint":
        """An endpoint whose servers have all of `paths` (`CHAT`, `TEXT`); nothing is generated.

        Raises ConfigError for a server that cannot be reached, refuses the API key or lacks a path.
        """
        endpoint = cls(model, config, setting)
        with ExitStack() as on_failure:
            on_failure.callback(endpoint.close)
            endpoint._loop.run(endpoint._check(paths))
            on_failure.pop_all()
        return endpoint

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for a coroutine that calls `complete`, in the endpoint's event loop."""
        return self._loop.run(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        """Start such a coroutine from another thread; `close` cancels it."""
        return self._loop.submit(coroutine)

    def key_of(self, request: TextRequest, params: SamplingParams) -> str:
        """Hash of everything that is sent with the request, and of its full seed."""
        body = self._body(request, params, _MAX_TOKENS)  # which holds the seed only in part
        return hashlib.sha256(json.dumps([request.path, request.seed, body]).encode()).hexdigest()

    async def complete(self, request: TextRequest, params: SamplingParams) -> TextCompletion:
        """One completion from the least busy server; for `run` and `submit`.

        Raises RequestRejected for a request that the endpoint rejects, any other ConfigError for a wrong key or path,
        UnreadableAnswer for an incomplete answer, and LostError or ClusterError when it fails after all retries.
        """
        place = min(range(len(self._clients)), key=self._num_running.__getitem__)
        self._num_running[place] += 1
        try:
            answer = await self._ask(self._clients[place], request, params)
        finally:
            self._num_running[place] -= 1
        return self._completion(self._clients[place].url, answer, params)

    def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._loop.is_closed:
            return
        if self._num_filtered:
            logger.warning("%d responses were ended by the endpoint's content filter", self._num_filtered)
        for client in self._clients:
            self._loop.run(client.close())
        self._loop.close()

    async def _check(self, paths: Sequence[str]) -> None:
        for client in self._clients:
            for path in paths:
                try:
                    # A request without a prompt, to see whether the endpoint exists.
                    answer = await client.ask(path, {"model": self._model.name, _MAX_TOKENS: 1})
                except NoAnswer as error:
                    raise ConfigError(f"{self._setting}.urls: {error}; start the server or correct the URL") from error
                if answer.status in (*_UNAUTHORISED, *_NO_SUCH_PATH, *_REDIRECTED):
                    raise self._refusal(client, path, answer.status, answer.complaint)

    async def _ask(self, client: HTTPClient, request: TextRequest, params: SamplingParams) -> Mapping[str, Any]:
        limit_name = self._limit_name
        try:
            body = self._body(request, params, limit_name)
            return await client.post_with_retries(request.path, body)
        except Refused as error:
            # OpenAI's reasoning models require the limit under another name, and say so in the error.
            asks_for_it = error.answer.status == _BAD_REQUEST and _MAX_COMPLETION_TOKENS in error.answer.complaint
            if limit_name == _MAX_TOKENS and asks_for_it:
                self._limit_name = _MAX_COMPLETION_TOKENS
                return await self._ask(client, request, params)
            complaint = _unquoted(error.answer.complaint, request)
            if not error.answer.may_pass:
                raise self._refusal(client, request.path, error.answer.status, complaint) from None
            raise type(error)(f"{client.url}{request.path}: {complaint}; {_GOES_ON}", error.answer) from None
        except NoAnswer as error:
            raise NoAnswer(f"{error}; {_GOES_ON}") from error

    def _body(self, request: TextRequest, params: SamplingParams, limit_name: str) -> dict[str, object]:
        prompt: dict[str, object] = (
            {"prompt": request.prompt}
            if isinstance(request.prompt, str)
            else {"messages": [{"role": turn.role, "content": turn.content} for turn in request.prompt]}
        )
        fields = {
            "model": self._model.name,
            **prompt,
            limit_name: params.max_response_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request.seed % _SEED_LIMIT,
            **({"stop": list(params.stop)} if params.stop else {}),
            **self._model.request,
        }
        left_out = [name for name, value in self._model.request.items() if value is None]
        return {name: value for name, value in fields.items() if name not in left_out}

    def _completion(self, url: str, answer: Mapping[str, Any], params: SamplingParams) -> TextCompletion:
        try:
            choice = answer["choices"][0]
            text = _text(choice)
            finish_reason = choice["finish_reason"]
            reason = _FINISH_REASONS.get(finish_reason)
            usage = answer["usage"]
            num_tokens = int(usage["completion_tokens"])
            prompt_tokens = None if usage.get("prompt_tokens") is None else int(usage["prompt_tokens"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableAnswer(
                f"{url}: the response has no text, finish_reason or usage.completion_tokens "
                f"({type(error).__name__}: {error}); {_GOES_ON}"
            ) from None
        if reason is None:
            raise UnreadableAnswer(f"{url}: unexpected finish_reason {finish_reason!r}; {_GOES_ON}")
        self._num_filtered += finish_reason == _FILTERED
        if reason is FinishReason.STOP and finish_reason != _FILTERED:
            text += _cut_off(text, choice, params.stop)
        # A lone surrogate cannot be encoded as UTF-8.
        written = text.encode(errors="replace").decode()
        message = choice.get("message")
        is_refusal = finish_reason == _FILTERED or (isinstance(message, Mapping) and bool(message.get("refusal")))
        return TextCompletion(written, num_tokens, reason, prompt_tokens, is_refusal)

    def _refusal(self, client: HTTPClient, path: str, status: int, complaint: str) -> ConfigError:
        url, model = f"{client.url}{path}", self._model.name
        if status in _UNAUTHORISED:
            holds = "holds a rejected key" if client.has_key else "is not set"
            return ConfigError(
                f"{url}: {complaint}: the API key is read from the environment variable "
                f"{self._key_variable} ({self._setting}.api_key_variable), which {holds}"
            )
        if status in _NO_SUCH_PATH:
            return ConfigError(f"{url}: {complaint}: no model {model!r} there; {_OTHERWISE[path]}")
        if status in _REDIRECTED:
            return ConfigError(f"{url}: {complaint}; correct {self._setting}.urls")
        kind = RequestRejected if status in _OF_THIS_REQUEST else ConfigError
        return kind(f"{url}: the model {model!r} refuses the request: {complaint}")


_GOES_ON = "finished responses are saved, and the same command continues after them"
_OTHERWISE = {
    CHAT: "correct the model's name or the URL, or, if the endpoint has no chat, set an evaluation.template other than "
    "own (`none` is the question alone)",
    TEXT: "an evaluation.template other than own needs this path; if the endpoint has only chat, "
    "set evaluation.template: own",
}


def _unquoted(complaint: str, request: TextRequest) -> str:
    """The error message, shortened, without quotes from the prompt: some problems must not be published."""
    asked = request.prompt if isinstance(request.prompt, str) else "\n".join(turn.content for turn in request.prompt)
    rest = complaint[:_LONGEST_COMPLAINT]
    while True:
        quote = difflib.SequenceMatcher(None, rest, asked, autojunk=False).find_longest_match()
        if quote.size < _SHORTEST_QUOTE:
            return rest
        rest = f"{rest[: quote.a]}…{rest[quote.a + quote.size :]}"


def _text(choice: Mapping[str, Any]) -> str:
    """The response with any reasoning, which the server returns separately, in front as models write it."""
    message = choice["message"] if "message" in choice else {"content": choice["text"]}
    content = message.get("content") or ""
    reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise TypeError("content is not text")
    if not reasoning:
        return content
    # Reasoning that was truncated before an answer began is not closed.
    is_closed = bool(content) or _FINISH_REASONS.get(choice["finish_reason"]) is not FinishReason.LENGTH
    return f"<think>\n{reasoning}" + (f"\n</think>\n\n{content}" if is_closed else "")


def _cut_off(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str:
    """The stop string that the server removed from the end of the response; empty when there is none.

    Where the server does not say what ended the response, a closing tag whose element is open is assumed.
    """
    said = [choice[name] for name in _STOPPED_AT if name in choice]
    if not said:
        tags = (stop for stop in stops if stop.startswith("</") and stop.endswith(">"))
        return next((tag for tag in tags if text.rfind(f"<{tag[2:]}") > text.rfind(tag)), "")
    matched = next((stop for stop in stops if stop in said), "")
    return "" if text.endswith(matched) else matched
