"""Walking a chain: each stage once what it reads is there, and stages that fit beside each other at the same time."""

import contextvars
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from luffy.config import ExperimentConfig
from luffy.pipeline.chain.graph import StageNode
from luffy.pipeline.machine.gpus import detected_gpus, gpus_of_stage

Result = TypeVar("Result")
Make = Callable[[StageNode, Mapping[str, Result]], Result]
"""Makes a stage from the results that it reads, by input name."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many stages a machine has room for."""

    slots: int
    """GPUs; on a machine without any, stages."""
    needs: Mapping[str, int]
    """Slots of each stage, by node."""
    most: int
    """Stages at the same time, whatever they need."""

    def fits(self, node: StageNode, running: Collection[StageNode]) -> bool:
        """Whether `node` may start beside those that are running."""
        taken = sum(self.needs[other.name] for other in running)
        return not running or (len(running) < self.most and taken + self.needs[node.name] <= self.slots)


ONE_AT_A_TIME = Room(1, {}, 1)


def find_room(config: ExperimentConfig, nodes: Sequence[StageNode]) -> Room:
    """The room of this machine for the stages of `config`, one at a time where they would share what they use.

    Without GPUs a stage counts as its threads and one core for its graders.
    """
    execution = config.execution
    most = execution.parallel_stages or len(nodes)
    if most == 1 or execution.server.urls or execution.gpus == 0:
        return ONE_AT_A_TIME  # a server has the weights of one checkpoint at a time
    gpus = detected_gpus()
    if gpus:
        return Room(len(gpus), {node.name: gpus_of_stage(config, node.stage) for node in nodes}, most)
    if gpus is None or execution.num_threads is None:
        return ONE_AT_A_TIME  # torch takes every core
    by_cores = (os.cpu_count() or 1) // (execution.num_threads + 1)
    slots = execution.parallel_stages or max(1, by_cores)
    return Room(slots, {node.name: 1 for node in nodes}, slots)


def walk(nodes: Sequence[StageNode], make: Make[Result], room: Room, stop: Callable[[], None]) -> dict[str, Result]:
    """What `make` returns for each of `nodes`, by name; a node starts after those it reads from.

    Stages that run at the same time do so in threads. An interrupt calls `stop`, which has to end them. When a stage
    fails, those beside it finish and no other begins; then the first failure in the chain's order is raised.
    """
    if room.most == 1:
        done: dict[str, Result] = {}
        for node in nodes:
            done[node.name] = make(node, _inputs(node, done))
        return done
    with ThreadPoolExecutor(len(nodes), thread_name_prefix="stage") as pool, stopping_on_failure(pool, stop):
        return _side_by_side(nodes, make, room, pool)


@contextmanager
def stopping_on_failure(pool: ThreadPoolExecutor, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop`, drop what waits in `pool` and wait for the rest when the block raises anything, a Ctrl-C too."""
    with ExitStack() as on_failure:
        on_failure.callback(pool.shutdown, wait=True, cancel_futures=True)
        on_failure.callback(stop)
        yield
        on_failure.pop_all()


def _side_by_side(
    nodes: Sequence[StageNode], make: Make[Result], room: Room, pool: ThreadPoolExecutor
) -> dict[str, Result]:
    done: dict[str, Result] = {}
    running: dict[Future[Result], StageNode] = {}
    waiting, failures = list(nodes), dict[str, Exception]()
    while running or (waiting and not failures):
        for node in [] if failures else _startable(waiting, done, room, list(running.values())):
            waiting.remove(node)
            began = partial(make, node, _inputs(node, done))
            running[pool.submit(contextvars.copy_context().run, began)] = node
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            node, error = running.pop(future), future.exception()
            if error is None:
                done[node.name] = future.result()
            elif isinstance(error, Exception):
                failures[node.name] = error
            else:  # an interrupt waits for nobody
                raise error
    for node in nodes:
        if node.name in failures:
            raise failures[node.name]
    return {node.name: done[node.name] for node in nodes}


def _startable(
    waiting: Sequence[StageNode], done: Collection[str], room: Room, running: Sequence[StageNode]
) -> list[StageNode]:
    """The next stages in the chain's order: none overtakes one that could start if it had room."""
    found: list[StageNode] = []
    for node in waiting:
        if all(source in done for source in node.inputs.values()):
            if not room.fits(node, [*running, *found]):
                break
            found.append(node)
    return found


def _inputs(node: StageNode, done: Mapping[str, Result]) -> dict[str, Result]:
    return {name: done[source] for name, source in node.inputs.items()}
