"""The stages of a chain, what each reads, and in which order and how many at once they are made."""

import threading

import pytest
from support.stages import CONFIGS

from luffy.config import load_experiment
from luffy.config.settings import SETTINGS
from luffy.errors import StageFailed
from luffy.pipeline import walk as walking
from luffy.pipeline.gpus import Gpu
from luffy.pipeline.graph import build_graph, providing, showing
from luffy.pipeline.walk import Room, find_room, walk

WAIT_S = 20
EVALUATED = "evaluate_base evaluate_sft evaluate_rl report"
ROUNDS = "prepare_data base sample_1 sft_1 sample_2 sft_2 evaluate_base evaluate_sft_1 evaluate_sft_2 report"
ITERATED = ["chain=expert_iteration", "stages.rounds.repeat=2"]
LATER = "stages=[prepare_data, base, sft, difficulty, rl, evaluate, report]"
MEASURED = {"difficulty": "prepare_data base", "rl": "difficulty sft", "sft": "prepare_data base"}
AFTER_SFT = {"difficulty": "prepare_data sft", "rl": "difficulty sft", "evaluate_rl": "prepare_data rl"}
CHAINS = [  # overrides, nodes in order, and of some the data and the model that they read
    ([], f"prepare_data base sft rl {EVALUATED}", {"rl": "prepare_data sft", "evaluate_sft": "prepare_data sft"}),
    (["chain=sft"], "prepare_data base sft evaluate_base evaluate_sft report", {"sft": "prepare_data base"}),
    (
        ["chain=rl", "method=luffy"],
        "prepare_data base rl evaluate_base evaluate_rl report",
        {"rl": "prepare_data base"},
    ),
    # Difficulty measures the policy before it, by default the base, and only RL reads it.
    (["difficulty={}"], f"prepare_data base difficulty sft rl {EVALUATED}", MEASURED),
    (["difficulty={}", LATER], f"prepare_data base sft difficulty rl {EVALUATED}", AFTER_SFT),
    # Every round samples the newest policy and learns from its own traces.
    (ITERATED, ROUNDS, {"sample_2": "prepare_data sft_1", "sft_1": "sample_1 base", "sft_2": "sample_2 base"}),
    ([*ITERATED, "stages.rounds.stages.sft.inputs=null"], ROUNDS, {"sft_2": "sample_2 sft_1"}),
]


def smoke(*overrides):
    return load_experiment(CONFIGS / "smoke.yaml", overrides)


def graph(*overrides):
    return {node.name: node for node in build_graph(smoke(*overrides))}


@pytest.mark.parametrize(("overrides", "names", "data_and_model"), CHAINS)
def test_a_chain_has_its_nodes_in_order_each_after_its_inputs_and_named_by_its_kind(overrides, names, data_and_model):
    nodes, names = graph(*overrides), names.split()
    assert list(nodes) == names
    for index, node in enumerate(nodes.values()):
        assert set(node.inputs.values()) <= set(names[:index])
        assert isinstance(node.settings, SETTINGS[node.stage])
    for name, read in data_and_model.items():
        assert nodes[name].inputs == dict(zip(("data", "model"), read.split(), strict=True))
    shown = {name for name in names if not name.startswith(("sample_", "report"))}
    assert {*nodes["report"].inputs.values()} >= shown and nodes["report"].inputs["data"] == "prepare_data"


def test_a_kind_may_come_again_under_another_name_and_a_sweep_comes_last():
    again = "sft, rl, {sft_2: {kind: sft}}, {rl_2: {kind: rl}}, evaluate"
    nodes = graph(f"stages=[prepare_data, base, {again}]")
    assert list(nodes)[2:6] == ["sft", "rl", "sft_2", "rl_2"]
    assert nodes["sft_2"].inputs == {"data": "prepare_data", "model": "rl"}
    assert list(nodes)[6:] == [f"evaluate_{name}" for name in ("base", "sft", "rl", "sft_2", "rl_2")]
    assert nodes["evaluate_sft_2"].inputs["model"] == "sft_2"
    assert [node.kind.name for node in build_graph(smoke(), sweep_steps=(2,))][-1] == "sweep"


def test_more_rounds_leave_those_before_as_they_were():
    one, two = (graph("chain=expert_iteration_then_rl", f"stages.rounds.repeat={rounds}") for rounds in (1, 2))
    for name in ("prepare_data", "base", "sample_1", "sft_1"):
        assert (one[name].inputs, one[name].settings) == (two[name].inputs, two[name].settings)
    assert [two[f"sample_{number}"].settings.round for number in (1, 2)] == [1, 2]
    assert (one["rl"].inputs["model"], two["rl"].inputs["model"]) == ("sft_1", "sft_2")
    assert two["rl"].inputs["data"] == "prepare_data"


