"""Chains of operations on two-digit numbers modulo 100, with a teacher that writes every step.

`47 a:+8 b:r c:-3 d:*21 =` means (((47 + 8) with its digits reversed) - 3) * 21; each result is taken modulo 100. The
letters let a small policy find the next operation. The teacher may leave operations to a calculator. A prompt depends
only on the settings, the seed and the purpose: lengths, starting numbers and operations are sampled with numpy's PCG64,
whole columns at a time.
"""

import hashlib
import json
import string
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from luffy.config.data import ArithmeticSource, StepStyle
from luffy.data.schema import joined_text, prompt_uid
from luffy.data.sources import from_generator
from luffy.errors import DataError
from luffy.types import Message, Prompt, Trace

AUTHOR = "arithmetic-teacher"
MODULUS = 100
_MAX_ENUMERATED = 1_000_000
"""Spaces up to this size are enumerated to sample distinct prompts; larger ones are sampled with rejection."""

Chains = npt.NDArray[np.uint8]
"""One chain per row: the starting number, then the codes of its operations."""
Chain = list[int]


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a chain."""

    symbol: str
    results: tuple[int, ...]
    """The result for each number from 0 to 99."""


class Mistake(NamedTuple):
    """Where the teacher errs."""

    place: float
    """Relative position in the chain, in [0, 1)."""
    shift: int
    """Added to the result there, modulo 100; 0: the teacher does not err."""


OPERATIONS: tuple[tuple[str, Operation], ...] = (
    *(("add", Operation(f"+{d}", tuple((n + d) % MODULUS for n in range(MODULUS)))) for d in range(1, 10)),
    *(("subtract", Operation(f"-{d}", tuple((n - d) % MODULUS for n in range(MODULUS)))) for d in range(1, 10)),
    ("reverse", Operation("r", tuple(n % 10 * 10 + n // 10 for n in range(MODULUS)))),
    *(("multiply", Operation(f"*{d}", tuple(n * d % MODULUS for n in range(MODULUS)))) for d in range(12, MODULUS)),
)
"""All operations, each with its kind in the configuration; an operation's code is its position."""
_LABELS = string.ascii_lowercase
_TEXT = tuple(f"{number:02d}" for number in range(MODULUS))


def render_question(start: int, operations: Sequence[Operation]) -> str:
    """Return the user's message: `47 a:+8 b:r c:-3 =`."""
    return " ".join((_TEXT[start], *map(_labelled, _LABELS, operations), "="))


def follow(start: int, operations: Sequence[Operation], wrong_at: int = 0, shift: int = 0) -> list[int]:
    """Return the result of every step; `shift` is added to that of step `wrong_at`."""
    found, number = list[int](), start
    for index, operation in enumerate(operations):
        number = (operation.results[number] + (shift if index == wrong_at else 0)) % MODULUS
        found.append(number)
    return found


def render_solution(start: int, operations: Sequence[Operation], results: Sequence[int], style: StepStyle) -> str:
    r"""Return a trace in `style` whose steps come to `results`, right or wrong: the steps inside `<think>`, then a box.

    The steps of `47 a:+8 b:r =` are the starting number and one line per operation: ` a:+8 =55`, ` b:r =55`; as
    equations `47+8=55` and `55r=55`. Checked, each labelled step stands twice.
    """
    lines = [] if style == "equations" else [_TEXT[start]]
    before = start
    for label, operation, result in zip(_LABELS, operations, results, strict=False):
        if style == "equations":
            lines.append(f"{_TEXT[before]}{operation.symbol}={_TEXT[result]}")
        else:
            step = f" {_labelled(label, operation)} ={_TEXT[result]}"
            lines += [step, step] if style == "checked" else [step]
        before = result
    return _thought(lines) + f"\\boxed{{{_TEXT[results[-1]]}}}"


def render_turns(start: int, operations: Sequence[Operation], by_calculator: Set[Operation]) -> list[Message]:
    r"""Return the teacher's turns, which call the calculator for the operations in `by_calculator`, and its answers.

    `47 a:+8 b:*21 c:-3 =` takes two turns: ` a:+8 =55` and a call of `(55*21)%100`, then ` c:-3 =52` and the box.
    """
    turns: list[Message] = []
    number, lines = start, [_TEXT[start]]
    for label, operation in zip(_LABELS, operations, strict=False):
        if operation in by_calculator:
            arguments = {"expression": f"({number}{operation.symbol})%{MODULUS}"}
            call = json.dumps({"name": "calculator", "arguments": arguments})
            number = operation.results[number]
            turns.append(Message("assistant", f"{_thought(lines)}<tool_call>\n{call}\n</tool_call>"))
            turns.append(Message("user", f"<tool_response>\n{number}\n</tool_response>"))
            lines = [_TEXT[number]]
        else:
            number = operation.results[number]
            lines.append(f" {_labelled(label, operation)} ={_TEXT[number]}")
    return [*turns, Message("assistant", f"{_thought(lines)}\\boxed{{{_TEXT[number]}}}")]


def _thought(lines: Sequence[str]) -> str:
    return "<think>" + "\n".join(lines) + "\n</think>"


def _labelled(label: str, operation: Operation) -> str:
    return f"{label}:{operation.symbol}"


