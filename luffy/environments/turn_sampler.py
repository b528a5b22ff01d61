"""Turns of many episodes, sampled by one engine in as few calls as their timing allows."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams

_Waiting = tuple[int, RolloutRequest, "asyncio.Future[Completion]"]


class TurnSampler:
    """Collects the requests of `num_episodes` episodes into calls of an engine; belongs to one event loop.

    With `lanes` 0, a call starts when every episode that has not ended waits for one: the calls depend on the episodes
    alone. Otherwise up to `lanes` calls run at once, each in a thread, and a free lane takes its share of the requests
    that wait, so that a slow tool holds up its own episode alone. Requests share their KV cache under `name`: a turn
    does not compute the earlier ones of its episode again.
    """

    def __init__(
        self, engine: RolloutEngine, params: SamplingParams, lanes: int, num_episodes: int, name: str = ""
    ) -> None:
        self.params = params
        self._engine = engine
        self._name = name
        self._free = lanes
        self._threads = _threads(lanes) if lanes else None
        self._num_playing = num_episodes
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def sample(self, episode: int, request: RolloutRequest) -> Completion:
        """The completion of the request; `episode` orders the requests of a call."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((episode, replace(request, shares_cache_with=self._name), done))
        # Later, so that all requests that become ready now share the calls.
        loop.call_soon(self._start)
        return await done

    def leave(self) -> None:
        """An episode has ended; called once for each."""
        self._num_playing -= 1
        asyncio.get_running_loop().call_soon(self._start)

    def __enter__(self) -> "TurnSampler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._waiting = [row for row in self._waiting if not row[2].done()]  # an episode may have been cancelled
        if self._threads is None:
            if self._waiting and len(self._waiting) == self._num_playing:
                batch, self._waiting = sorted(self._waiting, key=lambda row: row[0]), []
                self._deliver(batch, self._call(batch))
            return
        while self._waiting and self._free:
            size = -(-len(self._waiting) // self._free)
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            self._free -= 1
            call = asyncio.get_running_loop().create_task(self._in_a_lane(self._threads, batch))
            self._calls.add(call)  # the loop itself keeps no strong reference
            call.add_done_callback(self._calls.discard)

    async def _in_a_lane(self, threads: ThreadPoolExecutor, batch: Sequence[_Waiting]) -> None:
        result = await asyncio.get_running_loop().run_in_executor(threads, self._call, batch)
        self._free += 1
        self._deliver(batch, result)
        self._start()

    def _call(self, batch: Sequence[_Waiting]) -> list[Completion] | Exception:
        try:
            return self._engine.generate([request for _, request, _ in batch], self.params)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is raised to each episode that waits for it
            return error

    def _deliver(self, batch: Sequence[_Waiting], result: list[Completion] | Exception) -> None:
        for index, (_, _, done) in enumerate(batch):
            if done.done():
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result[index])


def _threads(number: int) -> ThreadPoolExecutor:
    """Threads that compute with as many cores as this one: torch keeps that number for each thread, and vLLM on a CPU
    refuses a step in a thread with another number than the one that started it."""
    import torch  # not above: demonstrations are replayed, and data prepared, by processes that need no torch

    return ThreadPoolExecutor(
        number, thread_name_prefix="turns", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    )
