"""Optimisation settings of the stages that train: `base`, `sft` and `rl`."""

import math
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from luffy.config.draws import SamplingConfig, UniformSampling
from luffy.config.evaluation import StopText
from luffy.config.objective import (
    ImportanceCorrection,
    NegativeLogLikelihoodLoss,
    NormaliserConfig,
    SupervisedObjectiveConfig,
    TermConfig,
)
from luffy.config.rl_reference import MovingReferenceConfig
from luffy.config.rl_teacher import RLTeacher
from luffy.config.strict import StrictModel, is_none, without_unused
from luffy.config.validation import ValidationConfig

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
_UNUSED: dict[str, object] = {"passes": 1, "sampling": {"kind": "uniform"}, "stop": []}
"""Fields of `rl` that older runs did not have."""


class ScheduleConfig(StrictModel):
    """Learning-rate multiplier over the optimizer steps of a stage."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_share: Share = 0.0
    """Share of all steps over which the rate climbs linearly from 0."""
    final_share: Share = 0.0
    """Share of the peak rate that is left at the last step."""

    @model_validator(mode="after")
    def _effective(self) -> "ScheduleConfig":
        if self.kind == "constant" and self.final_share:
            raise ValueError("final_share has no effect with kind: constant; remove it")
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate at a step changes when the stage is made longer."""
        return self.kind != "constant" or self.warmup_share > 0


class OptimizerConfig(StrictModel):
    """AdamW."""

    lr: PositiveFloat
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    skip_grad_norm: PositiveFloat | None = None
    """Gradients whose norm is above this before clipping make no update; None: every gradient does."""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _effective(self) -> "OptimizerConfig":
        if self.skip_grad_norm is not None and self.skip_grad_norm <= self.max_grad_norm:
            raise ValueError(
                f"skip_grad_norm {self.skip_grad_norm:g} must be above max_grad_norm {self.max_grad_norm:g}: "
                "nothing would ever be clipped"
            )
        return self


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
    max_tokens: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """End before `epochs` or `steps`, after the step at which the response tokens learned from reach this number; None:
    no such limit."""
    batch_size: PositiveInt
    """Traces per optimizer step."""
    optimizer: OptimizerConfig
    validation: ValidationConfig | None = Field(default=None, exclude_if=is_none)
    """Held-out accuracy while this stage trains; None: it is not measured."""
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

    @model_validator(mode="after")
    def _one_length(self) -> "SFTConfig":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps; the other one is null")
        return self

    @model_validator(mode="after")
    def _untempered(self) -> "SFTConfig":
        for term in self.objective.terms:
            if isinstance(term.loss, NegativeLogLikelihoodLoss) and term.loss.temperature == "rollout":
                raise ValueError(f"term {term.name!r}: temperature: rollout has no effect without rollouts; remove it")
        return self

    def num_steps(self, num_traces: int) -> int:
        """Optimizer steps on that many traces."""
        if self.epochs is not None:
            return math.ceil(self.epochs * num_traces / self.batch_size)
        assert self.steps is not None
        return self.steps


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
    max_tokens: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """End before `steps`, after the step at which the tokens sampled and the response tokens learned from, together,
    reach this number; None: no such limit."""
    prompts_per_step: PositiveInt
    prompts_per_update: PositiveInt | None = None
    """Mini-batch of one optimizer step, in prompts; None: one optimizer step per pass."""
    passes: PositiveInt = 1
    """Number of passes of an RL step's optimizer steps over its groups; `pi_old` is the policy before the first of them
    in all passes. Later passes repeat the mini-batches of the first one, each in another order."""
    sampling: SamplingConfig = UniformSampling(kind="uniform")
    """Which prompts a step draws."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of rollouts; the trainer divides its logits by the same."""
    max_response_tokens: PositiveInt
    stop: tuple[StopText, ...] = ()
    """Texts that end a rollout, besides the stop token (r1_zero: `</answer>`). A rollout is graded up to and including
    the first of them, and learned from up to the token that completes it. Traces are taken as they are, but a prefix
    ends before a stop text."""
    engine: Literal["cluster", "vllm", "openai"] = "cluster"
    """Engine of the rollouts. `cluster`: the cluster's own, which is the embedded one in one process, and vLLM actors
    under Ray. `vllm`: with `cluster: local` and without a GPU, vLLM in the trainer's process, which takes its weights
    after every RL step. `openai`: the vLLM servers of `execution.server`, which take them from a folder in the stage's
    directory."""
    max_staleness: NonNegativeInt = 0
    """RL steps by which the weights of a rollout may lag; above 0, generation overlaps with training."""
    correction: ImportanceCorrection | None = None
    """Importance correction for every term of the method that learns only from rollouts and has none of its own: it
    weighs each token by its probability under the trainer relative to the engine. It corrects for `max_staleness` above
    0."""
    optimizer: OptimizerConfig
    critic: CriticConfig | None = None
    """Value function for `objective.advantage.kind: gae` (PPO); None: no critic."""
    reference: MovingReferenceConfig | None = Field(default=None, exclude_if=is_none)
    """How the reference of `kl` terms follows the policy; None: it stays the policy that the stage started from."""
    teacher: RLTeacher | None = Field(default=None, exclude_if=is_none)
    """Scores the policy's tokens for terms with `loss.kind: distillation`; None: there are no such terms."""
    validation: ValidationConfig | None = Field(default=None, exclude_if=is_none)
    """Held-out accuracy while this stage trains; None: it is not measured."""

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        return without_unused(dump(self), _UNUSED, info.context)

    @property
    def updates_per_pass(self) -> int:
        """Mini-batches of an RL step."""
        return 1 if self.prompts_per_update is None else self.prompts_per_step // self.prompts_per_update

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps an RL step makes."""
        return self.passes * self.updates_per_pass

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> "RLConfig":
        if self.prompts_per_update is not None and self.prompts_per_step % self.prompts_per_update:
            raise ValueError(
                f"prompts_per_step {self.prompts_per_step} must be a multiple of "
                f"prompts_per_update {self.prompts_per_update}"
            )
        return self
