"""A chain walked by one thread or several: order, room, failures and interrupts."""

import threading

import pytest

from luffy.config import load_experiment
from luffy.errors import StageFailed
from luffy.pipeline import walk as walking
from luffy.pipeline.gpus import Gpu
from luffy.pipeline.graph import build_graph
from luffy.pipeline.walk import Room, find_room, walk

WAIT_S = 20


@pytest.fixture
def nodes(smoke):
    return build_graph(smoke)


def room(nodes, slots, **needs):
    return Room(slots, {node.name: needs.get(node.name, 1) for node in nodes}, most=len(nodes))


def test_every_stage_gets_the_results_that_it_reads(nodes):
    for slots in (1, 2, 5):
        told = {}

        def make(node, inputs, told=told):
            told[node.name] = dict(inputs)
            return f"<{node.name}>"

        made = walk(nodes, make, room(nodes, slots), stop=lambda: None)
        assert made == {node.name: f"<{node.name}>" for node in nodes}
        assert list(made) == [node.name for node in nodes]
        assert told["rl"] == {"data": "<prepare_data>", "model": "<sft>"}


def test_an_evaluation_runs_beside_training(nodes):
    both = threading.Barrier(2)

    def make(node, inputs):
        if node.name in ("sft", "evaluate_base"):
            both.wait(WAIT_S)  # broken unless the other one runs, too

    walk(nodes, make, room(nodes, 2), stop=lambda: None)


def test_parallel_stages_stay_within_the_room_and_training_comes_first(nodes):
    lock, running, seen, order = threading.Lock(), [], [], []

    def make(node, inputs):
        with lock:
            running.append(node.name)
            order.append(node.name)
            seen.append(set(running))
        threading.Event().wait(0.01)
        with lock:
            running.remove(node.name)

    walk(nodes, make, room(nodes, 2, rl=2), stop=lambda: None)
    assert all(len(names) <= 2 and (names == {"rl"} or "rl" not in names) for names in seen)
    assert order.index("rl") < order.index("evaluate_sft")


def test_after_a_failure_nothing_starts_and_running_stages_finish(nodes):
    failed, finished = threading.Event(), []

    def make(node, inputs):
        if node.name == "evaluate_base":
            failed.set()
            raise StageFailed("evaluate_base was ended")
        if node.name == "sft":
            assert failed.wait(WAIT_S)
        finished.append(node.name)

    with pytest.raises(StageFailed, match="evaluate_base was ended"):
        walk(nodes, make, room(nodes, 2), stop=lambda: None)
    assert finished == ["prepare_data", "base", "sft"]


def test_an_interrupt_ends_the_stages_that_run(nodes):
    stopped, ended = threading.Event(), []

    def make(node, inputs):
        if node.name == "evaluate_base":
            raise KeyboardInterrupt
        if node.name == "sft":
            assert stopped.wait(WAIT_S)
            ended.append(node.name)

    with pytest.raises(KeyboardInterrupt):
        walk(nodes, make, room(nodes, 2), stop=stopped.set)
    assert ended == ["sft"]


def gpus(number):
    return lambda: tuple(Gpu(str(index), f"GPU-{index}", 80.0) for index in range(number))


@pytest.mark.parametrize(
    ("overrides", "found", "slots", "most"),
    [
        ([], gpus(4), 4, 8),
        (["execution.parallel_stages=2"], gpus(4), 4, 2),
        (["execution.parallel_stages=1"], gpus(4), 1, 1),
        (["execution.gpus=0"], gpus(4), 1, 1),
        ([], gpus(0), 4, 4),
        (["execution.parallel_stages=2"], gpus(0), 2, 2),
        (["execution.num_threads=null"], gpus(0), 1, 1),
        ([], lambda: None, 1, 1),
        (["evaluation.engine=openai", "execution.server.urls=[http://host:8000/v1]"], gpus(4), 1, 1),
    ],
)
def test_the_room_of_a_machine(smoke_path, monkeypatch, overrides, found, slots, most):
    monkeypatch.setattr(walking, "detected_gpus", found)
    monkeypatch.setattr(walking.os, "cpu_count", lambda: 8)
    config = load_experiment(smoke_path, overrides)
    there = find_room(config, build_graph(config))
    assert (there.slots, there.most) == (slots, most)
