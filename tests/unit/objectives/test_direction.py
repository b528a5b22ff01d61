"""Each preset, trained for 100 steps on a policy of two tokens, comes to do what is rewarded.

The policy has free logits over (bad, good) at each position. A response is right when all its tokens are good: one
token, or two where the preset guides rows by the start of a trace (a prefix of one token leaves one to the policy).
Groups are composed as the preset says, from its own `GroupConfig`; the optimizer is plain gradient descent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from reference.row_batches import alone, tokens_of
from reference.taught_presets import teacher_overrides
from torch import Tensor

from luffy.config import available_presets, load_experiment
from luffy.config.group import GeneralizedAdvantage, GroupConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.terms import TermConfig
from luffy.objectives.advantages import RowRewards, generalized_advantages, group_advantages, whiten
from luffy.objectives.objective import objective_loss, token_weights
from luffy.objectives.schedules import objective_at
from luffy.rl.rows import RolloutTask, Visit
from luffy.rl.trace_starts import prefix_length
from luffy.training.batching import collate
from luffy.types import FinishReason, Group, Outcome, Source, TrainBatch, Trajectory

ROOT = Path(__file__).resolve().parents[3]
STEPS = 100
PROMPTS = 2
BAD, GOOD, PROMPT = 0, 1, 2
TEACHER_V = torch.tensor([0.0, 3.0], dtype=torch.float64)
"""Logits of a teacher that is right nineteen times of twenty."""


@dataclass
class Toy:
    """The policy and the state that a run has beside it."""

    logits_LV: Tensor
    generator: torch.Generator
    reference_LV: Tensor
    successes: dict[int, Trajectory] = field(default_factory=dict)
    """For replay: each prompt's latest right response."""
    replays: bool = False
    failed: int = 0
    """For interleaved SFT: prompts gathered since the last SFT step."""
    imitations: int = 0

    @classmethod
    def starting_at(cls, p: float, length: int) -> "Toy":
        """Each response is right with probability p."""
        token = p ** (1 / length)
        logits_LV = torch.tensor([[0.0, math.log(token / (1 - token))]] * length, dtype=torch.float64)
        return cls(logits_LV.requires_grad_(), torch.Generator().manual_seed(11), logits_LV.detach().clone())

    @property
    def p(self) -> float:
        return float(self.logits_LV.detach().softmax(-1)[:, GOOD].prod())

    def respond(self, prefix: int = 0) -> Trajectory:
        """A response that begins with `prefix` tokens of the trace."""
        logp_LV = self.logits_LV.detach().log_softmax(-1)
        drawn = logp_LV[prefix:, GOOD].exp() > torch.rand(
            len(logp_LV) - prefix, generator=self.generator, dtype=torch.float64
        )
        ids = (GOOD,) * prefix + tuple(drawn.int().tolist())
        known = tuple(logp_LV[t, token].item() for t, token in enumerate(ids))
        source = (Source.OFF_POLICY,) * prefix + (Source.ON_POLICY,) * (len(ids) - prefix)
        return _row(ids, source, (math.nan,) * prefix + known[prefix:])

    def trace(self) -> Trajectory:
        return self.respond(prefix=len(self.logits_LV))


def _row(ids: tuple[int, ...], source: tuple[Source, ...], logp: tuple[float, ...]) -> Trajectory:
    right = all(token == GOOD for token in ids)
    outcome = Outcome.CORRECT if right else Outcome.WRONG
    return Trajectory((PROMPT,), ids, source, logp, (0,) * len(ids), float(right), outcome, FinishReason.STOP)


# ---- groups, as the preset composes them ----


def _group(toy: Toy, config: GroupConfig, prompt: int, step: int) -> Group:
    if config.off_policy_when_accuracy_at_most is not None:
        return _with_traces_where_rollouts_fail(toy, config, prompt)
    length, rows, visit = len(toy.logits_LV), [], Visit(RolloutTask(str(prompt), (), "", ()), step, 0)
    for index in range(config.off_policy):
        tokens = length
        if config.prefix is not None:
            tokens = prefix_length(config.prefix, length, visit, index, config.off_policy, STEPS, seed=5)
        rows.append(toy.respond(tokens))
    rows += [toy.respond() for _ in range(config.size - config.off_policy)]
    return Group(str(prompt), tuple(rows))


