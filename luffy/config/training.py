"""The stages that train (`base`, `sft` and `rl`): optimisation, the prompts of a step, RL's reference and teacher."""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from luffy.config.evaluation import StopText, ValidationConfig
from luffy.config.model import DType
from luffy.config.objective import SupervisedObjectiveConfig
from luffy.config.strict import Name, PositiveShare, Share, ShareBelowOne, StrictModel
from luffy.config.terms import (
    ImportanceCorrection,
    NegativeLogLikelihoodLoss,
    NormaliserConfig,
    ScheduledValue,
    TermConfig,
    bounds,
    constant,
    depends_on_length,
)


class ScheduleConfig(StrictModel):
    """Learning-rate multiplier over the optimizer steps of a stage."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_share: Share = 0.0
    """Share of all steps over which the rate climbs linearly from 0."""
    final_share: Share = 0.0
    """Share of the peak rate that is left at the last step."""

    def _complaints(self) -> Iterator[str]:
        if self.kind == "constant" and self.final_share:
            yield "final_share has no effect with kind: constant; remove it"

    @property
    def depends_on_length(self) -> bool:
        return self.kind != "constant" or self.warmup_share > 0


class OptimizerConfig(StrictModel):
    """AdamW."""

    lr: PositiveFloat
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    skip_grad_norm: PositiveFloat | None = None
    """Gradients whose norm is above this before clipping make no update; None: every gradient does."""
    schedule: ScheduleConfig = ScheduleConfig()

    def _complaints(self) -> Iterator[str]:
        if self.skip_grad_norm is not None and self.skip_grad_norm <= self.max_grad_norm:
            yield (
                f"skip_grad_norm {self.skip_grad_norm:g} must be above max_grad_norm {self.max_grad_norm:g}: "
                "nothing would ever be clipped"
            )


class BaseConfig(StrictModel):
    """Supervised training of the embedded base policy on `data.corpus`."""

    steps: PositiveInt
    batch_size: PositiveInt
    """Examples per optimizer step."""
    optimizer: OptimizerConfig


class SFTConfig(StrictModel):
    """Supervised fine-tuning on traces."""

    seed: NonNegativeInt | None = None
    """Seed of this stage alone (which traces, their order); None: the experiment's. Lets seeds share data and base."""
    num_traces: PositiveInt | None = None
    """Learn from the traces of this many training prompts (chosen by seed); None: all."""
    epochs: PositiveInt | None = None
    """Passes over the traces."""
    steps: PositiveInt | None = None
    """Optimizer steps, in place of `epochs`."""
    batch_size: PositiveInt
    """Traces per optimizer step."""
    steps_per_phase: PositiveInt = 1
    """Optimizer steps after which the old policy becomes the current one, for losses with a ratio to it
    (`clipped_surrogate`, with advantage 1). Checkpoints are written between phases."""
    optimizer: OptimizerConfig
    validation: ValidationConfig | None = None
    """Held-out accuracy while this stage trains; None: it is not measured."""
    engine: Literal["cluster", "vllm"] = "cluster"
    """Engine of the validation, as `rl.engine`. `cluster`: the embedded one, on the ranks themselves. `vllm`: with
    `cluster: local`, vLLM in the trainer's process; on a GPU it sleeps but for a validation."""
    objective: SupervisedObjectiveConfig = SupervisedObjectiveConfig(
        terms=(
            TermConfig(
                name="sft",
                select="off_policy",
                loss=NegativeLogLikelihoodLoss(kind="nll"),
                normaliser=NormaliserConfig(mode="token", population="own"),
            ),
        )
    )

    def _complaints(self) -> Iterator[str]:
        if (self.epochs is None) == (self.steps is None):
            yield "give exactly one of epochs and steps; the other one is null"
        if self.objective.compares_with_old and self.steps_per_phase == 1:
            yield "clipped_surrogate is nll while the old policy is the current one; raise steps_per_phase"
        if self.steps_per_phase > 1 and not self.objective.compares_with_old:
            yield f"steps_per_phase {self.steps_per_phase} has no effect without a clipped_surrogate; remove it"
        for term in self.objective.terms:
            if isinstance(term.loss, NegativeLogLikelihoodLoss) and term.loss.temperature == "rollout":
                yield f"term {term.name!r}: temperature: rollout has no effect without rollouts; remove it"

    def num_steps(self, num_traces: int) -> int:
        if self.epochs is not None:
            return math.ceil(self.epochs * num_traces / self.batch_size)
        assert self.steps is not None
        return self.steps


