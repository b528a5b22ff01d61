"""Two updates of an RL step, by the learner on this rank's shard and by float64 references on all rows."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from luffy.config import available_presets
from luffy.config.objective import ObjectiveConfig
from luffy.config.training import MovingReferenceConfig, RLConfig, ScheduleConfig
from luffy.objectives.schedules import schedule_multiplier
from luffy.training.batching import Shard, shard_groups, shard_rows
from luffy.training.learner import Learner, Metrics
from luffy.training.policy import FrozenPolicy, MovingReference, Policy
from luffy.training.ranks import sum_over_ranks
from luffy.training.teachers import DistillationTeacher, Teachers
from luffy.types import Trajectory
from reference.gradient_case import (
    MAX_RESPONSE_TOKENS,
    OPTIMIZER,
    adamw_step,
    as_groups,
    execution,
    first_with_rows_of,
    loaded_model,
    moved,
    objective_of,
    reference_of,
    reference_optimizer,
    reference_rows,
    relative_l2,
    tiny_model,
    trajectories,
    whole,
)
from reference.losses import forward
from reference.rows import STEP, TOTAL_STEPS, evaluate, evaluate_all
from reference.taught_presets import SUPERVISED

NUM_GROUPS = 5
SCHEDULE = ScheduleConfig(kind="linear", final_share=0.1)
LEARNING_RATE = 3.0
"""So large that the second update's ratios are far from 1: then each of them is compared, and `logp_old` with them."""
RL = RLConfig(
    steps=TOTAL_STEPS,
    prompts_per_step=NUM_GROUPS + 1,
    prompts_per_update=3,
    max_response_tokens=MAX_RESPONSE_TOKENS,
    optimizer=OPTIMIZER.model_copy(update={"schedule": SCHEDULE, "lr": LEARNING_RATE}),
)
DEAL = 4
"""Seed of the deal. A filter may leave five groups of six: one update takes two of them, the other three."""
OWN_TEACHERS = ("rlrt", "hdpo")
"""Their teacher is the policy before the first update, in another prompt; all others have a model of its own."""
METHODS = [name for name in available_presets("methods") if name not in (*SUPERVISED, "ppo")]


def objective(preset: str) -> ObjectiveConfig:
    found = objective_of(preset)
    assert found is not None
    return found


def rate(update: int, passes: int = 1) -> float:
    """Learning rate of an optimizer step: each RL step makes two in every pass."""
    a_step = 2 * passes
    return LEARNING_RATE * schedule_multiplier(SCHEDULE, (STEP - 1) * a_step + update, TOTAL_STEPS * a_step)


def shard_of(
    rows: Sequence[Trajectory], index: Sequence[int], preset: str, num_ranks: int = 1, rank: int = 0, passes: int = 1
) -> Shard:
    return shard_groups(as_groups(rows, index), objective(preset).advantage, 2, num_ranks, DEAL, passes)[rank]


def make_learner(preset: str, passes: int = 1, **settings: object) -> Learner:
    config = objective(preset)
    where = execution(**settings)

    def frozen(seed: int) -> FrozenPolicy:
        return FrozenPolicy(loaded_model(where, seed), where, 1.0)

    reference = frozen(1) if config.needs_reference else None
    rl = RL.model_copy(update={"passes": passes})
    policy, teachers = Policy(loaded_model(where), RL.optimizer, where, "float32"), None
    if config.needs_teacher:
        top_k = config.divergence.top_k if config.divergence else None
        scored = policy if preset in OWN_TEACHERS else frozen(2)
        teacher = DistillationTeacher(scored, None, 0, top_k, config.needs_teacher_entropy)
        teachers = Teachers([teacher], policy, config.divergence)
    return Learner(policy, config, rl, pad_id=0, reference=reference, teachers=teachers)


def two_updates(
    preset: str, num_ranks: int = 1, rank: int = 0, passes: int = 1, **settings: object
) -> tuple[float, Metrics]:
    """Relative L2 between the learner's movement over two updates a pass and the reference's, and its metrics."""
    rows, index = trajectories(preset, num_groups=NUM_GROUPS)
    learner = make_learner(preset, passes, **settings)
    metrics = learner.learn(shard_of(rows, index, preset, num_ranks, rank, passes), STEP)
    return _movement_error(learner.policy, lambda: reference_updates(preset, passes)), metrics


