"""Checks of the vLLM servers for `ServerEngine`, and the calls to their workers."""

import asyncio
from collections.abc import Mapping
from typing import Any

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError
from luffy.http_client import Answer, HTTPClient, NoAnswer

GENERATE = "/inference/v1/generate"
"""vLLM's endpoint that takes and returns token ids."""
_MODELS = "/v1/models"
_WORKERS = "/collective_rpc"
_EXTENSION = "--worker-extension-cls luffy.rollout.vllm_worker.ServerWorker"
_UNAUTHORISED = 401
_FORBIDDEN = 403
_NOT_FOUND = 404


def check_servers(config: ServerConfig, dtype: str, max_model_len: int) -> None:
    """Raise ConfigError for a server that `ServerEngine` cannot use; nothing is generated.

    The server has to be reachable, accept the API key, have a context of at least `max_model_len` tokens and run with
    the options that the engine needs.
    """

    async def check() -> None:
        for url in config.roots:
            client = HTTPClient.to_server(url, config)
            try:
                await _check_server(client, config.api_key_variable, dtype, max_model_len)
            finally:
                await client.close()

    asyncio.run(check())


async def _check_server(client: HTTPClient, api_key_variable: str, dtype: str, max_model_len: int) -> None:
    missing = _missing_context(client.url, await _models(client, api_key_variable), max_model_len)
    # An empty request, to see whether the endpoint exists.
    if (await client.ask(GENERATE, {})).status in (_FORBIDDEN, _NOT_FOUND):
        missing.append("--enable-scale-out")
    settings = await client.ask(_WORKERS, {"method": "luffy_settings"})
    if settings.status == _NOT_FOUND:
        missing.append("VLLM_SERVER_DEV_MODE=1 in its environment")
    if not settings.ok:
        missing.append(_EXTENSION)
    # A server that cannot report its settings has to be started with all of them.
    reports = settings.body["results"] if settings.ok else [{}]
    missing += [option for report in reports for option in _missing_options(report, dtype)]
    if missing:
        raise ConfigError(f"{client.url}: start this server with {', '.join(dict.fromkeys(missing))}")


async def check_folder(client: HTTPClient, folder: str) -> None:
    """Raise ConfigError for a folder that the server does not see, or that holds a different model."""
    for difference in await _ask_workers(client, "luffy_difference", folder):
        if difference is not None:
            raise ConfigError(f"{client.url}: {difference}")


async def load_folder(client: HTTPClient, folder: str) -> None:
    """Replace the weights of a paused server; ClusterError when the folder does not have all of them."""
    missing = sorted({name for names in await _ask_workers(client, "luffy_load", folder) for name in names})
    if missing:
        raise ClusterError(f"{client.url}: {folder} has no {', '.join(missing[:3])} ({len(missing)} weights in all)")


async def _models(client: HTTPClient, api_key_variable: str) -> Answer:
    try:
        answer = await client.ask(_MODELS)
    except NoAnswer as error:
        raise ConfigError(f"execution.server.urls: {error}; start the server or correct the URL") from error
    if answer.status in (_UNAUTHORISED, _FORBIDDEN):
        raise ConfigError(
            f"{client.url}: the server refuses the API key; it is read from the environment variable "
            f"{api_key_variable} (execution.server.api_key_variable), which "
            f"{'holds a wrong one' if client.has_key else 'is not set'}"
        )
    return answer


def _missing_context(url: str, models: Answer, max_model_len: int) -> list[str]:
    """The missing `--max-model-len` option, if any; ConfigError when the server is not vLLM."""
    served = models.body.get("data") if models.ok else None
    context = served[0].get("max_model_len") if isinstance(served, list) and served else None
    if not isinstance(context, int):
        raise ConfigError(
            f"{url}: this is not a vLLM server ({_MODELS}: "
            f"{'names no max_model_len' if models.ok else models.complaint}); other servers return no token ids"
        )
    return [f"--max-model-len {max_model_len} (it has {context})"] if context < max_model_len else []


def _missing_options(settings: Mapping[str, object], dtype: str) -> list[str]:
    """Options that are missing according to a worker's report (`ServerWorker.luffy_settings`)."""
    wanted = {"dtype": dtype, "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    missing = [f"--{name.replace('_', '-')} {value}" for name, value in wanted.items() if settings.get(name) != value]
    # With chunked prefill vLLM's CPU worker fails on requests with a seed.
    if settings.get("device") == "cpu" and settings["chunked_prefill"]:
        missing.append("--no-enable-chunked-prefill")
    return missing


async def _ask_workers(client: HTTPClient, method: str, argument: str) -> list[Any]:
    """The return values of the server's workers."""
    answer = await client.post(_WORKERS, {"method": method, "args": [argument]})
    results = answer["results"]
    assert isinstance(results, list)
    return results
