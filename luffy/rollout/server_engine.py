"""Rollouts from `vllm serve` (0.32), addressed by URL and API key.

`luffy serve-engine MODEL` starts one. The token endpoint (`/inference/v1/generate`) takes token ids and returns token
ids, log-probabilities and the weight version of each token, which the OpenAI format cannot carry. vLLM checks the API
key on `/v1` and `/inference` only: anyone who reaches the other endpoints can replace the weights, so these servers
belong in a private network.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.http_client import Answer, HTTPClient, LoopThread, NoAnswer
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, limit, room
from luffy.rollout.vllm_limits import check_lengths, check_params
from luffy.types import FinishReason

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ABORTED = "abort"
_GENERATE = "/inference/v1/generate"
"""vLLM's endpoint that takes and returns token ids."""
MODELS = "/v1/models"
_WORKERS = "/collective_rpc"
_EXTENSION = "--worker-extension-cls luffy.rollout.vllm_worker.ServerWorker"
SERVER_OPTIONS = f"--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm {_EXTENSION}".split()
"""What a server needs, with VLLM_SERVER_DEV_MODE=1, the dtype of the experiment, and no chunked prefill on a CPU."""
_UNAUTHORISED = 401
_FORBIDDEN = 403
_NOT_FOUND = 404


@dataclass(slots=True)
class _VLLMServer:
    """One server and the state of its requests."""

    client: HTTPClient
    places: asyncio.Semaphore
    steady: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the weights are replaced, so that no request is sent with the cache salt of the old ones."""


class ServerEngine:
    """Generates on vLLM servers; `generate` is thread-safe, also during a weight update.

    The servers are paused for an update, between two tokens, and running responses continue after it. Each token
    carries the weight version that the server reports. Its log-probability is that of a plain forward pass with those
    weights: an update clears the KV cache, at the cost of a new prefill of all running responses.

    A server serves one run at a time: a token from weights that this engine did not send is an error.
    """

    def __init__(self, config: ServerConfig, context: int, weight_version: int) -> None:
        self._loop = LoopThread()
        self._servers = [
            _VLLMServer(HTTPClient.to_server(url, config), asyncio.Semaphore(config.concurrency))
            for url in config.roots
        ]
        self._context = context
        self._numbers = itertools.count()
        self._run = secrets.token_hex(4)
        self._weight_version = weight_version

    @classmethod
    def connect(
        cls, config: ServerConfig, dtype: str, *, max_model_len: int, weight_version: int = 0
    ) -> "ServerEngine":
        """An engine on all servers of `config`; the weights they have now are labelled `weight_version`.

        `max_model_len` limits prompt and response together. Raises ConfigError for unusable servers
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
        """Like `connect`, then load a model folder that the servers see under the same path."""
        engine = cls.connect(config, dtype, max_model_len=max_model_len, weight_version=weight_version)
        with ExitStack() as on_failure:
            on_failure.callback(engine.close)
            engine.load_weights_from(folder, weight_version)
            on_failure.pop_all()
        return engine

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._weight_version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order.

        Raises ConfigError for a request longer than the servers' context, and ClusterError when a server still fails
        after all retries: LostError where another run of the stage may succeed.
        """
        check_params(params)
        check_lengths(requests, params, self._context)
        return self._loop.run(self._generate(requests, params, next(self._numbers)))

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights with those of a model folder that the servers see under the same path.

        Raises ConfigError, with the weights untouched, when a server does not see the folder or was started with
        another model, and ClusterError when an update fails; tokens are rejected then until a later update succeeds.
        """
        path = str(folder.resolve())

        async def check(server: _VLLMServer) -> None:
            for difference in await _ask_workers(server.client, "luffy_difference", path):
                if difference is not None:
                    raise ConfigError(f"{server.client.url}: {difference}")

        async def load(server: _VLLMServer) -> None:
            missing = sorted(
                {name for names in await _ask_workers(server.client, "luffy_load", path) for name in names}
            )
            if missing:
                names = f"{', '.join(missing[:3])} ({len(missing)} weights in all)"
                raise ClusterError(f"{server.client.url}: {path} has no {names}")

        self._on_all(check)
        with self.weight_update(version):
            self._on_all(load)

    @contextmanager
    def weight_update(self, version: int) -> Iterator[None]:
        """Pause all servers between two tokens while the block replaces their weights; one update at a time.

        To transfer weights from a trainer's GPUs, the block uses vLLM's own transfer
        (`vllm.distributed.weight_transfer`: the trainer's engine with an `HTTPVLLMWeightSyncClient` for each URL).
        """
        name = "unknown"
        try:
            self._on_all(self._pause)
            yield
            self._weight_version, name = version, str(version)
        finally:
            self._on_all(lambda server: self._resume(server, name))

    def close(self) -> None:
        """Close the connections; the servers keep their weights. May be called twice."""
        if not self._loop.is_closed:
            self._on_all(lambda server: server.client.close())
            self._loop.close()

    async def _generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, call: int
    ) -> list[Completion]:
        # Requests with the same prompt stay together, balanced over the servers.
        load, home = [0] * len(self._servers), dict[tuple[int, ...], int]()
        for prompt_ids, num_rows in Counter(request.prompt_ids for request in requests).most_common():
            home[prompt_ids] = min(range(len(load)), key=load.__getitem__)
            load[home[prompt_ids]] += num_rows
        # Longest expected first, so that no long response runs alone at the end.
        order = sorted(range(len(requests)), key=lambda i: -room(requests[i], params))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {}
                for i in order:
                    server = self._servers[home[requests[i].prompt_ids]]
                    tasks[i] = group.create_task(self._complete(server, requests[i], params, call))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [tasks[i].result() for i in range(len(requests))]

    async def _complete(
        self, server: _VLLMServer, request: RolloutRequest, params: SamplingParams, call: int
    ) -> Completion:
        async with server.places:
            async with server.steady:
                salt = f"{self._run}.{request.shares_cache_with or call}.{self._weight_version}"
            answer = await server.client.post_with_retries(_GENERATE, _body(request, params, salt))
        return self._completion(server.client.url, answer)

    def _completion(self, url: str, answer: Mapping[str, Any]) -> Completion:
        try:
            (choice,) = answer["choices"]
            reason = choice["finish_reason"]
            if reason == _ABORTED:
                raise LostError(f"{url}: the server ended a request before its response did; it may be shutting down")
            if reason not in _FINISH_REASONS:
                raise ClusterError(f"{url}: unexpected finish_reason {reason!r}")
            token_ids, spans = tuple(choice["token_ids"]), choice["weight_versions"]
            logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
            names = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        except KeyError as error:  # a server of another version
            raise ClusterError(f"{url}{_GENERATE}: the answer has no {error}") from None
        except (TypeError, ValueError) as error:
            raise LostError(f"{url}{_GENERATE}: the answer is incomplete ({type(error).__name__}: {error})") from None
        if not len(token_ids) == len(logprobs) == len(names):
            found = f"{len(token_ids)} tokens, {len(logprobs)} log-probabilities, {len(names)} weight versions"
            raise LostError(f"{url}{_GENERATE}: the answer is incomplete ({found})")
        versions = []
        for name in names:
            run, _, version = name.partition(".")
            if run != self._run or not version.isdecimal():
                raise ClusterError(
                    f"{url}: sampled tokens with weights that this run did not send (version {name!r}): another run "
                    "uses this server, it was restarted, or an update failed"
                )
            versions.append(int(version))
        return Completion(token_ids, logprobs, _FINISH_REASONS[reason], tuple(versions))

    async def _pause(self, server: _VLLMServer) -> None:
        await server.steady.acquire()
        # Running responses are kept, but their KV cache, computed with the old weights, is cleared.
        await server.client.post("/pause?mode=keep&clear_cache=true", {})

    async def _resume(self, server: _VLLMServer, version: str) -> None:
        try:
            await self._name_weights(server, version)
            await server.client.post("/resume", {})
        finally:
            if server.steady.locked():
                server.steady.release()

    async def _name_weights(self, server: _VLLMServer, version: str) -> None:
        await server.client.post("/update_weight_version", {"new_version": f"{self._run}.{version}"})

    def _on_all(self, act: Callable[[_VLLMServer], Awaitable[None]]) -> None:
        """Run `act` on all servers concurrently; waits for all of them, then raises the first failure."""

        async def on_all() -> None:
            for outcome in await asyncio.gather(*(act(server) for server in self._servers), return_exceptions=True):
                if outcome is not None:
                    raise outcome

        self._loop.run(on_all())


