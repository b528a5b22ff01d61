"""Cancellation from the UI by the flow itself: without a worker, or where the worker misses the request.

Prefect leaves cancellation to the worker, which learns of a request from one event. It misses the event if its
connection to the server is broken at that moment, and the run would go on as "Cancelling" to its end. A run that is
cancelled here ends as on Ctrl-C: this process gets the same signal.
"""

import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Cancelled

from luffy.tasks.prefect_faults import tolerating_prefect

_POLL_S = 3.0
_REQUEST_TIMEOUT_S = 60.0
_SETTLE_S = 30.0
WORKER_S = 40.0
"""A worker's share: it sends SIGTERM at once and SIGKILL 30 seconds later."""

_cancelled = threading.Event()


def was_cancelled() -> bool:
    """Whether a run of this process was cancelled."""
    return _cancelled.is_set()


@contextmanager
def watching_for_cancellation(flow_run: UUID, *, after_s: float = 0.0) -> Iterator[None]:
    """Within the block, interrupt this process once `flow_run` is cancelled, and make the run end as cancelled.

    Args:
        flow_run: The run to watch.
        after_s: Seconds left to somebody else to end the run.
    """
    ended = threading.Event()
    # In this thread's context, which holds Prefect's settings.
    context = contextvars.copy_context()
    watch = threading.Thread(
        target=context.run, args=(_watch, flow_run, ended, after_s), name="cancellation", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(flow_run: UUID, ended: threading.Event, after_s: float) -> None:
    client = get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT_S})
    while not ended.wait(_POLL_S):
        if _state(client, flow_run) in ("CANCELLING", "CANCELLED"):
            if ended.wait(after_s):
                return
            _cancelled.set()
            # Not a daemon: the process must not end before this thread.
            threading.Thread(target=_settle, args=(client, flow_run), name="cancelled", daemon=False).start()
            # A shell script starts background processes with SIGINT ignored.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
            return


def _settle(client: SyncPrefectClient, flow_run: UUID) -> None:
    """Mark the run as cancelled: Prefect marks an interrupted run as crashed, more than once."""
    threading.main_thread().join(_SETTLE_S)
    if _state(client, flow_run) == "CANCELLED":
        return
    with tolerating_prefect("the run could not be marked as cancelled; is its server gone?"):
        client.set_flow_run_state(flow_run, Cancelled(message="cancelled; run it again to resume"), force=True)


def _state(client: SyncPrefectClient, flow_run: UUID) -> str:
    """The type of the run's state; empty if the server does not return one."""
    with tolerating_prefect("the state of the run could not be read"):
        state = client.read_flow_run(flow_run).state
        return state.type.value if state is not None else ""
    return ""
