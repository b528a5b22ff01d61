"""One optimizer step, twice: by the training engine and by the float64 reference, from the same rows and weights."""

import copy
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import deepspeed
import torch
import yaml
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.config.objective import ObjectiveConfig
from luffy.config.terms import DivergenceLoss, TermConfig
from luffy.config.training import OptimizerConfig
from luffy.objectives.schedules import StepObjective, objective_at
from luffy.training.batching import branches_of, collate, one_shard, take_rows
from luffy.training.deepspeed_engine import load_to_train
from luffy.training.learner import batch_of
from luffy.training.ranks import init_process_group
from luffy.types import FinishReason, Group, Outcome, Source, Start, TrainBatch, Trajectory
from reference.losses import REFERENCES
from reference.rows import (
    LENGTH_LIMIT,
    NUM_CHOICES,
    STEP,
    TOTAL_STEPS,
    Evaluated,
    Reference,
    ReferenceRow,
    evaluate,
    evaluate_all,
    forward,
    learned_places,
    total,
)
from reference.taught_presets import SUPERVISED, teacher_overrides
from reference.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
PRESETS = tuple(REFERENCES)
"""The methods of `exp_configs/methods/`, and `relift_sft`, the supervised half of `relift`."""
CASES = (*PRESETS, *VARIANTS)
CONTEXTS = ", contexts"
"""Ends the name of a case in which some rows are episodes with several contexts."""
MAX_RESPONSE_TOKENS = LENGTH_LIMIT
# Adam at eps = 1 is nearly linear in the gradient, so that an error of scale shows in the parameters.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1.0, weight_decay=0.01, max_grad_norm=0.05)
SPLITS: dict[str, dict[str, object]] = {
    "one_batch": {"micro_batch_tokens": 10_000},
    "one_row_each": {"micro_batch_tokens": 1},  # most micro-batches then hold no token of some term
    "some_rows": {"micro_batch_tokens": 40},
    "packed_one_batch": {"micro_batch_tokens": 10_000, "packing": True},
    "packed_some_rows": {"micro_batch_tokens": 40, "packing": True},
    "gradient_checkpointing": {"micro_batch_tokens": 40, "gradient_checkpointing": True},
}
VOCABULARY = 23
_REWARDS = ((1, 0, 1, 0), (0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 0, 1), (0, 1, 0, 0))
"""Of the rollouts of each group, repeated: mixed, all wrong, all right, mixed twice."""
_SAMPLED_EARLIER = {
    "replayed": Source.REPLAY, "hinted": Source.HINTED, "refined": Source.HINTED, "beside": Source.HINTED,
}  # fmt: skip
"""Kinds of rows whose off-policy tokens a policy sampled, so that their log-probabilities are known."""
_HINTED = (0, 4)
"""Groups (modulo 5) of which every row was sampled with a hint."""
_NO_GUIDE = 3
"""Groups of this number (modulo 5) have rollouts alone: their prompt has no trace."""


def tiny_model(seed: int = 0, tie: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tie, attention_dropout=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def loaded_model(where: ExecutionConfig, seed: int = 0, dtype: DType = "float32") -> PreTrainedModel:
    """The tiny model as a stage loads it: in shares under ZeRO 3."""
    model = tiny_model(seed)
    with tempfile.TemporaryDirectory() as folder:  # one for each rank, where save_pretrained would write only rank 0's
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})
        return load_to_train(Path(folder), dtype, where)


def reference_of(case: str) -> Reference:
    case = case.removesuffix(CONTEXTS)
    return VARIANTS[case][1] if case in VARIANTS else REFERENCES[case]


@functools.cache
def objective_of(case: str) -> ObjectiveConfig | None:
    """What RL minimises; None for presets of the SFT stage."""
    case = case.removesuffix(CONTEXTS)
    if case in VARIANTS:
        return ObjectiveConfig.model_validate_json(json.dumps(yaml.safe_load(VARIANTS[case][0])))
    preset = case.removesuffix("_sft")
    overrides = [f"method={preset}", f"chain={chain_of(preset)}", *teacher_overrides(preset)]
    objective = load_experiment(ROOT / "exp_configs/smoke.yaml", overrides).objective
    return objective and objective.model_copy(update={"terms": tuple(map(_with_few_choices, objective.terms))})