def _body(request: RolloutRequest, params: SamplingParams, salt: str) -> dict[str, object]:
    """Request body; only temperature and top-p shape the distribution."""
    stop_strings = {"stop": list(params.stop), "include_stop_str_in_output": True} if params.stop else {}
    return {
        "token_ids": [*request.prompt_ids, *request.prefix_ids],
        "cache_salt": salt,
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request.seed,
            "max_tokens": limit(request, params),
            "stop_token_ids": list(params.stop_token_ids),
            # The model's own end-of-sequence token stops a row only when it is among the stop tokens.
            "ignore_eos": True,
            # Log-probability of the sampled token alone.
            "logprobs": 0,
            # Text is only needed to find stop strings.
            "detokenize": bool(params.stop),
            # Stop strings may be special tokens.
            "skip_special_tokens": False,
            **stop_strings,
        },
    }


def check_servers(config: ServerConfig, dtype: str, max_model_len: int) -> None:
    """Raise ConfigError for a server that `ServerEngine` cannot use; nothing is generated.

    The server has to be reachable, accept the API key, have a context of at least `max_model_len` tokens and run with
    the options that the engine needs.
    """

    async def check() -> None:
        for url in config.roots:
            client = HTTPClient.to_server(url, config)
            try:
                await _check_server(client, config, dtype, max_model_len)
            finally:
                await client.close()

    asyncio.run(check())