class UniformSampling(StrictModel):
    """Epochs of all prompts, each shuffled anew."""

    kind: Literal["uniform"]
    depends_on_length: ClassVar[bool] = False


class CurriculumSampling(StrictModel):
    """Epochs of all prompts in sorted order; the seed orders ties, and prompts without the measure come last."""

    kind: Literal["curriculum"]
    by: Literal["difficulty", "trace_length"]
    """`difficulty`: the pass rate that this stage measured. `trace_length`: tokens of the shortest trace."""
    direction: Literal["easy_first", "hard_first"] = "easy_first"
    depends_on_length: ClassVar[bool] = False


class PoolShares(StrictModel):
    """Parts of a step's prompts, relative to each other; by default PRIME-RL's, with new prompts like normal ones."""

    new: PositiveFloat = 1.0
    """Prompts that no step has drawn yet."""
    hard: NonNegativeFloat = 0.2
    normal: NonNegativeFloat = 1.0
    easy: NonNegativeFloat = 0.2

    def _complaints(self) -> Iterator[str]:
        if not (self.hard or self.normal or self.easy):
            yield "hard, normal and easy are all 0, so no prompt would be drawn a second time; raise one"


class PoolSampling(StrictModel):
    """Quotas from pools of prompts by running pass rates (PRIME-RL's difficulty pools). A step takes the least recently
    drawn of every pool; the others make up for a pool with too few, one with share 0 only where nothing else is left.
    The pools of step s use the pass rates up to step s - 1 - `rl.max_staleness`, which are always available when it is
    planned."""

    kind: Literal["pools"]
    hard_at_most: ScheduledValue = constant(0.25)
    """Prompts with a running pass rate up to this are hard."""
    easy_above: ScheduledValue = constant(0.75)
    """Prompts with a running pass rate above this are easy; those between are normal."""
    shares: PoolShares = PoolShares()
    memory: ShareBelowOne = 0.5
    """Weight of the previous running pass rate when a new group's is averaged in; 0: only the last group counts."""

    @property
    def depends_on_length(self) -> bool:
        return depends_on_length(self.hard_at_most) or depends_on_length(self.easy_above)

    def _complaints(self) -> Iterator[str]:
        (hard_low, hard_high), (easy_low, easy_high) = bounds(self.hard_at_most), bounds(self.easy_above)
        if hard_low < 0 or easy_high > 1:
            yield "hard_at_most and easy_above are pass rates, between 0 and 1"
        if hard_low >= easy_low or hard_high >= easy_high:
            yield (
                f"hard_at_most ({hard_low:g} to {hard_high:g}) must be below easy_above ({easy_low:g} to "
                f"{easy_high:g}): no prompt would be normal"
            )


SamplingConfig = Annotated[UniformSampling | CurriculumSampling | PoolSampling, Field(discriminator="kind")]


