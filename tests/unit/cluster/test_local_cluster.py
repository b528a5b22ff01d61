"""Engines without actors: what `rl.engine: vllm` refuses, and ranks of supervised training that answer requests."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, tiny_model
from reference.sft_case import PLAN
from synthetic.settings import rl_settings

from luffy.cluster.local import LocalCluster, RanksEngine
from luffy.config.execution import ExecutionConfig
from luffy.errors import ConfigError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.training.checkpoint import CheckpointStore
from luffy.training.learner import TrainerSpec
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedRank


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = rl_settings("chain=rl", "method=luffy", "rl.engine=vllm")
    spec = TrainerSpec(settings, ExecutionConfig(), tmp_path / "no model", tmp_path, longest=112, pad_id=0)
    with pytest.raises(ConfigError, match=r"pip install 'luffy-rl\[vllm\]' \(docs/gpus.md: vLLM without a GPU\)$"):
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
def rank(tmp_path_factory: pytest.TempPathFactory) -> SupervisedRank:
    policy = Policy(copy.deepcopy(tiny_model()), PLAN.optimizer, execution(), "float32")
    return SupervisedRank(policy, PLAN, CheckpointStore(Path(tmp_path_factory.mktemp("stage")), 1), pad_id=0)


@pytest.mark.parametrize("number", [1, 5])
def test_the_responses_do_not_depend_on_the_number_of_ranks(rank: SupervisedRank, number: int) -> None:
    requests = [RolloutRequest(tuple(range(1, 3 + place % 2)), seed=place) for place in range(number)]
    alone = RanksEngine(LocalRanks(rank), 8, step=4).generate(requests, PARAMS)
    shared = RanksEngine(SeveralRanks(rank, rank), 8, step=4).generate(requests, PARAMS)
    assert [completion.token_ids for completion in shared] == [completion.token_ids for completion in alone]
    assert {version for completion in shared for version in completion.weight_versions} == {4}
    assert number == 1 or len({completion.token_ids for completion in shared}) > 1


def test_generating_leaves_the_policy_as_it_trains(rank: SupervisedRank) -> None:
    state = torch.get_rng_state()
    RanksEngine(LocalRanks(rank), 8, step=0).generate([RolloutRequest((1, 2), seed=0)], PARAMS)
    assert rank.policy.causal_lm.training
    assert torch.equal(torch.get_rng_state(), state)
