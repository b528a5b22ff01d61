"""The reference of KL terms, where it does not stay the policy that the stage started from: `rl.reference`."""

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from luffy.config.strict import StrictModel


class MovingReferenceConfig(StrictModel):
    """A reference that follows the policy (TRL's `sync_ref_model`, after TR-DPO, arXiv 2404.09656).

    After every `refresh_every`-th RL step, reference <- mixup x policy + (1 - mixup) x reference, weight by weight.
    """

    refresh_every: PositiveInt
    """RL steps from one refresh to the next (TRL's `ref_model_sync_steps` counts optimizer steps)."""
    mixup: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the policy (TRL's `ref_model_mixup_alpha`). 1: the reference becomes a copy of the policy. Below 1: an
    exponential moving average whose decay is 1 - mixup."""

    @model_validator(mode="after")
    def _lags(self) -> "MovingReferenceConfig":
        if self.refresh_every == 1 and self.mixup == 1:
            raise ValueError(
                "refresh_every: 1 with mixup: 1 makes the reference the policy before each RL step; use a kl term "
                "with against: old, raise refresh_every, or lower mixup"
            )
        return self
