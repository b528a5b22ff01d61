"""Generation by the ranks of supervised training, which have no separate engine."""

from collections.abc import Sequence

from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.rank_calls import Ranks
from luffy.training.supervised import SupervisedRank


class RanksEngine:
    """Generates with the policy in training, as it is after `step` optimizer steps; each rank answers its share."""

    def __init__(self, ranks: Ranks[SupervisedRank], batch_size: int, step: int) -> None:
        self._ranks = ranks
        self._batch_size = batch_size
        self._step = step

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""
        number = self._ranks.num_ranks
        shares = [(list(requests[rank::number]), params, self._batch_size, self._step) for rank in range(number)]
        answered = [iter(share) for share in self._ranks.call(_generate_on_rank, shares)]
        return [next(answered[place % number]) for place in range(len(requests))]

    def close(self) -> None:
        """Nothing to free: the policy belongs to the ranks."""


def _generate_on_rank(
    rank: SupervisedRank, requests: list[RolloutRequest], params: SamplingParams, batch_size: int, step: int
) -> list[Completion]:
    with rank.policy.inference_model() as model:
        return TransformersEngine(model, batch_size, step).generate(requests, params)