class MovingReferenceConfig(StrictModel):
    """A reference or a teacher that follows the policy (TRL's `sync_ref_model`, after TR-DPO, arXiv 2404.09656). After
    every `refresh_every`-th RL step, reference <- mixup x policy + (1 - mixup) x reference, weight by weight."""

    refresh_every: PositiveInt
    """RL steps from one refresh to the next (TRL's `ref_model_sync_steps` counts optimizer steps)."""
    mixup: PositiveShare = 1.0
    """Share of the policy (TRL's `ref_model_mixup_alpha`). 1: a copy. Below 1: a moving average, decay 1 - mixup."""

    def _complaints(self) -> Iterator[str]:
        if self.refresh_every == 1 and self.mixup == 1:
            yield (
                "refresh_every: 1 with mixup: 1 is the policy before each RL step; use a kl term with against: old (a "
                "teacher: weights: current), raise refresh_every, or lower mixup"
            )


class TaughtRows(StrictModel):
    """Which rows a teacher takes; all given conditions must hold."""

    data_source: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """Names of data sources, one of which the row's prompt is from."""
    columns: dict[str, str | int | bool] = Field(default_factory=dict)
    """Columns of the prompt's `extra_info`, each with the value that it has to have."""
    outcome: Literal["correct", "wrong"] | None = None
    """Outcome of the row itself; every row that did not earn the reward is `wrong`."""
    start: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] | None = None
    """Names in `objective.group.starts`, one of which the row has."""
    pass_rate_at_least: PositiveShare | None = None
    """Pass rate of the prompt, as the stage `difficulty` measured it."""

    def formula(self) -> str:
        conditions = [
            "" if self.data_source is None else f"from {' or '.join(self.data_source)}",
            *(f"with {name} {value}" for name, value in self.columns.items()),
            "" if self.outcome is None else f"that are {self.outcome}",
            "" if self.start is None else f"with the start {' or '.join(self.start)}",
            "" if self.pass_rate_at_least is None else f"of prompts with a pass rate >= {self.pass_rate_at_least:g}",
        ]
        return f"rows {', '.join(filter(None, conditions))}"


class _Teacher(StrictModel):
    rows: Annotated[TaughtRows | None, BeforeValidator(lambda value: None if value in ("rest", {}) else value)] = None
    """The rows that it scores, of those that no teacher before it takes; None, `rest` or no condition: all of them."""

    @property
    def rows_in_words(self) -> str:
        return "the rest of the rows" if self.rows is None else self.rows.formula()


class ModelTeacher(_Teacher):
    """Another model, which scores the policy's tokens in the policy's own context. It is frozen."""

    kind: Literal["model"]
    path: str
    """A Hugging Face model folder or hub id, such as an export of a run. Its tokenizer has to be the policy's."""
    dtype: DType | None = None
    """Compute type; None: that of the policy."""

    def formula(self) -> str:
        return f"the model {self.path}"


class SelfTeacher(_Teacher):
    """The policy with a solution in its prompt (self-distillation)."""

    kind: Literal["self"]
    shows: Literal["trace", "peer", "start"] = "trace"
    """`trace`: the prompt's first trace; every training prompt needs one. `peer`: the first other response of the row's
    group that was right (SDPO, arXiv 2601.20802). A row without one, or for which it is too long, has no teacher.
    `start`: what the prompt showed while the row was sampled (HDPO, arXiv 2603.23871); only rows with a start that are
    learned without it have this teacher."""
    weights: Literal["start", "current"] = "start"
    """`start`: those that the stage starts from. `current`: those before each RL step's updates."""
    follows: MovingReferenceConfig | None = None
    """How the weights follow the policy from `start`, as its moving average or as the policy of some steps ago; None:
    they do not. Checkpoints hold them."""
    prompt: str = (
        "{problem}\n\nHere is a reference solution to this problem:\n{trace}\n\n"
        "Now solve the problem in your own words."
    )
    """Replaces the last message of the prompt: `{problem}` is that message, `{trace}` the trace or the peer's text."""

    def formula(self) -> str:
        weights = {"start": "as the stage starts from it", "current": "before each RL step's updates"}[self.weights]
        if (moving := self.follows) is not None:
            after = "each RL step" if moving.refresh_every == 1 else f"every {moving.refresh_every} RL steps"
            weights = f"set to {moving.mixup:g} x policy + {1 - moving.mixup:g} x itself after {after}"
        shown = {
            "trace": "a trace",
            "peer": "another right row of the group",
            "start": "what the row was sampled with",
        }[self.shows]
        return f"the policy, {weights}, shown {shown}"

    def _complaints(self) -> Iterator[str]:
        if self.follows is not None and self.weights == "current":
            yield "follows has no effect with weights: current; remove one of them"
        if self.shows == "start" and self.changed("prompt"):
            yield "prompt has no effect with shows: start, whose prompts are those of the rows; remove it"
        missing = [name for name in ("{problem}", "{trace}") if name not in self.prompt]
        if missing:
            yield f"prompt: {missing[0]} is missing; the teacher needs the problem and its trace"


