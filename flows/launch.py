"""Runs a flow from the command line.

Prefect reads its environment when it is imported. This module alone is responsible for the order: it sets the
environment, starts an API if none answers, and only then imports the flow, which imports Prefect.
"""

import importlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType

from luffy.cli.console import say, show_error
from luffy.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TEMPORARY, LostError, LuffyError, UserError
from luffy.flows.prefect_api import ApiServer, prefect_api, set_environment
from luffy.library_loading import without_collections
from luffy.pipeline.engine_process import EngineProcess
from luffy.pipeline.plan import StagePlan, several_to_make
from luffy.pipeline.warm_start import WarmServer, can_start_warm
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace

_EMBEDDED_RETRIES = 2
"""Retries of a request to the embedded server, after 2 s and 4 s."""
_KEPT = "finished stages are kept, and the same command continues"
_OF_FIRST_FLOW = ("prefect.flow_engine", "prefect.task_engine", "fastapi.encoders")
"""What Prefect imports at its first flow; here while the embedded server starts."""


def launch(
    flow: str,
    parameters: Mapping[str, object],
    workspace: Workspace,
    plans: Callable[[], Sequence[StagePlan]] | None,
    *,
    debug: bool,
) -> int:
    """Run the flow `module:function` with `parameters` to its end; returns the exit code.

    `plans` returns the plan of every stage; None for a flow of many runs, which finds them on its way. Raises
    LuffyError if the flow fails. SIGTERM, which schedulers send, ends the run as Ctrl-C does, with the exit code 75.
    """
    received: list[int] = []  # no event, whose lock a handler that is interrupted by another would wait for
    signal.signal(signal.SIGTERM, partial(_interrupt, received))
    try:
        workspace.prepare()
        os.environ[WORKSPACE_VARIABLE] = str(workspace.root)
        set_environment(workspace.prefect_home, debug=debug)
        say(f"workspace {workspace.root}: starting Prefect")  # which takes seconds, and a minute on a loaded machine
        server = prefect_api(workspace.prefect_home)
        with ExitStack() as shared:
            if plans is None or _several_to_make(plans):
                shared.enter_context(EngineProcess().use())
                if can_start_warm():
                    shared.enter_context(WarmServer(workspace.warm_log).use())
            module, _, name = flow.partition(":")
            with without_collections():
                program = importlib.import_module(module)
                for late in _OF_FIRST_FLOW:
                    importlib.import_module(late)
            call_flow(getattr(program, name), parameters, server)
    except KeyboardInterrupt:
        show_error("interrupted; the same command resumes")
        return EXIT_TEMPORARY if received else EXIT_INTERRUPTED
    return EXIT_OK


def _several_to_make(plans: Callable[[], Sequence[StagePlan]]) -> bool:
    try:
        return several_to_make(plans())
    except LuffyError:
        return False  # the flow meets the same error and reports it


def call_flow(flow: Callable[..., object], parameters: Mapping[str, object], server: ApiServer | None) -> None:
    """Run an imported flow once its embedded `server`, if it has one, answers."""
    from httpx import HTTPStatusError, TransportError, codes
    from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    # No automation watches an embedded server's heartbeats, and stopping them takes a second. An embedded server that
    # has died does not come back, and Prefect would wait a minute for it at every request.
    embedded = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_CLIENT_MAX_RETRIES: _EMBEDDED_RETRIES}
    with temporary_settings(embedded if server else {}):
        if server is not None:
            server.wait()
        try:
            flow(**parameters)
        except HTTPStatusError as error:
            host, status = error.request.url.host, error.response.status_code
            if status == codes.FORBIDDEN:
                raise UserError(
                    f"the Prefect server at {host} does not accept that name; start it with luffy serve --name {host}"
                ) from None
            if codes.is_server_error(status) or status in (codes.REQUEST_TIMEOUT, codes.TOO_MANY_REQUESTS):
                raise LostError(f"the Prefect server answers {status}; {_KEPT}") from error
            if status != codes.UNAUTHORIZED:
                raise
            raise UserError(
                f"the Prefect server at {host} requires a name and password; export "
                "PREFECT_API_AUTH_STRING='NAME:PASSWORD' as it was set for the server"
            ) from None
        except TransportError as error:
            raise LostError(
                f"the Prefect server no longer answers ({type(error).__name__}), so it has no record of how the run "
                f"ended; {_KEPT}"
            ) from error
        except ConcurrencySlotAcquisitionError as error:
            raise LostError(f"the Prefect server does not let a task begin ({error}); {_KEPT}") from error


def _interrupt(received: list[int], number: int, frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt
