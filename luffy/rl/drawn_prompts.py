"""The prompts that a step has drawn, and their shares by where they came from."""

from collections import Counter
from collections.abc import Iterable, Sequence

from luffy.types import Group


def fresh_uids(groups: Sequence[Group]) -> list[str]:
    """Uids of a step's prompts that the sampler drew; those of replayed rows are left out."""
    return [group.uid for group in groups if not group.is_replayed]


def drawn_shares(kind: str, names: Iterable[str], counts: Counter[str]) -> dict[str, float]:
    """Metrics: the share of each of `names` among the drawn prompts."""
    total = max(counts.total(), 1)
    return {f"batch/{kind}_{name}_share": counts[name] / total for name in names}