def _with_few_choices(term: TermConfig) -> TermConfig:
    """The term; a divergence with so few tokens of the vocabulary that it leaves some out."""
    if not isinstance(term.loss, DivergenceLoss):
        return term
    return term.model_copy(update={"loss": term.loss.model_copy(update={"top_k": NUM_CHOICES})})


def chain_of(preset: str) -> str:
    return "sft" if preset in SUPERVISED else "rl"


def terms_of(case: str) -> tuple[TermConfig, ...]:
    case = case.removesuffix(CONTEXTS)
    if case == "relift_sft":
        objective = objective_of("relift")
        assert objective is not None and objective.interleaved_sft is not None
        return objective.interleaved_sft.terms
    if chain_of(case) == "sft":
        config = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={case}", "chain=sft"])
        assert config.sft is not None
        return config.sft.objective.terms
    objective = objective_of(case)
    assert objective is not None
    return objective.terms


def step_of(case: str) -> StepObjective:
    """The objective in the middle of a run."""
    return objective_at(terms_of(case), STEP, TOTAL_STEPS, MAX_RESPONSE_TOKENS)


# ---- the rows ----


class RowWriter:
    """Rows of uneven lengths, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def ids(self, low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (), generator=self._generator))
        return tuple(torch.randint(1, VOCABULARY, (length,), generator=self._generator).tolist())

    def logps(self, count: int, known: bool) -> tuple[float, ...]:
        """Under something not far from the policy, whose log-probabilities are about -log(23)."""
        drawn = tuple((-2.0 - 2.0 * torch.rand(count, generator=self._generator)).tolist())
        return drawn if known else (float("nan"),) * count


def trajectories(case: str, num_groups: int = 5, seed: int = 1) -> tuple[list[Trajectory], list[int]]:
    """Four rows a group, and each row's group.

    The kinds of rows (`Reference.rows`): `rollouts`; `demonstrations`, the last row of a group being one;
    `where_failing`, the same, but only where all rollouts are wrong; `replayed`, it being an earlier rollout;
    `refined`, it being of a second round; `hinted`, all rows of some groups being sampled with a hint; `guided`, the
    last row beginning with a prefix of a trace; `all_guided`, every row beginning with the same; `demonstrations_only`;
    `peers`, rollouts of which those beside a right one have a prompt for the teacher; `right_peers`, `wrong_peers`, the
    same for the right or wrong ones alone; `sourced`, rollouts of which each group has one of two teachers, or none;
    `probed`, of which every third group has no teacher; `beside`, where all rollouts are wrong the last two rows being
    right ones of a second round, each with its teacher.
    Every fifth group has rollouts alone. Every third row has tokens of an environment between its own.
    """
    kind = reference_of(case).rows
    writer = RowWriter(seed)
    rows, groups = [], []
    for group in range(num_groups):
        prompt, trace = writer.ids(2, 7), writer.ids(6, MAX_RESPONSE_TOKENS + 1)
        for sample in range(4):
            rows.append(_row(kind, writer, prompt, trace, group, sample))
            groups.append(group)
    if kind.endswith("peers"):
        wanted = {"right_peers": (True,), "wrong_peers": (False,)}.get(kind, (True, False))
        rows = [
            _with_peer(row, rows[4 * group : 4 * group + 4]) if row.is_correct in wanted else row
            for row, group in zip(rows, groups, strict=True)
        ]
    if (by_group := {"sourced": (0, 1, -1), "probed": (-1, 0, 0)}.get(kind)) is not None:
        rows = [
            dataclasses.replace(row, taught_by=by_group[group % 3]) for row, group in zip(rows, groups, strict=True)
        ]
    if kind == "beside":
        rows = [_beside(row) if row.is_off_policy else row for row in rows]
    between = RowWriter(seed + 100)
    rows = [with_environment(row, between) if i % 3 == 0 else row for i, row in enumerate(rows)]
    return [with_contexts(row) for row in rows] if case.endswith(CONTEXTS) else rows, groups


def _with_peer(row: Trajectory, group: Sequence[Trajectory]) -> Trajectory:
    """The row, if another one of its group is right, with a prompt for the teacher that holds that one."""
    peers = [other for other in group if other.is_correct and other is not row]
    if not peers:
        return row
    return dataclasses.replace(row, taught_by=0, teacher_prompt_ids=(*peers[0].response_ids, *row.prompt_ids))


def _beside(row: Trajectory) -> Trajectory:
    """The row beside its group, with a teacher that sees what it was sampled with."""
    start = Start("answer", shown="the answer")
    return dataclasses.replace(row, start=start, taught_by=0, teacher_prompt_ids=(5, *row.prompt_ids))


def with_contexts(row: Trajectory) -> Trajectory:
    """The row, where it has tokens of an environment: those are then the context of what follows, all of it."""
    starts = (row.source.index(Source.ENVIRONMENT),) if Source.ENVIRONMENT in row.source else ()
    return dataclasses.replace(row, context_starts=starts)


def with_environment(row: Trajectory, writer: RowWriter) -> Trajectory:
    """The row, with up to three tokens of an environment in the middle: between two turns, whoever wrote them."""
    if len(row.response_ids) < 2:
        return row
    place, written = len(row.response_ids) // 2, writer.ids(1, 4)

    def insert(values: tuple, value: object) -> tuple:
        return (*values[:place], *(value,) * len(written), *values[place:])

    return dataclasses.replace(
        row,
        response_ids=(*row.response_ids[:place], *written, *row.response_ids[place:]),
        source=insert(row.source, Source.ENVIRONMENT),
        logp_behavior=insert(row.logp_behavior, float("nan")),
        weight_version=insert(row.weight_version, -1),
    )


def _row(
    kind: str, writer: RowWriter, prompt: tuple[int, ...], trace: tuple[int, ...], group: int, sample: int
) -> Trajectory:
    own = writer.ids(1, MAX_RESPONSE_TOKENS + 1)
    num_given = _num_given(kind, group, sample, len(own), len(trace))
    if kind in ("guided", "all_guided"):
        # Nothing is written behind a whole trace.
        own = trace[:num_given] + (own[: MAX_RESPONSE_TOKENS - num_given] if num_given < len(trace) else ())
    author_known = kind in _SAMPLED_EARLIER or group % 5 == 0
    sampler_known = (group, sample) != (0, 0)
    reward = _REWARDS[group % 5][sample]
    if num_given == len(own) and kind != "hinted":  # one demonstration is wrong
        reward = int(kind == "replayed" or group % 5 != 4)
    return Trajectory(
        prompt_ids=prompt,
        response_ids=own,
        source=(_SAMPLED_EARLIER.get(kind, Source.OFF_POLICY),) * num_given
        + (Source.ON_POLICY,) * (len(own) - num_given),
        logp_behavior=writer.logps(num_given, author_known) + writer.logps(len(own) - num_given, sampler_known),
        weight_version=(0,) * len(own),
        reward=float(reward),
        outcome=Outcome.CORRECT if reward else Outcome.WRONG,
        # One rollout of a mixed group was cut.
        finish_reason=FinishReason.LENGTH if (group % 5, sample) == (3, 1) else FinishReason.STOP,
    )


def _num_given(kind: str, group: int, sample: int, response_tokens: int, trace_tokens: int) -> int:
    """How many tokens of a row are not the policy's own."""
    if kind == "demonstrations_only":
        return response_tokens
    has_guide = sample == 3 and group % 5 != _NO_GUIDE
    if kind == "where_failing":
        return response_tokens if has_guide and not any(_REWARDS[group % 5]) else 0
    if kind == "hinted":
        return response_tokens if group % 5 in _HINTED else 0
    if kind == "beside":
        return response_tokens if sample > 1 and not any(_REWARDS[group % 5]) else 0
    if kind in ("demonstrations", "replayed", "refined"):
        return response_tokens if has_guide else 0
    if kind == "all_guided" or (kind == "guided" and has_guide):
        # Half of the trace, little, the whole of it, nothing, some.
        return (trace_tokens // 2, 1, trace_tokens, 0, 5)[group % 5]
    return 0


def as_groups(rows: Sequence[Trajectory], groups: Sequence[int]) -> list[Group]:
    """The rows of each number in `groups`, in order; those with a start beside the others."""
    found = []
    for number in dict.fromkeys(groups):
        own = [row for row, other in zip(rows, groups, strict=True) if other == number]
        beside = tuple(row for row in own if row.start is not None)
        found.append(Group(str(number), tuple(row for row in own if row.start is None), beside=beside))
    return found


# ---- constants of the step, the same for both sides ----


def _noisy(own: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Log-probabilities a little off the model's own, one in ten far off, so that ratios differ from 1 and reach clips.

    Rounded to float32, which is what the engine holds.
    """
    generator = torch.Generator().manual_seed(seed)
    noisy = []
    for logp in own:
        n = len(logp)
        far = 2.0 * (torch.rand(n, generator=generator) < 0.1) * torch.randn(n, generator=generator).sign()
        noisy.append((logp + 0.3 * torch.randn(n, generator=generator) + far).float().double())
    return noisy


@functools.cache
def first_with_rows_of(case: str) -> str:
    """The first case with the same rows: what depends on rows and model alone is computed for that one."""
    kind = reference_of(case).rows
    first = next(other for other in CASES if reference_of(other).rows == kind)
    return first + CONTEXTS if case.endswith(CONTEXTS) else first


@functools.cache
def _constants(first_case: str, model: PreTrainedModel) -> tuple[list[Tensor], ...]:
    """Log-probabilities of each row under the old policy, the reference and the teacher, then those of the whole
    vocabulary under the teacher; kept for both sides."""
    with torch.no_grad():
        own = [evaluate(model, row)[0] for row in trajectories(first_case)[0]]
        everywhere = [evaluate_all(model, row) for row in trajectories(first_case)[0]]
    teacher = [
        (logq + noise).log_softmax(-1) for logq, noise in zip(everywhere, _noisy_like(everywhere, 8), strict=True)
    ]
    return *(_noisy(own, seed) for seed in (9, 6, 7)), [logq.float().double() for logq in teacher]


def _noisy_like(tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in tensors]


def critic_values(rows: Sequence[Trajectory]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.rand(row.num_learnable, generator=generator).double() for row in rows]


class _GivenCritic:
    """Stands in for the critic of PPO."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values

    def values(self, batch: TrainBatch) -> Tensor:
        return _placed(batch, self._values)


def _placed(batch: TrainBatch, per_row: Sequence[Tensor]) -> Tensor:
    """`(B, T)` with a row's numbers at its response tokens."""
    placed_BT = torch.zeros(batch.input_ids_BT.shape)
    placed_BT[batch.response_mask_BT] = torch.cat(list(per_row)).float()
    return placed_BT


def make_batch(case: str, model: PreTrainedModel, group_numbers: Sequence[int] | None = None) -> TrainBatch:
    """The engine's side of the case: collated rows, advantages, and the noisy log-probabilities.

    `group_numbers` are those of this rank; None: all of them.
    """
    all_rows, all_groups = trajectories(case)
    kept = [i for i, number in enumerate(all_groups) if group_numbers is None or number in group_numbers]
    rows = [all_rows[i] for i in kept]

    def of_kept(per_row: Sequence[Tensor]) -> list[Tensor]:
        return [per_row[i] for i in kept]

    objective = objective_of(case)
    if reference_of(case).rows == "demonstrations_only":
        sequences, episodes = branches_of(rows)
        batch = collate(sequences, torch.ones(len(sequences)), pad_id=0, episodes=episodes)
    else:
        assert objective is not None
        init_process_group()  # whitening asks the other ranks
        critic = _GivenCritic(of_kept(critic_values(all_rows)))
        shard = one_shard(as_groups(all_rows, all_groups), objective.advantage)
        of_rank = [i for i, episode in enumerate(shard.episodes) if episode in kept]
        batch = batch_of(shard.part([of_rank]), objective.advantage, 0, critic)  # type: ignore[arg-type]
    *constants, teacher_all = _constants(first_with_rows_of(case), model)
    old, start, teacher = (_placed(batch, of_kept(logps)) for logps in constants)
    batch = dataclasses.replace(batch, logp_old_BT=old, logp_ref_BT=start, logp_teacher_BT=teacher)
    if objective is None:
        return batch
    if objective.needs_teacher_entropy:
        entropies = [-(logq_TV.exp() * logq_TV).sum(-1) for logq_TV in of_kept(teacher_all)]
        batch = dataclasses.replace(batch, entropy_teacher_BT=_placed(batch, entropies))
    return with_choices(batch, of_kept(teacher_all), objective.divergence.top_k if objective.divergence else 0)


def with_choices(batch: TrainBatch, teacher_all: Sequence[Tensor], count: int) -> TrainBatch:
    """The batch with the `count` most probable tokens of the teacher at each response token, if any."""
    if not count:
        return batch
    logq_NV = torch.cat(list(teacher_all))
    top = logq_NV.topk(min(count, VOCABULARY), dim=-1)
    rest_N1 = (1 - top.values.exp().sum(-1, keepdim=True)).clamp(min=math.exp(-80)).log()
    mask_BT, num_choices = batch.response_mask_BT, top.values.shape[-1]
    choice_BTC = torch.zeros((*mask_BT.shape, num_choices), dtype=torch.int32)
    logq_BTC = torch.zeros((*mask_BT.shape, num_choices + 1))
    choice_BTC[mask_BT], logq_BTC[mask_BT] = top.indices.int(), torch.cat([top.values, rest_N1], dim=-1).float()
    return dataclasses.replace(batch, choice_BTC=choice_BTC, logq_BTC=logq_BTC)


def shard_by_source(batch: TrainBatch, rank: int) -> TrainBatch:
    """Of two ranks: the first has all rows with an off-policy token and no others; without such rows a third of all."""
    has_off_policy_B = batch.is_off_policy_BT.any(dim=-1)
    if has_off_policy_B.all() or not has_off_policy_B.any():
        has_off_policy_B = torch.arange(len(batch)) < len(batch) // 3
    wanted_B = has_off_policy_B if rank == 0 else ~has_off_policy_B
    return take_rows(batch, wanted_B.nonzero().flatten().tolist())


# ---- the reference's side ----


def reference_rows(
    case: str,
    rows: Sequence[Trajectory],
    groups: Sequence[int],
    logp_old: Sequence[Tensor],
    logp_start: Sequence[Tensor] | None = None,
    logp_teacher: Sequence[Tensor] | None = None,
    teacher_all: Sequence[Tensor] | None = None,
) -> list[ReferenceRow]:
    """The rows as the papers speak of them, from the trajectories themselves."""
    values = critic_values(rows)
    zeros = [torch.zeros(row.num_learnable, dtype=torch.float64) for row in rows]
    start, teacher = logp_start or zeros, logp_teacher or zeros
    written = [
        ReferenceRow(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            source=row.source,
            given=torch.tensor([row.source[place] is not Source.ON_POLICY for place in learned_places(row)]),
            advantage=torch.zeros(row.num_learnable, dtype=torch.float64),
            logp_old=logp_old[i],
            logp_sampler=torch.tensor(row.logp_behavior).double()[learned_places(row)],
            logp_start=start[i],
            logp_teacher=teacher[i],
            teacher_all=zeros[i] if teacher_all is None else teacher_all[i],
            taught_by=row.taught_by,
            value=values[i],
            group=groups[i],
            reward=row.reward,
            is_truncated=row.is_truncated,
            context_starts=row.context_starts,
        )
        for i, row in enumerate(rows)
    ]
    advantages = reference_of(case).advantages(written)
    return [dataclasses.replace(row, advantage=a) for row, a in zip(written, advantages, strict=True)]


@functools.cache
def reference_step(
    case: str, model: PreTrainedModel, temperature: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and parameters after one AdamW step, in float64 on the whole batch; kept for the next split."""
    loss, parameters = _reference_loss(case, model, temperature)
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    model64 = copy.deepcopy(model).double()
    for parameter, gradient in zip(model64.parameters(), found, strict=True):
        parameter.grad = gradient.clone()
    adamw_step(model64, reference_optimizer(model64))
    after = {name: parameter.detach() for name, parameter in model64.named_parameters()}
    return dict(zip(parameters, found, strict=True)), after


def reference_loss(case: str, model: PreTrainedModel, temperature: float = 1.0) -> float:
    """The loss of the same batch."""
    return _reference_loss(case, model, temperature)[0].item()


def wanted_gradients(case: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Of what the step has to raise: log-probabilities of own tokens, each times its advantage; without any, those of
    the traces; without both, minus the divergences from the teacher in both directions."""
    rows, parameters = _reference_rows(case, model, 1.0)
    wanted = total([(r.row.advantage * r.logp)[r.own] for r in rows])
    if not any(r.row.advantage.any() for r in rows):
        given = [r.logp[r.given] for r in rows]
        taught = [(r.row.teacher_all.exp() * r.logp_all).sum(-1) for r in rows]
        taught += [(r.row.logp_teacher - r.logp).detach() * r.logp for r in rows]
        wanted = total(given if any(map(len, given)) else taught)
    return dict(zip(parameters, torch.autograd.grad(wanted, list(parameters.values()), retain_graph=True), strict=True))


@functools.cache
def _reference_loss(case: str, model: PreTrainedModel, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
    rows, parameters = _reference_rows(case, model, temperature)
    return reference_of(case)(rows), parameters


def _reference_rows(case: str, model: PreTrainedModel, temperature: float) -> tuple[list[Evaluated], dict[str, Tensor]]:
    model64, known = _evaluated(first_with_rows_of(case), model, temperature)
    rows = [dataclasses.replace(same, row=row) for same, row in zip(known, _written(case, model), strict=True)]
    return rows, dict(model64.named_parameters())


@functools.cache
def _evaluated(first_case: str, model: PreTrainedModel, temperature: float) -> tuple[torch.nn.Module, list[Evaluated]]:
    """The rows under the model in float64, on a graph that the losses of all cases with these rows go back through."""
    model64 = copy.deepcopy(model).double()
    return model64, [forward(model64, row, temperature) for row in _written(first_case, model)]


def reference_gradients(
    case: str,
    model64: torch.nn.Module,
    model: PreTrainedModel,
    loss: Callable[[Sequence[Evaluated]], Tensor],
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Gradients of `loss` on the rows of a case, also left in `model64`; `model` is what the noise was added to."""
    loss([forward(model64, row, temperature) for row in _written(case, model)]).backward()
    return {name: parameter.grad.clone() for name, parameter in model64.named_parameters()}


def _written(case: str, model: PreTrainedModel) -> list[ReferenceRow]:
    rows, groups = trajectories(case)
    return reference_rows(case, rows, groups, *_constants(first_with_rows_of(case), model))


def reference_optimizer(model64: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model64.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip


def adamw_step(model64: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float = OPTIMIZER.lr) -> None:
    """Clip, set the rate, step, forget the gradient."""
    torch.nn.utils.clip_grad_norm_(model64.parameters(), OPTIMIZER.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def gradients_at_step(engine: DeepSpeedEngine, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Filled in by the next `engine.step()`, when gradients are reduced over ranks and not yet clipped."""
    found: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def read_then_step(*args: object, **kwargs: object) -> object:
        found.update({name: safe_get_full_grad(parameter).clone() for name, parameter in parameters.items()})
        return step(*args, **kwargs)

    engine.optimizer.step = read_then_step
    return found


def whole(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Copies of the parameters, whole on every rank also where ZeRO 3 holds them in shares."""
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in parameters.values())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=is_sharded):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each tensor is from where it was, in float64: the tensors themselves would hide an error of scale."""
    assert after.keys() == before.keys()
    return {name: after[name].detach().double() - before[name].detach().double() for name in before}


def relative_l2(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum((found[name].double().cpu() - expected[name]).square().sum() for name in expected)
    return float((difference / sum(tensor.square().sum() for tensor in expected.values())).sqrt())


def execution(**settings: object) -> ExecutionConfig:
    return ExecutionConfig(logprob_chunk_tokens=7, **settings)