def _with_traces_where_rollouts_fail(toy: Toy, config: GroupConfig, prompt: int) -> Group:
    group = Group(str(prompt), tuple(toy.respond() for _ in range(config.size)))
    if group.accuracy > config.off_policy_when_accuracy_at_most:
        return group
    wrong = [row for row in group.trajectories if not row.is_correct][: config.off_policy]
    kept = [row for row in group.trajectories if not any(row is other for other in wrong)]
    return Group(str(prompt), tuple(kept + [toy.trace() for _ in wrong]))


def _with_replay(toy: Toy, groups: list[Group], objective: ObjectiveConfig) -> list[Group]:
    """The first prompts have a stored success in place of a rollout; then this step's successes are stored."""
    config = objective.replay
    if config is None:
        return groups
    share = int(config.share * len(groups)) if toy.replays else 0
    for prompt, group in enumerate(groups[:share]):
        if prompt in toy.successes:
            groups[prompt] = replace(group, trajectories=(toy.successes[prompt], *group.trajectories[1:]))
    for prompt, group in enumerate(groups):
        for row in group.rollouts:
            if row.is_correct:
                toy.successes[prompt] = replace(row, source=(Source.REPLAY,) * len(row.source))
    toy.replays |= sum(group.accuracy for group in groups) / len(groups) > config.start_accuracy
    return groups


def _sampled(toy: Toy, objective: ObjectiveConfig, step: int) -> list[Group]:
    groups = [_group(toy, objective.group, prompt, step) for prompt in range(PROMPTS)]
    toy.failed += sum(group.accuracy == 0 for group in groups)
    groups = _with_replay(toy, groups, objective)
    if objective.group.filter is None:
        return groups
    return [group for group in groups if len(set(group.rewards)) > 1]


# ---- one step ----


def _advantages(groups: Sequence[Group], batch: TrainBatch, objective: ObjectiveConfig) -> Tensor:
    """`(B, T)`; the critic of PPO says 0 everywhere."""
    rows = [row for group in groups for row in group.trajectories]
    reward_B, config = torch.tensor([row.reward for row in rows]), objective.advantage
    if isinstance(config, GeneralizedAdvantage):
        zeros_BT = torch.zeros(batch.input_ids_BT.shape)
        advantage_BT, _ = generalized_advantages(reward_B, zeros_BT, batch.response_mask_BT, config)
        return whiten(advantage_BT, batch.response_mask_BT, alone) if config.whiten else advantage_BT
    advantage_B = group_advantages(
        RowRewards(
            reward_B=reward_B,
            length_B=torch.tensor([len(row.response_ids) for row in rows]),
            group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories]),
            is_off_policy_B=torch.tensor([row.is_off_policy for row in rows]),
        ),
        config,
    )
    scale_BT = torch.where(batch.is_off_policy_BT, config.off_policy_scale, config.on_policy_scale)
    return advantage_B.unsqueeze(-1) * scale_BT


def _batch(toy: Toy, groups: Sequence[Group]) -> TrainBatch:
    rows = [row for group in groups for row in group.trajectories]
    accuracy_B = torch.tensor([group.accuracy for group in groups for _ in group.trajectories])
    batch = collate(rows, torch.zeros(len(rows)), 0, accuracy_B)
    return replace(
        batch,
        logp_old_BT=_logp(toy.logits_LV.detach(), batch),
        logp_ref_BT=_logp(toy.reference_LV, batch),
        logp_teacher_BT=_logp(TEACHER_V.expand_as(toy.reference_LV), batch),
        logq_BTC=_choices(TEACHER_V.expand_as(toy.reference_LV), batch),
        is_taught_BT=batch.response_mask_BT,
    )


def _choices(logits_LV: Tensor, batch: TrainBatch) -> Tensor:
    """`(B, T, 3)`: both tokens, and no others."""
    logp_LC = torch.cat([logits_LV.log_softmax(-1), logits_LV.new_full((len(logits_LV), 1), -80.0)], dim=-1)
    return torch.cat([torch.zeros_like(logp_LC[:1]), logp_LC]).expand(*batch.input_ids_BT.shape, 3)


def _logp(logits_LV: Tensor, batch: TrainBatch) -> Tensor:
    """`(B, T)`; 0 on the prompt."""
    logp_LV = torch.cat([torch.zeros(1, 2, dtype=torch.float64), logits_LV.log_softmax(-1)])
    token_BT = batch.input_ids_BT.clamp(max=GOOD)
    position_BT = torch.arange(token_BT.shape[1]).expand_as(token_BT)
    return logp_LV[position_BT, token_BT]


def _entropy(logits_LV: Tensor, batch: TrainBatch) -> Tensor:
    logp_LV = logits_LV.log_softmax(-1)
    entropy_L = -(logp_LV.exp() * logp_LV).sum(-1)
    return torch.cat([entropy_L.new_zeros(1), entropy_L]).expand(batch.input_ids_BT.shape)


