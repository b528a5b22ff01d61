"""Settings that must not change a result: they are never part of a stage's identity."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from luffy.config.strict import StrictModel


class CheckpointConfig(StrictModel):
    """How much work a kill can cost; every stage resumes from its newest complete checkpoint."""

    base_every: PositiveInt = 200
    """Optimizer steps between checkpoints of `base`."""
    sft_every: PositiveInt = 100
    """Optimizer steps between checkpoints of `sft`."""
    rl_every: PositiveInt = 50
    """RL steps between checkpoints of `rl`; steps behind the newest are replayed from the journal."""
    keep: PositiveInt = 2
    """The newest that stay on disk."""


class ExecutionConfig(StrictModel):
    """How the work is laid out on the machine."""

    micro_batch_tokens: PositiveInt = 16384
    """Padded (or packed) tokens of one forward and backward pass; gradients do not depend on it."""
    packing: bool = False
    """Concatenate sequences into one row instead of padding them."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory (ZeRO 1-3)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logprob_chunk_tokens: PositiveInt = 4096
    """Tokens whose logits exist at the same time."""
    rollout_batch_size: PositiveInt = 256
    """Sequences the embedded engine decodes at once."""
    grader_workers: PositiveInt = 2
    """Grading processes."""
    num_threads: PositiveInt | None = None
    """CPU threads of a stage; None: torch's own choice. It may change the last bits of a float, nothing else."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _effective(self) -> "ExecutionConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer has no effect with zero_stage: 0; use 1, 2 or 3")
        return self


class TrackingConfig(StrictModel):
    """Where numbers go besides `metrics.jsonl`, which is always written."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "luffy"
    samples_every: PositiveInt = 10
    """RL steps between written sample rollouts (`samples.jsonl`)."""
    num_samples: PositiveInt = 4
    """Rollouts written each time."""
