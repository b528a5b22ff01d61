"""A reference that follows the policy in training: refreshed every few RL steps, or a moving average of its weights.

Shape legend: `B` rows, `T` tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from luffy.config.rl_reference import MovingReferenceConfig
from luffy.training.frozen_policy import FrozenPolicy
from luffy.training.policy import Policy
from luffy.types import TrainBatch


class MovingReference:
    """A frozen copy of the policy that is refreshed after every `refresh_every`-th RL step.

    Whole on each rank at any ZeRO stage, as the frozen policy that it takes over has to be. An average is kept in
    float32, in CPU memory: in bfloat16 a small share of the policy would be rounded away.
    """

    def __init__(self, policy: Policy, initial: FrozenPolicy, config: MovingReferenceConfig) -> None:
        assert policy.adapter is None
        self._policy, self._reference, self._config = policy, initial, config
        self._parameters = {name: parameter.detach() for name, parameter in initial.causal_lm.named_parameters()}
        self._averages = {} if config.mixup == 1 else {n: p.float().cpu().clone() for n, p in self._parameters.items()}

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere."""
        return self._reference.logprobs(batch)

    def follow(self, step: int) -> None:
        """Refresh the reference if RL step `step`, whose updates are done, is one after which it is due.

        A collective call: under ZeRO 3 the policy's weights are gathered one by one.
        """
        if step % self._config.refresh_every:
            return
        share = self._config.mixup
        for name, weight in self._policy.weights():
            if self._averages:
                weight = self._averages[name].mul_(1 - share).add_(weight.float(), alpha=share)
            self._parameters[name].copy_(weight)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds: tensors that it may also be read into; call `publish` after that."""
        return self._averages or self._parameters

    def publish(self) -> None:
        """Give the model the averages that were read from a checkpoint."""
        with torch.no_grad():
            for name, average in self._averages.items():
                self._parameters[name].copy_(average)