def test_stages_are_found_by_what_they_show_and_make():
    kinds = {"prepare_data": "prepare_data", "base": "base", "opd": "rl", "evaluate_opd": "evaluate", "old": "gone"}
    assert showing("training_curves", kinds) == ["base", "opd"]
    assert providing("evaluation", kinds) == ["evaluate_opd"]


# ---- walked by one thread or several ----


@pytest.fixture(scope="module")
def nodes():
    return build_graph(smoke())


def room(nodes, slots, **needs):
    return Room(slots, {node.name: needs.get(node.name, 1) for node in nodes}, most=len(nodes))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_stage_gets_the_results_that_it_reads(nodes, slots):
    told = {}

    def make(node, inputs):
        told[node.name] = dict(inputs)
        return f"<{node.name}>"

    made = walk(nodes, make, room(nodes, slots), stop=lambda: None)
    assert made == {node.name: f"<{node.name}>" for node in nodes}
    assert list(made) == [node.name for node in nodes]
    assert told["rl"] == {"data": "<prepare_data>", "model": "<sft>"}


def test_parallel_stages_stay_within_the_room_and_training_comes_first(nodes):
    lock, running, seen, order = threading.Lock(), [], [], []
    both = threading.Barrier(2)

    def make(node, inputs):
        with lock:
            running.append(node.name)
            order.append(node.name)
            seen.append(set(running))
        if node.name in ("sft", "evaluate_base"):
            both.wait(WAIT_S)  # broken unless an evaluation runs beside training
        threading.Event().wait(0.01)
        with lock:
            running.remove(node.name)

    walk(nodes, make, room(nodes, 2, rl=2), stop=lambda: None)
    assert all(len(names) <= 2 and (names == {"rl"} or "rl" not in names) for names in seen)
    assert order.index("rl") < order.index("evaluate_sft")


@pytest.mark.parametrize("error", [StageFailed("evaluate_base was ended"), KeyboardInterrupt()])
def test_after_a_failure_nothing_starts_running_stages_finish_and_all_are_stopped(nodes, error):
    failed, stopped, finished = threading.Event(), threading.Event(), []
    awaited = failed if isinstance(error, StageFailed) else stopped  # an interrupt ends those that run

    def make(node, inputs):
        if node.name == "evaluate_base":
            failed.set()
            raise error
        if node.name == "sft":
            assert awaited.wait(WAIT_S)
        finished.append(node.name)

    with pytest.raises(type(error)):
        walk(nodes, make, room(nodes, 2), stop=stopped.set)
    assert finished == ["prepare_data", "base", "sft"]


def machine(monkeypatch, num_gpus):
    found = None if num_gpus is None else tuple(Gpu(str(index), f"GPU-{index}", 80.0) for index in range(num_gpus))
    monkeypatch.setattr(walking, "detected_gpus", lambda: found)
    monkeypatch.setattr(walking.os, "cpu_count", lambda: 8)


ROOMS = [  # overrides, GPUs, slots, and stages at the same time
    ([], 4, 4, 8),
    (["execution.parallel_stages=2"], 4, 4, 2),
    (["execution.parallel_stages=1"], 4, 1, 1),
    (["execution.gpus=0"], 4, 1, 1),
    ([], 0, 8, 8),
    (["execution.parallel_stages=2"], 0, 2, 2),
    (["execution.num_threads=null"], 0, 1, 1),
    ([], None, 1, 1),
]


@pytest.mark.parametrize(("overrides", "num_gpus", "slots", "most"), ROOMS)
def test_the_room_of_a_machine(monkeypatch, overrides, num_gpus, slots, most):
    machine(monkeypatch, num_gpus)
    config = smoke(*overrides)
    there = find_room(config, build_graph(config))
    assert (there.slots, there.most) == (slots, most)


def test_ranks_take_cores_and_make_do_with_the_gpus_that_there_are(monkeypatch):
    config = smoke("execution.ranks=3")
    for num_gpus, training in ((0, 4), (2, 2), (4, 3)):
        machine(monkeypatch, num_gpus)
        needs = find_room(config, build_graph(config)).needs
        assert (needs["base"], needs["rl"], needs["evaluate_rl"]) == (training, training, 1)
