"""Several engines as one, of which one may be dead; where processes are placed; how weights are sent."""

import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.gradient_case import execution, tiny_model
from reference.sft_case import PLAN
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.settings import rl_settings

from luffy.cluster import ray_engine
from luffy.cluster.actors import EngineActor, ProcessSetup
from luffy.cluster.local import LocalCluster, RanksEngine
from luffy.cluster.ray_engine import RayEngine, shares
from luffy.cluster.ray_session import Place, layout, layout_apart
from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.cluster.weights import buckets
from luffy.config.execution import ExecutionConfig, RayConfig, VLLMConfig
from luffy.errors import ClusterError, ConfigError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.training.checkpoint import CheckpointStore
from luffy.training.learner import TrainerSpec
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedRank


def test_the_replacement_of_a_dead_engine_is_put_to_sleep_too(monkeypatch):
    """Awake, it would hold the memory of the GPU that it shares with a rank of the trainer."""
    monkeypatch.setattr(ray_engine.ray, "kill", lambda handle: None)
    monkeypatch.setattr(ray_engine, "lost_machines", dict)
    asleep = []

    def engine(name):
        return Member(name, SimpleNamespace(sleep=SimpleNamespace(remote=lambda: name)), Path("no log"))

    def answers(members, asked, timeout_s):
        for member, name in zip(members, asked, strict=False):
            if name == "dead":
                raise MemberDied(member, "died")
            asleep.append(name)

    limits = SimpleNamespace(call_timeout_s=1.0, start_timeout_s=1.0)
    actors = SimpleNamespace(ray=limits, start=lambda place: engine(f"another {place}"), open=lambda members: [])
    supervisor = SimpleNamespace(answers=answers, check_open=lambda: None)
    engines = RayEngine([engine("dead"), engine("second")], actors, supervisor, load=lambda fresh: [])
    engines.sleep()
    assert asleep == ["another 0", "second"]
    assert engines.num_restarts == 1


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=30)


def requests_of(prompts):
    return [RolloutRequest(prompt, seed=i) for i, prompt in enumerate(prompts)]


@given(PROMPTS, st.integers(1, 4))
def test_each_request_goes_to_one_engine_and_prompts_stay_together(prompts, num_engines):
    parts = shares(requests_of(prompts), num_engines)
    assert sorted(i for part in parts.values() for i in part) == list(range(len(prompts)))
    assert all(parts.values())
    assert set(parts) <= set(range(num_engines))
    for prompt in prompts:
        assert sum(any(prompts[i] == prompt for i in part) for part in parts.values()) == 1


def test_the_engine_with_the_fewest_tokens_gets_the_next_prompt_and_turns_of_an_episode_stay_at_one():
    prompts = [(1,) * 9, (1,) * 9, (2,) * 5, (3,) * 5, (4,) * 5, (5,)]
    assert shares(requests_of(prompts), 2) == {0: [0, 1], 1: [2, 3, 4, 5]}
    assert shares(requests_of([(i,) for i in range(6)]), 3) == {0: [0, 3], 1: [1, 4], 2: [2, 5]}
    # Whatever else is in the call; equal prompts are spread evenly, and episodes over several engines.
    turns = [RolloutRequest((i, 7), seed=0, shares_cache_with="play 1") for i in range(32)]
    together = {turns[i].prompt_ids: engine for engine, part in shares(turns, 3).items() for i in part}
    alone = {turn.prompt_ids: next(iter(shares([turn], 3))) for turn in turns}
    assert together == alone
    assert {*alone.values()} == {0, 1, 2}


TWO = RayConfig(trainer_ranks=2)
BESIDE = RayConfig(trainer_ranks=2, engines=2, placement="colocated")


ONE, GPU = {"CPU": 1}, {"CPU": 1, "GPU": 1}
LAYOUTS = {  # bundles, and the GPUs of each rank and engine
    "CPUs": (layout(TWO, 4, gpus=False, num_engines=1), [ONE] * 3, [0, 0], [0]),
    # A rank takes one GPU, and an engine as many as it is cut over.
    "GPUs": (layout(TWO, 4, gpus=True, num_engines=3), [GPU] * 2 + [{"CPU": 1, "GPU": 4}] * 3, [1, 1], [4, 4, 4]),
    # Colocated engines take half of the GPU of their rank; beside servers elsewhere ranks have theirs alone.
    "colocated": (layout(BESIDE, 1, gpus=True, num_engines=2), [{"CPU": 2, "GPU": 1}] * 2, [0.5, 0.5], [0.5, 0.5]),
    "colocated on CPUs": (layout(BESIDE, 1, gpus=False, num_engines=2), [{"CPU": 2}] * 2, [0, 0], [0, 0]),
    "servers": (layout(BESIDE, 1, gpus=True, num_engines=0), [GPU] * 2, [1, 1], []),
    "engines alone": (layout_apart(0, 2, 4, gpus=True), [{"CPU": 1, "GPU": 4}] * 2, [], [4, 4]),
    "engines alone on CPUs": (layout_apart(0, 3, 4, gpus=False), [ONE] * 3, [], [0, 0, 0]),
}


@pytest.mark.parametrize(("wanted", "bundles", "ranks", "engines"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_process_has_a_place_in_a_bundle(wanted, bundles, ranks, engines):
    """In order; those that are colocated in the same bundles."""
    assert wanted.bundles == bundles
    for kind in ("CPU", "GPU"):
        assert wanted.total(kind) == sum(bundle.get(kind, 0) for bundle in bundles)
    first = 0 if len(ranks) == len(bundles) else len(ranks)
    assert wanted.ranks == [Place(place, cpus=1, gpus=gpus) for place, gpus in enumerate(ranks)]
    assert wanted.engines == [Place(place, cpus=1, gpus=gpus) for place, gpus in enumerate(engines, start=first)]


def test_who_died_is_named_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "rank_1.log"
    rank = Member("trainer rank 1", handle=None, log=log)
    whole = "".join(f"line {i}\n" for i in range(100))
    last = "".join(f"\nline {i}" for i in range(85, 100))
    for text, end in ((None, f"\n(no log at {log})"), ("", "\n(the log is empty)"), (whole, last)):
        if text is not None:
            log.write_text(text)
        said = str(MemberDied(rank, "died"))
        assert said == f"trainer rank 1 died; the same command resumes the stage. The end of {log}:{end}"
    supervisor = Supervisor()
    supervisor.close()
    with pytest.raises(ClusterError, match="was closed"):
        supervisor.answers([rank], ["a reference"], timeout_s=60)


def test_buckets_hold_the_weights_in_order_up_to_their_size():
    """And each is given once the first weight after it is known."""
    for counts, expected in {
        (2, 2, 2, 2, 2): [["0", "1"], ["2", "3"], ["4"]],
        (1, 100, 1, 1): [["0"], ["1"], ["2", "3"]],  # a tensor larger than a bucket makes its own
        (100, 1): [["0"], ["1"]],
        (): [],
    }.items():
        asked, found = [], []

        def weights(counts=counts, asked=asked):
            for i, count in enumerate(counts):
                asked.append(str(i))
                yield str(i), torch.zeros(count)

        for bucket in buckets(weights(), 16):
            found.append([name for name, _ in bucket])
            assert len(asked) <= sum(map(len, found)) + 1, counts
        assert found == expected


def test_an_engine_beside_a_rank_loads_its_model_once_the_device_is_free(monkeypatch, tmp_path):
    def from_folder(*_, before_loading, **__):
        before_loading()
        return "loaded"

    monkeypatch.setattr(ProcessSetup, "apply", lambda setup: None)
    monkeypatch.setattr(VLLMEngine, "from_folder", from_folder)
    engine, late = (EngineActor(ProcessSetup(tmp_path / "log", None)) for _ in range(2))
    with pytest.raises(ClusterError, match=r"the device was not free for 0\.1 s"):
        late.open(tmp_path, VLLMConfig(), "float32", 8, 0.1, waits=True)
    engine.take_device()
    engine.open(tmp_path, VLLMConfig(), "float32", 8, PATIENCE_S, waits=True)
    assert engine._engine == "loaded"


def test_vllm_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = rl_settings("chain=rl", "method=luffy", "rl.engine=vllm")
    spec = TrainerSpec(settings, ExecutionConfig(), tmp_path / "no model", tmp_path, longest=112, pad_id=0)
    with refused("pip install 'luffy-rl[vllm]'", error=ConfigError):
        LocalCluster(spec)


PARAMS = SamplingParams(1.0, 6, stop_token_ids=())


class SeveralRanks:
    """Ranks with equal weights, one after the other in this process."""

    def __init__(self, *ranks):
        self._ranks = ranks
        self.num_ranks = len(ranks)

    def call(self, method, arguments):
        return [method(rank, *given) for rank, given in zip(self._ranks, arguments, strict=True)]


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    policy = Policy(copy.deepcopy(tiny_model()), PLAN.optimizer, execution(), "float32")
    return SupervisedRank(policy, PLAN, CheckpointStore(tmp_path_factory.mktemp("stage"), 1), pad_id=0)


@pytest.mark.parametrize("number", [1, 5])
def test_the_responses_do_not_depend_on_the_number_of_ranks_which_go_on_training(rank, number):
    random_state = torch.get_rng_state()
    requests = [RolloutRequest(tuple(range(1, 3 + place % 2)), seed=place) for place in range(number)]
    alone = RanksEngine(LocalRanks(rank), 8, weight_version=4).generate(requests, PARAMS)
    shared = RanksEngine(SeveralRanks(rank, rank), 8, weight_version=4).generate(requests, PARAMS)
    assert [completion.token_ids for completion in shared] == [completion.token_ids for completion in alone]
    assert {version for completion in shared for version in completion.weight_versions} == {4}
    assert number == 1 or len({completion.token_ids for completion in shared}) > 1
    assert rank.policy.causal_lm.training and torch.equal(torch.get_rng_state(), random_state)
