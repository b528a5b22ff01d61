import pytest

from luffy.config import STAGE_KINDS, load_experiment
from luffy.config.settings import SETTINGS
from luffy.pipeline.graph import build_graph, kind_of, nodes_providing, nodes_showing

CHAINS = {
    "sft_then_luffy": ["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"],
    "sft": ["prepare_data", "base", "sft", "evaluate_base", "evaluate_sft", "report"],
    "rl": ["prepare_data", "base", "rl", "evaluate_base", "evaluate_rl", "report"],
}


def graph(smoke_path, chain):
    method = ["method=luffy"] if "rl" in CHAINS[chain] else []
    return build_graph(load_experiment(smoke_path, [f"chain={chain}", *method]))


@pytest.mark.parametrize("chain", CHAINS)
def test_nodes_of_each_chain(smoke_path, chain):
    assert [node.name for node in graph(smoke_path, chain)] == CHAINS[chain]


@pytest.mark.parametrize("chain", CHAINS)
def test_every_node_stands_after_its_inputs(smoke_path, chain):
    seen = set()
    for node in graph(smoke_path, chain):
        assert set(node.inputs.values()) <= seen
        assert isinstance(node.settings, SETTINGS[node.stage])
        seen.add(node.name)


@pytest.mark.parametrize(("chain", "start"), [("sft_then_luffy", "sft"), ("rl", "base")])
def test_rl_starts_from_the_last_checkpoint_before_it(smoke_path, chain, start):
    rl = next(node for node in graph(smoke_path, chain) if node.name == "rl")
    assert rl.inputs == {"data": "prepare_data", "model": start}


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


def test_report_reads_every_other_stage(smoke_path):
    *others, report = graph(smoke_path, "sft_then_luffy")
    assert set(report.inputs.values()) == {node.name for node in others}
    assert report.inputs["data"] == "prepare_data"


def test_a_repeated_stage_is_its_own_round(smoke_path):
    config = load_experiment(smoke_path)
    rounds = ("prepare_data", "base", "sft", "rl", "sft", "rl", "evaluate")
    nodes = {node.name: node for node in build_graph(config.model_copy(update={"stages": rounds}))}
    assert list(nodes)[2:6] == ["sft_1", "rl_1", "sft_2", "rl_2"]
    assert nodes["sft_2"].inputs == {"data": "prepare_data", "model": "rl_1"}
    assert list(nodes)[6:] == [f"evaluate_{name}" for name in ("base", "sft_1", "rl_1", "sft_2", "rl_2")]
    assert nodes["evaluate_sft_2"].inputs["model"] == "sft_2"


@pytest.mark.parametrize("chain", CHAINS)
def test_the_name_of_a_node_tells_its_kind(smoke_path, chain):
    for node in (*graph(smoke_path, chain), *build_graph(load_experiment(smoke_path), sweep_steps=(2,))):
        assert kind_of(node.name) is node.kind


def test_rounds_have_a_kind_and_unknown_names_have_none():
    names = ["sft_1", "rl_2", "evaluate_sft_1", "reinforce"]
    assert [kind.name if (kind := kind_of(name)) else None for name in names] == ["sft", "rl", "evaluate", None]


def test_nodes_are_found_by_what_they_show_and_make():
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
    assert kind_of("sample_2") is STAGE_KINDS["sample"]


def test_more_rounds_leave_those_before_as_they_were(smoke_path):
    def of(rounds):
        overrides = ["chain=expert_iteration_then_rl", f"expert_iteration.rounds={rounds}"]
        return {node.name: node for node in build_graph(load_experiment(smoke_path, overrides))}

    one, two = of(1), of(2)
    assert all(one[name] == two[name] for name in ROUNDS[:4])
    assert (one["rl"].inputs["model"], two["rl"].inputs["model"]) == ("sft_1", "sft_2")
    assert two["rl"].inputs["data"] == "prepare_data"