@functools.cache
def _logps(first_preset: str) -> list[list[Tensor]]:
    """Of each row before the first update: under the policy, the reference and the teacher, then under the teacher of
    the whole vocabulary."""
    rows, _ = trajectories(first_preset, num_groups=NUM_GROUPS)
    shown = [replace(row, prompt_ids=row.teacher_prompt_ids or row.prompt_ids) for row in rows]
    models = [tiny_model(seed).double() for seed in (0, 1, 0 if first_preset in OWN_TEACHERS else 2)]
    with torch.no_grad():
        logps = [
            [evaluate(model, row)[0] for row in texts] for model, texts in zip(models, (rows, rows, shown), strict=True)
        ]
        return [*logps, [evaluate_all(models[2], row) for row in shown]]


@functools.cache
def reference_updates(preset: str, passes: int) -> dict[str, Tensor]:
    """The parameters after the same updates in float64, on all rows; kept for the next layout."""
    rows, index = trajectories(preset, num_groups=NUM_GROUPS)
    model64 = tiny_model().double()
    optimizer = reference_optimizer(model64)
    written = reference_rows(preset, rows, index, *_logps(first_with_rows_of(preset)))
    whole = shard_of(rows, index, preset, passes=passes)
    dealt = [{whole.groups[row] for row in update} for update in whole.updates]
    for update, groups in enumerate(dealt):
        part = [row for row, group in zip(written, index, strict=True) if group in groups]
        reference_of(preset)([forward(model64, row) for row in part]).backward()
        adamw_step(model64, optimizer, rate(update, passes))
    return {name: parameter.detach() for name, parameter in model64.named_parameters()}


def one_demonstration(num_ranks: int = 1, rank: int = 0, **settings: object) -> float:
    """The same for an SFT step on a single row: of two ranks, one has none."""
    rows, _ = trajectories("relift_sft", num_groups=1)
    learner = make_learner("relift", **settings)
    learner.sft_step(shard_rows(rows[:1], num_ranks)[rank], STEP)
    model64 = tiny_model().double()
    written = reference_rows("relift_sft", rows[:1], [0], [torch.zeros(rows[0].num_learnable).double()])
    reference_of("relift_sft")([forward(model64, row) for row in written]).backward()
    adamw_step(model64, reference_optimizer(model64), rate(1))
    return _movement_error(learner.policy, lambda: dict(model64.named_parameters()))


def moving_average(num_ranks: int = 1, rank: int = 0, **settings: object) -> float:
    """Relative L2 between an average of the policy after one RL step and its rule in float64, the worst of any rank."""
    rows, index = trajectories("uft", num_groups=NUM_GROUPS)
    policy = Policy(tiny_model(), RL.optimizer, execution(**settings), "float32")
    config = MovingReferenceConfig(refresh_every=1, mixup=0.25)
    reference = MovingReference(policy, FrozenPolicy(tiny_model(), execution(**settings), 1.0), config)
    learner = Learner(policy, objective("uft"), RL, pad_id=0, reference=reference)
    learner.learn(shard_of(rows, index, "uft", num_ranks, rank), STEP)
    reference.follow(STEP)
    start = dict(tiny_model().named_parameters())
    expected = {name: 0.25 * way for name, way in moved(dict(policy.weights()), start).items()}
    error_R = torch.zeros(num_ranks, dtype=torch.float64)
    error_R[rank] = relative_l2(moved(reference.state, start), expected)
    return float(sum_over_ranks(error_R).max())


def _movement_error(policy: Policy, reference: Callable[[], dict[str, Tensor]]) -> float:
    """On rank 0; NaN on the others, which have a part in the steps alone."""
    found = whole(dict(policy.causal_lm.named_parameters()))
    if dist.get_rank() != 0:
        return math.nan
    first = dict(tiny_model().named_parameters())
    return relative_l2(moved(found, first), moved(reference(), first))