class ServedTeacher(_Teacher):
    """A model on vLLM servers with the policy's tokenizer, which scores the policy's tokens in its own context. Its
    servers, `execution.rl_teachers.NAME.urls`, are not part of a result's identity: different models must have
    different names."""

    kind: Literal["served"]
    name: str = Field(min_length=1)
    """Its name in requests to the servers."""

    def formula(self) -> str:
        return f"the model {self.name} on servers"


RLTeacher = Annotated[ModelTeacher | SelfTeacher | ServedTeacher, Field(discriminator="kind")]


class OverlongConfig(StrictModel):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), added to the reward of sampled rows: with L =
    `max_response_tokens`, B = `buffer_tokens` and |y| tokens, 0 up to L - B, then penalty x (L - B - |y|) / B.

    Zero variance is that of the sum: groups that are all right may have some. Whole traces keep their reward."""

    buffer_tokens: PositiveInt
    """Length of the interval in which the punishment grows (the paper: 4096 of 20480 tokens)."""
    penalty: PositiveFloat = 1.0
    """Punishment at the length limit."""

    def punishment(self, num_tokens: int, max_tokens: int) -> float:
        """What is added to the reward: from 0 down to `-penalty`."""
        over = min(max(num_tokens - max_tokens + self.buffer_tokens, 0), self.buffer_tokens)
        return -self.penalty * over / self.buffer_tokens if over else 0.0


class CriticConfig(StrictModel):
    """The value model of PPO: separate from the policy, initialised from the policy's weights."""

    optimizer: OptimizerConfig
    value_clip: PositiveFloat | None = 0.2
    """A value may move this far from the one before the update; None: no clip."""
    warmup_steps: NonNegativeInt = 0
    """RL steps at the start in which the critic alone learns."""


