"""Losses and advantages of the user's own: the bytes of a shipped one, and a line for each failure."""

import copy
import dataclasses
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch
from reference.gradient_case import OPTIMIZER, execution, make_batch, step_of, tiny_model
from reference.token_cases import evaluate, tokens
from support.refusals import refused
from synthetic.settings import rl_settings
from torch import Tensor

from luffy.config import load_experiment
from luffy.config.group import CustomAdvantage, GroupMeanAdvantage
from luffy.config.terms import CustomLoss
from luffy.errors import ConfigError
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.objectives.explain import explain_terms
from luffy.objectives.losses import TokenBatch, bounded_exp, check_custom
from luffy.objectives.schedules import StepObjective
from luffy.training.learner import Trainer, TrainerRank
from luffy.training.policy import Policy
from luffy.training.ranks import Ranks

SMOKE = "exp_configs/smoke.yaml"


def on_policy(tokens: TokenBatch) -> Tensor:
    return -tokens.advantage_BT * bounded_exp(tokens.logp_BT - tokens.logp_old_BT)


def shaped(tokens: TokenBatch, gamma: float) -> Tensor:
    """p / (p + gamma), in the arithmetic of the shipped one."""
    return -tokens.advantage_BT * torch.sigmoid(tokens.logp_BT - math.log(gamma))


def bonus(tokens: TokenBatch) -> Tensor:
    return -tokens.entropy_BT


def mean_of_rewards(rows: RowRewards) -> Tensor:
    return rows.reward_B - rows.reward_B.mean()


def unfinished(tokens: TokenBatch) -> Tensor:
    raise KeyError("x")


@pytest.fixture(autouse=True)
def mine(monkeypatch) -> None:
    module = ModuleType("mine")
    functions = {
        **{function.__name__: function for function in (on_policy, shaped, bonus, mean_of_rewards, unfinished)},
        "listed": lambda tokens: tokens.logp_BT.tolist(),
        "summed": lambda tokens: tokens.logp_BT.sum(),
        "constant": lambda tokens: tokens.logp_BT.detach(),
        "number": 3,
    }
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, "mine", module)


def custom(name: str, **fields: object) -> CustomLoss:
    return CustomLoss(kind="custom", function=f"mine:{name}", **fields)


def with_losses(step: StepObjective, *losses: CustomLoss | None) -> StepObjective:
    """The objective with these losses in its terms; None: as they are."""
    pairs = zip(step.terms, losses, strict=True)
    terms = [term if loss is None else term.model_copy(update={"loss": loss}) for term, loss in pairs]
    return dataclasses.replace(step, terms=tuple(terms))


def gradients(model, step) -> list[Tensor]:
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(micro_batch_tokens=40, packing=True), "float32", 0.7)
    policy.accumulate(make_batch("luffy", model), step)
    return [parameter.grad.clone() for parameter in policy.causal_lm.parameters()]


def test_luffy_written_as_losses_of_ones_own_has_the_bytes_of_the_preset() -> None:
    model, step = tiny_model(), step_of("luffy")
    own = [custom("on_policy"), custom("shaped", options={"gamma": 0.1}), custom("bonus", reads=("entropy",))]
    changed = with_losses(step, *own)
    check_custom(changed.terms)
    found = gradients(model, changed)
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(model, step), strict=True))
    explained = "\n".join(explain_terms(changed.terms, 32))
    assert "mine:shaped(log p, log pi_old, advantage, gamma=0.1)" in explained
    assert "the number of tokens of on_policy and off_policy" in explained, "they share the joint denominator"


def test_the_losses_of_the_documentation(monkeypatch) -> None:
    code = Path("docs/methods.md").read_text().split("```python\n# mine.py\n")[1].split("```")[0]
    exec(code, sys.modules["mine"].__dict__)
    model, step = tiny_model(), step_of("luffy")
    found = gradients(model, with_losses(step, None, custom("shaped", options={"gamma": 0.1}), None))
    for one, other in zip(found, gradients(model, step), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    topr = custom("topr", reads=("advantage", "sampler", "sequence"))
    check_custom(with_losses(step, topr, None, None).terms)
    cases = [tokens([-1.0, -2.0], mu=[-0.5, -1.0], advantage=advantage) for advantage in (1.0, -1.0)]
    assert evaluate(topr, *cases)[1].tolist() == pytest.approx([-1.0, -1.0, *[math.exp(-1.5)] * 2])


REFUSED = [  # the loss, and what the line names
    (custom("bonus"), ["entropy_BT", "loss.reads"]),
    (custom("on_policy", reads=()), ["advantage_BT", "loss.reads"]),
    (custom("shaped"), ["TypeError", "gamma"]),
    (custom("unfinished"), ["KeyError: 'x'"]),
    (custom("nothing"), ["imported"]),
    (custom("number"), ["int"]),
    (custom("listed"), ["list", "shape (2, 3)"]),
    (custom("summed"), ["torch.float32", "shape ()"]),
    (custom("constant"), ["no gradient", "logp_BT"]),
]


@pytest.mark.parametrize(("loss", "named"), REFUSED, ids=[loss.function for loss, _ in REFUSED])
def test_a_loss_that_cannot_be_used_is_one_line_before_anything_is_sampled(loss: CustomLoss, named: list[str]) -> None:
    with refused("objective.terms.on_policy.loss", loss.function, *named, error=ConfigError):
        check_custom(with_losses(step_of("luffy"), loss, None, None).terms)


def test_advantages_of_ones_own() -> None:
    reward_B = torch.tensor([1.0, 0.0, 0.0, 1.0])
    rows = RowRewards(reward_B, torch.ones(4), torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bool))
    own = CustomAdvantage(kind="custom", function="mine:mean_of_rewards")
    shipped = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)
    assert torch.equal(group_advantages(rows, own), group_advantages(rows, shipped))
    settings = rl_settings("method=on_policy", "objective.advantage={kind: custom, function: 'mine:number'}")
    with refused("objective.advantage", "mine:number", "int", error=ConfigError):
        Trainer(settings, cast("Ranks[TrainerRank]", None))


@pytest.mark.parametrize("reads", ["reference", "teacher"])
def test_what_a_loss_reads_is_computed(reads: str) -> None:
    loss = f"{{kind: custom, function: 'mine:bonus', reads: [{reads}]}}"
    term = f"{{select: on_policy, loss: {loss}, normaliser: {{mode: token, population: own}}}}"
    teacher = ["rl.teachers={teacher: {kind: model, path: /models/teacher}}"] if reads == "teacher" else []
    objective = rl_settings("chain=rl", "method=on_policy", f"objective.terms.mine={term}", *teacher).objective
    assert (objective.needs_reference, objective.needs_teacher) == (reads == "reference", reads == "teacher")


def test_sft_has_no_rewards_for_a_loss_of_ones_own() -> None:
    loss = "sft.objective.terms.sft.loss={kind: custom, function: 'mine:bonus', reads: [%s]}"
    assert load_experiment(SMOKE, ["chain=sft", "method=sft", loss % "entropy"]).sft is not None
    with pytest.raises(ConfigError, match="SFT has neither rollouts nor rewards"):
        load_experiment(SMOKE, ["chain=sft", "method=sft", loss % "advantage"])