@from_generator
def arithmetic_prompts(source: ArithmeticSource, purpose: str, seed: int) -> Iterator[Prompt]:
    """`source.num_prompts` prompts, each with one trace; DataError if there are not that many distinct ones.

    Every length has the same number of prompts, to within one, and exactly its rounded share of stepwise traces.
    """
    rng = _generator(seed, purpose)
    longest, num_codes = max(source.num_operations), len(_weights(source)[0])
    if longest > len(_LABELS):
        raise DataError(
            f"data.{purpose}: num_operations {longest} exceeds the number of letters that label operations; use at "
            f"most {len(_LABELS)}"
        )
    share, remainder = divmod(source.num_prompts, len(source.num_operations))
    quotas: Counter[int] = Counter()
    for index, length in enumerate(sorted(source.num_operations)):
        quotas[length] += share + (index < remainder)
    for length, quota in quotas.items():
        exist = MODULUS * num_codes**length
        if source.unique and quota > exist:
            raise DataError(
                f"data.{purpose}: {quota} distinct prompts with {length} operations requested, {exist} exist; lower "
                "num_prompts, add longer chains to num_operations, or set unique: false"
            )
    sampled: list[tuple[Chain, bool]] = []
    for length, quota in quotas.items():
        chains = _sample_chains(source, length, quota, rng)
        shares = source.stepwise_share
        stepwise_share = shares[length] if isinstance(shares, dict) else shares
        stepwise = rng.permutation(quota) < round(stepwise_share * quota)
        sampled += zip(chains.tolist(), stepwise.tolist(), strict=True)
    order = rng.permutation(len(sampled)).tolist()
    written = [
        (kind, replace(found, symbol=source.reverse_symbol) if kind == "reverse" else found)
        for kind, found in OPERATIONS
    ]
    by_calculator = frozenset(found for kind, found in written if kind in source.by_calculator)
    for index, mistake in zip(order, _mistakes(source, purpose, seed, len(sampled)), strict=True):
        chain, is_stepwise = sampled[index]
        start, operations = chain[0], [written[code][1] for code in chain[1:]]
        messages = (Message("user", render_question(start, operations)),)
        results = follow(start, operations)
        traces: tuple[Trace, ...] = ()
        if mistake is not None and is_stepwise and not by_calculator.isdisjoint(operations):
            turns = tuple(render_turns(start, operations, by_calculator))  # without mistakes
            traces = (Trace(joined_text(turns), AUTHOR, turns=turns),)
        elif mistake is not None:
            given = follow(start, operations, int(mistake.place * len(operations)), mistake.shift)
            if mistake.shift and given[-1] == results[-1]:  # the mistake has cancelled out
                given = follow(start, operations, len(operations) - 1, mistake.shift)
            texts = [f"\\boxed{{{_TEXT[given[-1]]}}}"]
            if is_stepwise:
                texts = [render_solution(start, operations, given, style) for style in source.styles]
            traces = tuple(Trace(text, AUTHOR) for text in texts)
        yield Prompt(
            uid=prompt_uid("arithmetic", messages),
            data_source="arithmetic",
            messages=messages,
            ground_truth=_TEXT[results[-1]],
            traces=traces,
            ability="arithmetic",
            extra_info={"num_operations": len(operations), "style": "stepwise" if is_stepwise else "direct"},
        )


def _mistakes(source: ArithmeticSource, purpose: str, seed: int, count: int) -> list[Mistake | None]:
    """The teacher's mistake in each prompt; None: it gives no answer. Sampled apart, so that prompts stay the same."""
    rng = _generator(seed, f"{purpose}:traces")
    traced = rng.permutation(count)[: round(source.traced_share * count)].tolist()
    place, shift = rng.random(count).tolist(), rng.integers(1, MODULUS, count).tolist()
    found: list[Mistake | None] = [None] * count
    for rank, index in enumerate(rng.permutation(traced).tolist()):
        is_wrong = rank < round(source.wrong_share * len(traced))
        found[index] = Mistake(place[index], shift[index] if is_wrong else 0)
    return found


def _weights(source: ArithmeticSource) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Codes of the operations in use and their probabilities; a kind's frequency is split evenly among its members."""
    members = Counter(kind for kind, _ in OPERATIONS)
    wanted: dict[str, float] = {str(kind): weight for kind, weight in source.operations.items()}
    codes = [code for code, (kind, _) in enumerate(OPERATIONS) if kind in wanted]
    weights = np.array([wanted[OPERATIONS[code][0]] / members[OPERATIONS[code][0]] for code in codes])
    return np.array(codes, dtype=np.uint8), weights / weights.sum()


def _sample_chains(source: ArithmeticSource, length: int, quota: int, rng: np.random.Generator) -> Chains:
    codes, weights = _weights(source)

    def with_replacement(count: int) -> Chains:
        starts = rng.integers(0, MODULUS, size=(count, 1), dtype=np.uint8)
        return np.concatenate([starts, rng.choice(codes, size=(count, length), p=weights)], axis=1)

    if not source.unique:
        return with_replacement(quota)
    if MODULUS * len(codes) ** length <= _MAX_ENUMERATED:
        # Without replacement: the earliest of exponential clocks (Efraimidis-Spirakis).
        index = np.indices((MODULUS, *[len(codes)] * length)).reshape(length + 1, -1)
        rates = np.prod(weights[index[1:]], axis=0)
        chosen = np.argsort(rng.exponential(size=len(rates)) / rates, kind="stable")[:quota]
        return np.concatenate([index[:1, chosen], codes[index[1:, chosen]]]).T.astype(np.uint8)
    distinct = np.zeros((0, length + 1), dtype=np.uint8)
    while len(distinct) < quota:
        found = np.concatenate([distinct, with_replacement(quota + 64)])
        keys = np.ascontiguousarray(found).view(np.dtype((np.void, length + 1))).ravel()
        distinct = found[np.sort(np.unique(keys, return_index=True)[1])]
    return distinct[:quota]


def _generator(seed: int, purpose: str) -> np.random.Generator:
    entropy = hashlib.sha256(f"arithmetic:{seed}:{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(entropy)))
