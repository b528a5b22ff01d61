"""Check that the engine and the trainer compute the same policy."""

import logging
from collections.abc import Mapping

from luffy.config.model import DType
from luffy.errors import NumericalError

logger = logging.getLogger(__name__)
_SUSPICIOUS_GAP: Mapping[DType, float] = {"float32": 0.01, "bfloat16": 0.1}
"""In nats. Different kernels differ by about 1e-6 in float32. In bfloat16, those of SmolLM2-135M differ by 0.01 on a
CPU and by 0.03 to 0.05 on an H200 (docs/gpus.md)."""


def suspicious_gap(dtype: DType, max_staleness: int) -> float | None:
    """The mean difference of log-probabilities, in nats, above which kernels do not explain it.

    None with `max_staleness` above 0: then the policy has been updated since the tokens were sampled.
    """
    return _SUSPICIOUS_GAP[dtype] if max_staleness == 0 else None


class LogpGapCheck:
    """Watches the difference of the engine's and the trainer's log-probabilities of the sampled tokens."""

    def __init__(self, bound: float | None, suspicious: float | None) -> None:
        self._bound = bound
        """The stage ends above it; None: never."""
        self._warn_above = suspicious

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warn of a suspicious gap in a step, and again once it has doubled. Raises NumericalError above the bound."""
        gap = metrics.get("rollout/logp_gap_mean")
        if gap is None:
            return
        if self._bound is not None and gap > self._bound:
            raise NumericalError(
                f"rollout/logp_gap_mean is {gap:.4f}, above execution.max_logp_gap {self._bound}: the engine does not "
                "generate with the trainer's weights or temperature"
            )
        if self._warn_above is not None and gap > self._warn_above:
            self._warn_above = 2 * gap
            logger.warning(
                "the engine's log-probabilities differ from the trainer's by %.4f nats per token on average; "
                "the next warning comes at twice that (rollout/logp_gap_mean has every step)",
                gap,
            )
