"""What a token of each term weighs, relative to an on-policy token: ours by the engine, the authors' by their code.

Rows are of equal length; losses are weights times the formula of the term, before advantages, ratios and weights such
as e^-H. The authors' numbers are computed from what their code does with the rows of one rank and update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luffy.objectives.objective import token_weights
from luffy.objectives.schedules import objective_at
from reference.gradient_case import objective_of
from reference.token_cases import Row, alone, demonstration, row_batch

LENGTH, PROMPT = 2800, 150
"""Tokens of a response and of a prompt."""
ROWS, LIMIT, MICRO_BATCH_TOKENS = 64, 8192, 32768
"""Rows of a rank and update, the length limit, and the bound on a micro-batch, where a script has no others."""
_SHORT = 10
"""Tokens of a response in our batch: with rows of equal length the weights do not depend on it."""


@dataclass(frozen=True)
class Weight:
    """A term's token against an on-policy token of the same step."""

    preset: str
    term: str
    ours: float
    authors: float


# ---- the authors': LUFFY's code and its descendants ----


def summed(coefficient: float) -> float:
    """Summed over rows and divided by the length limit, as their policy term."""
    return coefficient


def mean_a_micro_batch(coefficient: float, share: float = 1.0, *, rows: int = ROWS, limit: int = LIMIT) -> float:
    """A token mean over a share of the rows, added once a micro-batch, beside a policy token's 1 / limit."""
    micro_batches = math.ceil(rows * (PROMPT + LENGTH) / MICRO_BATCH_TOKENS)
    return coefficient * micro_batches / (share * rows * LENGTH) * limit


def own_means(coefficient: float, num_rows: float, policy_coefficient: float, policy_rows: float) -> float:
    """Token means of two kinds of rows, each with its coefficient (CHORD, UFT)."""
    return coefficient / num_rows / (policy_coefficient / policy_rows)


_ENTROPY = mean_a_micro_batch(0.001)
_SWITCHED = 1 / (8 + 1)
"""Share of HPT's rows that are demonstrations where half of the prompts are switched: of 8 + 1 rows, one."""
AUTHORS = {
    ("luffy", "off_policy"): summed(1.0),
    ("luffy", "entropy"): _ENTROPY,
    ("luffy_no_shaping", "off_policy"): summed(1.0),
    ("luffy_no_shaping", "entropy"): _ENTROPY,
    ("luffy_prefix", "off_policy"): summed(1.0),
    ("luffy_prefix", "entropy"): _ENTROPY,
    ("on_policy", "entropy"): _ENTROPY,
    ("rl_sft_loss", "sft"): mean_a_micro_batch(1.0, 1 / 8),
    ("rl_sft_loss", "entropy"): _ENTROPY,
    ("rl_plus", "off_policy"): summed(1.0),
    ("rl_plus", "entropy"): _ENTROPY,
    ("exgrpo", "replayed"): summed(1.0),
    ("exgrpo", "entropy"): _ENTROPY,
    ("hpt", "sft"): mean_a_micro_batch(1.0, _SWITCHED),
    ("hpt", "entropy"): _ENTROPY,
    ("srft", "sft"): mean_a_micro_batch(0.5, 1 / 8),
    ("srft", "off_policy"): summed(1.0),
    ("srft", "right"): summed(0.1),
    ("chord", "sft"): own_means(0.1, 1, 0.9, 4),
    ("guide", "hinted"): 1.0,
    ("critique_grpo", "refined"): summed(1.0),
    ("critique_grpo", "entropy"): mean_a_micro_batch(0.001, limit=6144),
    ("trapo", "prefix"): summed(1.0),
    ("trapo", "entropy"): mean_a_micro_batch(0.001, rows=8),
    ("ampo", "off_policy"): summed(1.0),
    # As its policy term, a micro-batch's mean is weighed by its share of the rows.
    ("ampo", "entropy"): 0.001 / (18432 / (PROMPT + LENGTH) * LENGTH) * LIMIT,
    ("uft", "hint"): own_means(0.001, 1, 1.0, 1),
    ("uft", "kl"): 0.001,
}
"""By preset and term; SRFT's are the re-implementation's, published with HPT."""
_ON_POLICY = {"srft": "wrong"}
"""The term whose tokens weigh 1; `on_policy` in all others."""


# ---- ours ----


def _rows(preset: str) -> list[Row]:
    """Eight groups of eight rows: of those methods that replay or switch prompts, four do."""
    rollout, whole = Row(_SHORT, accuracy=0.5), demonstration(_SHORT, accuracy=0.5)
    right = Row(_SHORT, correct=True, accuracy=0.5)
    mixed = [right, *[rollout] * 6, whole]
    switched = [*[Row(_SHORT)] * 7, demonstration(_SHORT)]
    half = Row(_SHORT, guided=_SHORT // 2, accuracy=0.5)
    groups = {
        "on_policy": [[rollout] * 8] * 8,
        "luffy_prefix": [[*[rollout] * 7, half]] * 8,
        "trapo": [[*[rollout] * 4, *[half] * 4]] * 8,
        "uft": [[half] * 8] * 8,
        "hpt": [[rollout] * 8, switched] * 4,
        "exgrpo": [[rollout] * 8, mixed] * 4,
    }.get(preset, [mixed] * 8)
    return [row for group in groups for row in group]


def ours(preset: str) -> dict[str, float]:
    """The terms of a preset by name, each token's weight against that of an on-policy token."""
    objective = objective_of(preset)
    assert objective is not None
    step = objective_at(objective.terms, 1, 1, _SHORT)
    weight_KBT = token_weights(step, row_batch(_rows(preset)), alone)
    largest = {term.name: float(weight_KBT[k].abs().max()) for k, term in enumerate(step.terms)}
    return {name: weight / largest[_ON_POLICY.get(preset, "on_policy")] for name, weight in largest.items()}


def weights() -> list[Weight]:
    """Every term for which a preset claims a conversion."""
    return [Weight(preset, term, ours(preset)[term], authors) for (preset, term), authors in AUTHORS.items()]


def table(rows: Sequence[Weight]) -> str:
    """As Markdown."""
    lines = ["| preset | term | ours | authors' | ours / authors' |", "|---|---|---|---|---|"]
    for row in rows:
        numbers = [f"{value:.2g}" for value in (row.ours, row.authors, row.ours / row.authors)]
        lines.append(f"| `{row.preset}` | `{row.term}` | {' | '.join(numbers)} |")
    return "\n".join(lines)
