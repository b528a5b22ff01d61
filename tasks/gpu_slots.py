"""GPUs under Prefect: slots of the global concurrency limit `gpu`, held only by stages that run.

A task takes slots after it has decided not to reuse, so a cached stage never queues. Prefect is only a view here, too:
without the limit, or without a server, a stage continues, and the GPU locks (`luffy.pipeline.gpus`) still
prevent sharing. The lease of a killed run expires, which frees its slots.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from luffy.errors import ConfigError
from luffy.pipeline.gpus import QUEUE, Stopped, Waiting, pause
from luffy.tasks.prefect_faults import tolerating_prefect

_LEASE_S = 60.0
"""The shortest lease that Prefect allows. It is renewed while the stage runs; after a kill the slots stay taken for
that long."""
_REQUEST_TIMEOUT_S = 60.0


@contextmanager
def gpu_slots(wanted: int, waiting: Waiting, stopped: Stopped) -> Iterator[None]:
    """Hold `wanted` slots of the limit; raises ConfigError if the limit is smaller."""
    announced = False
    while (slots := _take(wanted)) is None:
        if not announced:
            waiting(f"a slot of Prefect's limit {QUEUE!r}" if wanted == 1 else f"{wanted} slots of Prefect's {QUEUE!r}")
            announced = True
        pause(stopped)
    try:
        yield
    finally:
        # If the server is gone, the lease expires.
        with tolerating_prefect(f"the slots of the limit {QUEUE!r} could not be given back"):
            slots.close()


def _take(wanted: int) -> ExitStack | None:
    """Take the slots, which closing the result releases; None if too few are free.

    If Prefect has no limit or fails, the result holds no slots.
    """
    slots, limit = ExitStack(), _limit()
    if limit is None:
        return slots
    if wanted > limit.limit:
        raise ConfigError(
            f"the stage takes {wanted} GPUs, and Prefect's limit {QUEUE!r} has {limit.limit} slots; raise the limit or "
            "lower execution.vllm.engines, execution.vllm.tensor_parallel_size, execution.ray or execution.gpus"
        )
    # Checked first, because Prefect logs an error for each refused slot.
    if limit.active_slots + wanted > limit.limit:
        return None
    with tolerating_prefect(f"the stage goes on without a slot of the limit {QUEUE!r}", logging.WARNING):
        try:
            slots.enter_context(
                concurrency(
                    QUEUE, occupy=wanted, max_retries=0, lease_duration=_LEASE_S, raise_on_lease_renewal_failure=False
                )
            )
        except ConcurrencySlotAcquisitionError as error:
            if _is_taken(error):
                return None
            raise
    return slots


def _limit() -> GlobalConcurrencyLimitResponse | None:
    """The active limit; None if there is none or no server responds."""
    unread = f"the limit {QUEUE!r} could not be read, and the stage goes on without it"
    with (
        tolerating_prefect(unread, logging.WARNING),
        suppress(ObjectNotFound),
        get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT_S}) as client,
    ):
        found = client.read_global_concurrency_limit_by_name(QUEUE)
        return found if found.active else None
    return None


def _is_taken(error: ConcurrencySlotAcquisitionError) -> bool:
    cause = error.__cause__
    return isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED
