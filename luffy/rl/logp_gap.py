"""Check that the engine and the trainer compute the same policy."""

import logging
from collections.abc import Mapping

from luffy.errors import NumericalError

logger = logging.getLogger(__name__)
SUSPICIOUS_GAP = 0.01
"""In nats. Different kernels differ by about 1e-3 in bfloat16 and 1e-6 in float32; stale weights by more."""


def check_logp_gap(metrics: Mapping[str, float], bound: float | None, max_staleness: int) -> None:
    """Warn when the engine's and the trainer's log-probabilities of the sampled tokens differ on average.

    Raises NumericalError above `bound`. With `max_staleness` above 0 the policy has been updated since the tokens
    were sampled, so only the bound applies.
    """
    gap = metrics.get("rollout/logp_gap_mean")
    if gap is None:
        return
    if bound is not None and gap > bound:
        raise NumericalError(
            f"rollout/logp_gap_mean is {gap:.4f}, above execution.max_logp_gap {bound}: the engine does not "
            "generate with the trainer's weights or temperature"
        )
    if gap > SUSPICIOUS_GAP and max_staleness == 0:
        logger.warning(
            "the engine's log-probabilities differ from the trainer's by %.4f nats per token on average", gap
        )
