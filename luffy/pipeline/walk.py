"""Execution of a chain: each stage starts when its inputs are ready, and independent stages run at the same time."""

import contextvars
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from luffy.config import ExperimentConfig
from luffy.config.chain import StageNode
from luffy.pipeline.gpus import detected_gpus, gpus_of_stage

Result = TypeVar("Result")
Make = Callable[[StageNode, Mapping[str, Result]], Result]
"""Makes a stage from its inputs, by input name."""


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of a machine for stages."""

    slots: int
    """GPUs, or stages on a machine without GPUs."""
    needs: Mapping[str, int]
    """Slots of each stage, by node."""
    most: int
    """Upper limit of stages at the same time."""

    def fits(self, node: StageNode, running: Collection[StageNode]) -> bool:
        taken = sum(self.needs[other.name] for other in running)
        return not running or (len(running) < self.most and taken + self.needs[node.name] <= self.slots)


_TRAIN = ("base", "sft", "rl")
ONE_AT_A_TIME = Room(1, {}, 1)


def find_room(config: ExperimentConfig, nodes: Sequence[StageNode]) -> Room:
    """This machine's capacity for the stages of `config`; one at a time if they would share GPUs or all cores.

    Without GPUs, a stage takes `execution.num_threads` cores; one that trains takes them for each of its ranks, and one
    more for its graders.
    """
    execution = config.execution
    most = execution.parallel_stages or len(nodes)
    if most == 1 or execution.gpus == 0:
        return ONE_AT_A_TIME
    gpus = detected_gpus()
    if gpus:
        return Room(
            len(gpus), {node.name: min(gpus_of_stage(node.config, node.stage), len(gpus)) for node in nodes}, most
        )
    if gpus is None or any(node.config.execution.num_threads is None for node in nodes):
        return ONE_AT_A_TIME  # torch takes every core
    if execution.parallel_stages:
        return Room(most, {node.name: 1 for node in nodes}, most)
    needs = {
        node.name: node.config.execution.ranks * (node.config.execution.num_threads or 1) + 1
        if node.stage in _TRAIN
        else node.config.execution.num_threads or 1
        for node in nodes
    }
    return Room(os.cpu_count() or 1, needs, most)


def walk(nodes: Sequence[StageNode], make: Make[Result], room: Room, stop: Callable[[], None]) -> dict[str, Result]:
    """The results of `make` by node name; a node starts after those it reads from.

    Concurrent stages run in threads. An interrupt calls `stop`, which has to end them. After a failure no further stage
    starts; running ones finish, and then the first failure in the order of the chain is raised.
    """
    done: dict[str, Result] = {}
    if room.most == 1:
        for node in nodes:
            done[node.name] = make(node, _inputs(node, done))
        return done
    running: dict[Future[Result], StageNode] = {}
    waiting, failures = list(nodes), dict[str, Exception]()
    with ThreadPoolExecutor(len(nodes), thread_name_prefix="stage") as pool, stopping_on_failure(pool, stop):
        while running or (waiting and not failures):
            for node in [] if failures else list(waiting):
                if all(source in done for source in node.inputs.values()):
                    if not room.fits(node, running.values()):
                        break  # none overtakes a stage that only waits for resources
                    waiting.remove(node)
                    began = partial(make, node, _inputs(node, done))
                    running[pool.submit(contextvars.copy_context().run, began)] = node
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                node, error = running.pop(future), future.exception()
                if error is None:
                    done[node.name] = future.result()
                elif isinstance(error, Exception):
                    failures[node.name] = error
                else:  # an interrupt is raised at once
                    raise error
    for node in nodes:
        if node.name in failures:
            raise failures[node.name]
    return {node.name: done[node.name] for node in nodes}


@contextmanager
def stopping_on_failure(pool: ThreadPoolExecutor, stop: Callable[[], None]) -> Iterator[None]:
    """When the block raises, also on Ctrl-C: call `stop`, cancel what is queued in `pool`, and wait for the rest."""
    with ExitStack() as on_failure:
        on_failure.callback(pool.shutdown, wait=True, cancel_futures=True)
        on_failure.callback(stop)
        yield
        on_failure.pop_all()


def _inputs(node: StageNode, done: Mapping[str, Result]) -> dict[str, Result]:
    return {name: done[source] for name, source in node.inputs.items()}
