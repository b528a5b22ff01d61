"""Prefect's global concurrency limit `gpu`, with one slot for each GPU of the serving machine."""

import httpx

from luffy.flows.basic_auth import authorization
from luffy.pipeline.machine.gpus import QUEUE, detected_gpus

_TIMEOUT_S = 10.0


def limit_gpus(url: str) -> int:
    """Create or update the limit; returns the machine's number of GPUs. Without GPUs none is created.

    Has to be called while nothing runs: it frees all slots, which then belong to runs whose server was killed.
    """
    slots, address = len(detected_gpus() or ()), f"{url}/v2/concurrency_limits"
    found = httpx.get(f"{address}/{QUEUE}", headers=authorization(), timeout=_TIMEOUT_S)
    if found.status_code == httpx.codes.NOT_FOUND:
        if slots:
            httpx.post(
                f"{address}/", json={"name": QUEUE, "limit": slots}, headers=authorization(), timeout=_TIMEOUT_S
            ).raise_for_status()
        return slots
    found.raise_for_status()
    # Without GPUs here, a limit that the user made for other machines keeps its size.
    change = {"limit": slots, "active_slots": 0, "active": True} if slots else {"active_slots": 0}
    httpx.patch(f"{address}/{QUEUE}", json=change, headers=authorization(), timeout=_TIMEOUT_S).raise_for_status()
    return slots