async def _check_server(client: HTTPClient, config: ServerConfig, dtype: str, max_model_len: int) -> None:
    models = await served_models(client, config, "execution.server")
    served = models.body.get("data") if models.ok else None
    context = served[0].get("max_model_len") if isinstance(served, list) and served else None
    if not isinstance(context, int):
        raise ConfigError(
            f"{client.url}: this is not a vLLM server ({MODELS}: "
            f"{'names no max_model_len' if models.ok else models.complaint}); other servers return no token ids"
        )
    missing = [f"--max-model-len {max_model_len} (it has {context})"] if context < max_model_len else []
    # An empty request, to see whether the endpoint exists.
    if (await client.ask(_GENERATE, {})).status in (_FORBIDDEN, _NOT_FOUND):
        missing.append("--enable-scale-out")
    settings = await client.ask(_WORKERS, {"method": "luffy_settings"})
    if settings.status == _NOT_FOUND:
        missing.append("VLLM_SERVER_DEV_MODE=1 in its environment")
    if not settings.ok:
        missing.append(_EXTENSION)
    wanted = {"dtype": dtype, "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    # A server that cannot report its settings (`ServerWorker.luffy_settings`) has to be started with all of them.
    for report in settings.body["results"] if settings.ok else [{}]:
        missing += [
            f"--{name.replace('_', '-')} {value}" for name, value in wanted.items() if report.get(name) != value
        ]
        # With chunked prefill vLLM's CPU worker fails on requests with a seed.
        if report.get("device") == "cpu" and report["chunked_prefill"]:
            missing.append("--no-enable-chunked-prefill")
    if missing:
        wanting = ", ".join(dict.fromkeys(missing))
        raise ConfigError(f"{client.url}: start this server with {wanting} (luffy serve-engine starts such servers)")


async def served_models(client: HTTPClient, config: ServerConfig, setting: str) -> Answer:
    """The answer of `/v1/models`; ConfigError for a server that cannot be reached or refuses the API key."""
    try:
        answer = await client.ask(MODELS)
    except NoAnswer as error:
        raise ConfigError(f"{setting}.urls: {error}; start the server or correct the URL") from error
    if answer.status in (_UNAUTHORISED, _FORBIDDEN):
        raise ConfigError(
            f"{client.url}: the server refuses the API key; it is read from the environment variable "
            f"{config.api_key_variable} ({setting}.api_key_variable), which "
            f"{'holds a wrong one' if client.has_key else 'is not set'}"
        )
    return answer


async def _ask_workers(client: HTTPClient, method: str, argument: str) -> list[Any]:
    answer = await client.post(_WORKERS, {"method": method, "args": [argument]})
    results = answer["results"]
    assert isinstance(results, list)
    return results
