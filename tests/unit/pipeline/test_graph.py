import pytest

from luffy.config import load_experiment
from luffy.config.settings import SETTINGS
from luffy.pipeline.graph import build_graph, kind_of, nodes_providing, nodes_showing

CHAINS = {
    "sft_then_luffy": ["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"],
    "sft": ["prepare_data", "base", "sft", "evaluate_base", "evaluate_sft", "report"],
    "rl": ["prepare_data", "base", "rl", "evaluate_base", "evaluate_rl", "report"],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_has_its_nodes_in_order_each_after_its_inputs_and_named_by_its_kind(smoke_path, chain):
    method = ["method=luffy"] if "rl" in CHAINS[chain] else []
    nodes = build_graph(load_experiment(smoke_path, [f"chain={chain}", *method]))
    assert [node.name for node in nodes] == CHAINS[chain]
    for node in nodes:
        assert set(node.inputs.values()) <= set(CHAINS[chain][: CHAINS[chain].index(node.name)])
        assert isinstance(node.settings, SETTINGS[node.stage])
        assert kind_of(node.name) is node.kind
    inputs = {node.name: node.inputs for node in nodes}
    if "rl" in inputs:  # starts from the last checkpoint before it
        assert inputs["rl"] == {"data": "prepare_data", "model": "sft" if "sft" in inputs else "base"}
    assert inputs["report"]["data"] == "prepare_data"
    assert set(inputs["report"].values()) == {*CHAINS[chain]} - {"report"}


def test_a_sweep_comes_last(smoke_path):
    assert [node.kind.name for node in build_graph(load_experiment(smoke_path), sweep_steps=(2,))][-1] == "sweep"


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("base", ["prepare_data", "base", "difficulty", "sft", "rl"]),
        ("sft", ["prepare_data", "base", "sft", "difficulty", "rl"]),
    ],
)
def test_difficulty_follows_the_policy_it_measures_and_only_rl_reads_it(smoke_path, policy, order):
    nodes = build_graph(load_experiment(smoke_path, [f"difficulty.policy={policy}"]))
    assert [node.name for node in nodes][:5] == order
    inputs = {node.name: node.inputs for node in nodes}
    assert inputs["difficulty"] == {"data": "prepare_data", "model": policy}
    assert inputs["rl"] == {"data": "difficulty", "model": "sft"}
    assert inputs["report"]["difficulty"] == "difficulty"
    assert [name for name in inputs if "difficulty" in inputs[name].values()] == ["rl", "report"]


def test_a_repeated_stage_is_its_own_round(smoke_path):
    config = load_experiment(smoke_path)
    rounds = ("prepare_data", "base", "sft", "rl", "sft", "rl", "evaluate")
    nodes = {node.name: node for node in build_graph(config.model_copy(update={"stages": rounds}))}
    assert list(nodes)[2:6] == ["sft_1", "rl_1", "sft_2", "rl_2"]
    assert nodes["sft_2"].inputs == {"data": "prepare_data", "model": "rl_1"}
    assert list(nodes)[6:] == [f"evaluate_{name}" for name in ("base", "sft_1", "rl_1", "sft_2", "rl_2")]
    assert nodes["evaluate_sft_2"].inputs["model"] == "sft_2"


def test_nodes_are_found_by_their_kind_and_by_what_they_show_and_make():
    names = ["sft_1", "rl_2", "evaluate_sft_1", "sample_2", "reinforce"]
    found = [kind.name if (kind := kind_of(name)) else None for name in names]
    assert found == ["sft", "rl", "evaluate", "sample", None]
    names = ["prepare_data", "base", "rl", "evaluate_base", "evaluate_rl", "unknown"]
    assert nodes_showing("training_curves", names) == ["base", "rl"]
    assert nodes_providing("evaluation", names) == ["evaluate_base", "evaluate_rl"]


ROUNDS = ["prepare_data", "base", "sample_1", "sft_1", "sample_2", "sft_2"]


@pytest.mark.parametrize(("start", "model"), [("base", "base"), ("previous", "sft_1")])
def test_every_round_samples_the_newest_policy_and_learns_from_its_own_traces(smoke_path, start, model):
    overrides = ["chain=expert_iteration", "expert_iteration.rounds=2", f"expert_iteration.start_from={start}"]
    nodes = {node.name: node for node in build_graph(load_experiment(smoke_path, overrides))}
    evaluations = [f"evaluate_{name}" for name in ("base", "sft_1", "sft_2")]
    assert list(nodes) == [*ROUNDS, *evaluations, "report"]
    assert nodes["sample_2"].inputs == {"data": "prepare_data", "model": "sft_1"}
    assert nodes["sft_1"].inputs == {"data": "sample_1", "model": "base"}
    assert nodes["sft_2"].inputs == {"data": "sample_2", "model": model}
    assert [nodes[f"sample_{number}"].settings.round for number in (1, 2)] == [1, 2]


def test_more_rounds_leave_those_before_as_they_were(smoke_path):
    def of(rounds):
        overrides = ["chain=expert_iteration_then_rl", f"expert_iteration.rounds={rounds}"]
        return {node.name: node for node in build_graph(load_experiment(smoke_path, overrides))}

    one, two = of(1), of(2)
    assert all(one[name] == two[name] for name in ROUNDS[:4])
    assert (one["rl"].inputs["model"], two["rl"].inputs["model"]) == ("sft_1", "sft_2")
    assert two["rl"].inputs["data"] == "prepare_data"