def _descend(toy: Toy, terms: Sequence[TermConfig], batch: TrainBatch, step: int, lr: float) -> None:
    objective = objective_at(terms, step, STEPS, max_response_tokens=len(toy.logits_LV))
    weight_KBT = token_weights(objective, batch, alone)
    batch = replace(batch, logp_behavior_BT=batch.logp_behavior_BT.double())
    scores = (score(toy.logits_LV, batch) for score in (_logp, _entropy, _choices))
    tokens = tokens_of(batch, *scores)
    (gradient_LV,) = torch.autograd.grad(objective_loss(objective.terms, tokens, weight_KBT).loss, toy.logits_LV)
    with torch.no_grad():
        toy.logits_LV -= lr * gradient_LV


def _rl_step(toy: Toy, objective: ObjectiveConfig, step: int, lr: float) -> None:
    """Half of the groups an update, so that ratios leave 1."""
    groups = _sampled(toy, objective, step)
    if not groups:
        return
    batch = _batch(toy, groups)
    batch = replace(batch, advantage_BT=_advantages(groups, batch, objective))
    half = len(groups) // 2 * objective.group.size
    for rows in (slice(0, half), slice(half, None)):
        part = batch.map(lambda tensor_BT, rows=rows: tensor_BT[rows])
        if len(part):
            _descend(toy, objective.terms, part, step, lr)
    _imitate_failures(toy, objective, step, lr)


def _imitate_failures(toy: Toy, objective: ObjectiveConfig, step: int, lr: float) -> None:
    config = objective.interleaved_sft
    size = 0 if config is None else min(config.buffer_size, PROMPTS)  # the toy has few prompts a step
    if config is not None and toy.failed >= size:
        toy.failed -= size
        toy.imitations += 1
        batch = _batch(toy, [Group("trace", tuple(toy.trace() for _ in range(size)))])
        _descend(toy, config.terms, batch, step, lr * config.lr_scale)


# ---- presets ----


@cache
def _preset(name: str) -> tuple[ObjectiveConfig | None, Sequence[TermConfig]]:
    """The objective of an RL preset, or the terms of one that is supervised."""
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={name}", *teacher_overrides(name)])
    if "rl" in config.stages:
        assert config.objective is not None
        return config.objective, ()
    assert config.sft is not None
    return None, config.sft.objective.terms


def _trained(name: str, start: float, lr: float, steps: int = STEPS) -> tuple[Toy, list[float]]:
    """The toy after its steps, and the probability of a right response after each."""
    objective, terms = _preset(name)
    guided = objective is not None and objective.group.prefix is not None
    toy, curve = Toy.starting_at(start, length=2 if guided else 1), []
    for step in range(1, steps + 1):
        if objective is None:
            traces = Group("trace", tuple(toy.trace() for _ in range(PROMPTS)))
            _descend(toy, terms, _batch(toy, [traces]), step, lr)
        else:
            _rl_step(toy, objective, step, lr)
        curve.append(toy.p)
    return toy, curve


def _learns_from_traces(name: str) -> bool:
    objective, _ = _preset(name)
    return objective is None or objective.group.off_policy > 0 or objective.interleaved_sft is not None


PRESETS = available_presets("methods")


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_raises_the_probability_of_what_is_rewarded(preset: str) -> None:
    toy, curve = _trained(preset, start=0.2, lr=0.2)
    assert curve[-1] > 0.5
    assert toy.replays == (preset == "exgrpo")  # the buffer was in use


@pytest.mark.parametrize("preset", filter(_learns_from_traces, PRESETS))
def test_traces_raise_what_rollouts_hardly_ever_find(preset: str) -> None:
    toy, curve = _trained(preset, start=1e-4, lr=4.0)
    assert curve[-1] > 1.01e-4
    assert (toy.imitations > 0) == (preset == "relift")


def test_shaping_lifts_a_rare_right_token_faster() -> None:
    """From p = 0.001 the coefficient on grad log p is 0.0098 A with shaping and 0.001 A without (LUFFY, figure 2)."""
    _, shaped = _trained("luffy", start=0.001, lr=2.0)
    _, unshaped = _trained("luffy_no_shaping", start=0.001, lr=2.0)
    assert all(fast > slow for fast, slow in zip(shaped, unshaped, strict=True))
    assert unshaped[-1] > 0.001 and shaped[-1] > 10 * unshaped[-1]
