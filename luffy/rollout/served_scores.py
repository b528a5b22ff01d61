"""Log-probabilities of given tokens under a model on vLLM servers; nothing is sampled.

    scorer = ServedScorer.connect(config, "org/teacher", longest=8192, known=texts, setting="execution.rl_teacher")
    (logprobs,) = scorer.score([ScoreRequest(ids, first=len(prompt_ids))])    # of ids[first:]

Any `vllm serve` will do. It returns the log-probabilities of the prompt (`prompt_logprobs`), which vLLM computes from
the unscaled logits (temperature 1).
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError
from luffy.http_client import HTTPClient, LoopThread
from luffy.rollout.server_engine import MODELS, served_models

_COMPLETIONS, _TOKENIZE = "/v1/completions", "/tokenize"
_MIN_SAMPLED = 1
"""vLLM samples at least one token after the prompt that it scores."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sequence whose end is to be scored."""

    token_ids: tuple[int, ...]
    first: int
    """Number of tokens at the start that are not scored, at least one."""


@dataclass(slots=True)
class _ScoringServer:
    client: HTTPClient
    places: asyncio.Semaphore
    """Limits the concurrent requests."""


class ServedScorer:
    """Scores sequences on all servers of `config`, which serve the same model; errors name the section `setting`."""

    def __init__(self, config: ServerConfig, model: str, setting: str) -> None:
        self._loop = LoopThread()
        self._servers = [
            _ScoringServer(HTTPClient.to_server(url, config, setting), asyncio.Semaphore(config.concurrency))
            for url in config.roots
        ]
        self._model = model
        self._setting = setting
        self._config = config

    @classmethod
    def connect(
        cls, config: ServerConfig, model: str, *, longest: int, known: Mapping[str, Sequence[int]], setting: str
    ) -> "ServedScorer":
        """A scorer of sequences up to `longest` tokens; `known` are texts with their token ids.

        Raises ConfigError for a server that cannot be reached, refuses the API key, does not serve `model`, has too
        short a context, or tokenizes one of the texts differently.
        """
        scorer = cls(config, model, setting)
        try:
            for server in scorer._servers:
                scorer._loop.run(scorer._check(server, longest, known))
        except BaseException:
            scorer.close()
            raise
        return scorer

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """For each request the log-probabilities of its tokens from `first` on, in nats, in order.

        Raises LostError where a server is gone after all retries, and ClusterError for an answer without
        log-probabilities.
        """
        return self._loop.run(self._score_all(requests))

    def close(self) -> None:
        """Close the connections; may be called twice."""
        if not self._loop.is_closed:
            for server in self._servers:
                self._loop.run(server.client.close())
            self._loop.close()

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        load, tasks = [0] * len(self._servers), dict[int, asyncio.Task[tuple[float, ...]]]()
        # Longest first, each to the server with the fewest tokens so far.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        try:
            async with asyncio.TaskGroup() as group:
                for i in order:
                    place = min(range(len(load)), key=load.__getitem__)
                    load[place] += len(requests[i].token_ids)
                    tasks[i] = group.create_task(self._score(self._servers[place], requests[i]))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [tasks[i].result() for i in range(len(requests))]

    async def _score(self, server: _ScoringServer, request: ScoreRequest) -> tuple[float, ...]:
        body = {
            "model": self._model,
            "prompt": list(request.token_ids),
            "max_tokens": _MIN_SAMPLED,
            # The token itself alone, without the most probable ones.
            "prompt_logprobs": 0,
        }
        async with server.places:
            # Scoring changes nothing, so that a request may be repeated.
            answer = await server.client.post_with_retries(_COMPLETIONS, body, retry_timeouts=True)
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(request.token_ids[request.first :], given[request.first :], strict=True)
            found = tuple(float(entry[str(token)]["logprob"]) for token, entry in pairs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ClusterError(
                f"{server.client.url}{_COMPLETIONS}: the answer has no log-probability for every token of the prompt "
                f"({type(error).__name__}); {self._setting} needs vLLM servers"
            ) from None
        for value in found:
            if not math.isfinite(value):
                raise ClusterError(
                    f"{server.client.url}: the log-probability of a token is {value}; the model is broken there"
                )
        return found

    async def _check(self, server: _ScoringServer, longest: int, known: Mapping[str, Sequence[int]]) -> None:
        url = server.client.url
        models = await served_models(server.client, self._config, self._setting)
        if not models.ok:
            raise ConfigError(f"{self._setting}.urls: {url}{MODELS}: {models.complaint}; is this a vLLM server?")
        served = models.body.get("data")
        found = [each for each in served if isinstance(each, dict)] if isinstance(served, list) else []
        contexts = {str(each.get("id")): each.get("max_model_len") for each in found}
        if self._model not in contexts:
            raise ConfigError(f"{url}: serves {', '.join(contexts) or 'no model'}, and not {self._model}")
        context = contexts[self._model]
        if not isinstance(context, int):
            raise ConfigError(
                f"{url}: is not a vLLM server ({MODELS} names no max_model_len); other servers cannot score prompts"
            )
        if context < longest + _MIN_SAMPLED:
            raise ConfigError(
                f"{url}: the longest prompt with its response has {longest} tokens, so this server needs "
                f"--max-model-len {longest + _MIN_SAMPLED} (it has {context})"
            )
        for text, ids in known.items():
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            if (await server.client.post(_TOKENIZE, body)).get("tokens") != list(ids):
                raise ConfigError(
                    f"{url}: the tokenizer of {self._model} is not the policy's, so it cannot score the policy's "
                    "tokens; take a teacher of the same family, or let it write traces instead (section synthesize)"
                )
