"""Prefect's global concurrency limit `gpu`, with one slot for each GPU of the serving machine."""

import httpx

from luffy.flows.api_client import ApiClient
from luffy.pipeline.machine.gpus import QUEUE, detected_gpus


def limit_gpus(api: ApiClient) -> int:
    """Create or update the limit; returns the machine's number of GPUs. Without GPUs none is created.

    Has to be called while nothing runs: it frees all slots, which then belong to runs whose server was killed.
    Raises httpx.HTTPError.
    """
    slots, limits = len(detected_gpus() or ()), "v2/concurrency_limits"
    found = api.ask("GET", f"{limits}/{QUEUE}")
    if found.status_code == httpx.codes.NOT_FOUND:
        if slots:
            api.ask("POST", f"{limits}/", {"name": QUEUE, "limit": slots}).raise_for_status()
        return slots
    found.raise_for_status()
    # Without GPUs here, a limit that the user made for other machines keeps its size.
    change = {"limit": slots, "active_slots": 0, "active": True} if slots else {"active_slots": 0}
    api.ask("PATCH", f"{limits}/{QUEUE}", change).raise_for_status()
    return slots