class RLConfig(StrictModel):
    """The run-time side of RL: how much, how long, how often. What is learned is in `objective`."""

    seed: NonNegativeInt | None = None
    """Seed of this stage alone (order of prompts, rollouts); None: the experiment's. Lets seeds share data and base."""
    steps: PositiveInt
    """RL steps: each rolls out, grades and updates once. Extendable: a longer run continues a shorter one."""
    prompts_per_step: PositiveInt
    prompts_per_update: PositiveInt | None = None
    """Mini-batch of one optimizer step, in prompts; None: one optimizer step per pass."""
    passes: PositiveInt = 1
    """Passes of an RL step over its groups, with one `pi_old`; later ones repeat the mini-batches in another order."""
    sampling: SamplingConfig = UniformSampling(kind="uniform")
    """Which prompts a step draws."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of rollouts; the trainer divides its logits by the same."""
    max_response_tokens: PositiveInt
    overlong: OverlongConfig | None = None
    """Punishes rollouts that come close to `max_response_tokens`; None: the reward does not depend on the length."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a rollout, besides the stop token (r1_zero: `</answer>`). A rollout is graded up to and including
    the first of them, and learned from up to the token that completes it. A prefix of a trace ends before one."""
    engine: Literal["cluster", "vllm"] = "cluster"
    """Engine of the rollouts. `cluster`: the embedded one in one process, vLLM actors under Ray. `vllm`: with `cluster:
    local`, vLLM in the trainer's process, which takes its weights after every RL step; on a GPU it sleeps while the
    trainer learns, and `execution.vllm.gpu_memory_utilization` is what it may take beside the trainer's states."""
    max_staleness: NonNegativeInt = 0
    """RL steps by which the weights of a rollout may lag; above 0, generation overlaps with training."""
    partial_rollout_tokens: PositiveInt | None = None
    """Partial rollouts (Kimi k1.5, arXiv 2501.12599): tokens that a response may grow by in an RL step, after which the
    next step continues it with its own weights. A step learns from the groups that it completes: in the mean
    `prompts_per_step`, at least one. None: every response ends in its step."""
    correction: ImportanceCorrection | None = None
    """Importance correction for every term that learns only from rollouts and has none of its own: it weighs each token
    by its probability under the trainer relative to the engine, also where that had older weights."""
    optimizer: OptimizerConfig
    critic: CriticConfig | None = None
    """Value function for `objective.advantage.kind: gae` (PPO); None: no critic."""
    reference: MovingReferenceConfig | None = None
    """How the reference of `kl` terms follows the policy; None: it stays the policy that the stage started from."""
    teachers: dict[Name, RLTeacher] = Field(default_factory=dict)
    """They score the policy's tokens for the terms that compare with a teacher, by name. A row has at most one: the
    first whose `rows` holds. Empty: there are no such terms."""
    validation: ValidationConfig | None = None
    """Held-out accuracy while this stage trains; None: it is not measured."""

    @property
    def staleness_bound(self) -> int:
        """RL steps by which the weights of a token may lag behind those that learn from it."""
        steps = math.ceil(self.max_response_tokens / (self.partial_rollout_tokens or self.max_response_tokens))
        return self.max_staleness + steps - 1

    @property
    def updates_per_pass(self) -> int:
        return 1 if self.prompts_per_update is None else self.prompts_per_step // self.prompts_per_update

    @property
    def updates_per_step(self) -> int:
        return self.passes * self.updates_per_pass

    @property
    def following(self) -> dict[str, MovingReferenceConfig]:
        """What follows the policy, by the name of its setting."""
        found = {"rl.reference": self.reference}
        for name, teacher in self.teachers.items():
            found[f"rl.teachers.{name}.follows"] = teacher.follows if isinstance(teacher, SelfTeacher) else None
        return {name: config for name, config in found.items() if config is not None}

    @property
    def teaches_every_row(self) -> bool:
        """Whether no row is without a teacher: the last takes the rest, and always has something to show."""
        last = next(reversed(self.teachers.values()), None)
        return last is not None and last.rows is None and getattr(last, "shows", "trace") == "trace"

    def _complaints(self) -> Iterator[str]:
        for name, teacher in [*self.teachers.items()][:-1]:
            if teacher.rows is None:
                yield f"teachers.{name} takes all rows and leaves none to those after it; give it rows, or move it last"
        if self.overlong is not None and self.overlong.buffer_tokens > self.max_response_tokens:
            yield f"overlong.buffer_tokens is above max_response_tokens {self.max_response_tokens}; lower it"
        if (partial := self.partial_rollout_tokens) is not None and partial >= self.max_response_tokens:
            yield (
                f"partial_rollout_tokens {partial} has no effect with max_response_tokens {self.max_response_tokens}, "
                "which ends every response first; lower it"
            )
        if partial is not None and self.max_staleness:
            yield (
                f"partial_rollout_tokens interrupts rollouts at an update, and max_staleness {self.max_staleness} lets "
                "them run through it; remove one of the two"
            )
        if self.prompts_per_update is not None and self.prompts_per_step % self.prompts_per_update:
            yield (
                f"prompts_per_step {self.prompts_per_step} must be a multiple of "
                f"prompts_per_update {self.prompts_per_update}"
            )
