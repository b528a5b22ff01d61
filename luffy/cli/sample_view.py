"""Samples of a stage as a person reads them: the rollouts of RL, or the responses of an evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from luffy.errors import ConfigError, DataError
from luffy.pipeline.chain.graph import nodes_providing, nodes_showing
from luffy.pipeline.chain.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.workspace.records import RunRecord
from luffy.types import Source

SAMPLES_FILE = "samples.jsonl"
JOURNAL = "journal"
HINT_COLUMNS = ("hint_level", "hint")
"""Columns that journals of older runs lack."""
_COLUMNS = ["uid", "prompt_ids", "response_ids", "source", "reward", "outcome", "context_starts", *HINT_COLUMNS]


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One response."""

    heading: str
    """Its origin and its grade."""
    prompt: str
    response: str
    reward: float


@dataclass(frozen=True, slots=True)
class RewardRange:
    """A range of rewards, bounds included."""

    low: float = float("-inf")
    high: float = float("inf")

    def __contains__(self, reward: float) -> bool:
        return self.low <= reward <= self.high


def read_range(text: str) -> RewardRange:
    """`0..0.5`, `..0.5`, `0.5..` or `1`; ConfigError for anything else."""
    low, dots, high = text.partition("..")
    try:
        first = float(low) if low else float("-inf")
        last = (float(high) if high else float("inf")) if dots else first
    except ValueError:
        raise ConfigError(f"--reward {text}: give a number or a range, e.g. 1 or 0..0.5") from None
    if not first <= last or not text.strip("."):  # nan is in no order
        raise ConfigError(f"--reward {text}: the range is empty; give it as LOW..HIGH")
    return RewardRange(first, last)


def samples_of(record: RunRecord, stage: str | None, wanted: RewardRange, count: int) -> list[ShownSample]:
    """`count` samples at most whose reward is `wanted`, of RL the newest first; confidential ones are left out.

    `stage` is a node of the run; None: RL, else the last evaluation. Raises DataError without samples.
    """
    with_samples = nodes_providing("evaluation", record.stages) + nodes_showing("rollout_samples", record.stages)
    node = stage or next(reversed(with_samples), None)
    if node is None or node not in record.stages:
        asked = f"--stage {stage}: no such stage" if stage else "no stage with samples"
        raise DataError(f"{record.name}: {asked}; there are {', '.join(record.stages) or 'none'}")
    directory = record.stages[node].directory
    return list(islice((sample for sample in _read(directory, node) if sample.reward in wanted), count))


def _read(directory: Path, node: str) -> Iterator[ShownSample]:
    if (directory / JOURNAL).is_dir():
        return _journalled(directory)
    if nodes_showing("training_curves", [node]):
        return _logged(directory / SAMPLES_FILE)
    return _responses(directory)


def _journalled(directory: Path) -> Iterator[ShownSample]:
    """All rollouts of an RL stage, decoded; a demonstration is one whose tokens are."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer  # without transformers, which loads for seconds

    from luffy.data.parquet import confidential_uids
    from luffy.environments.transcript import transcript

    job = read_job(directory / JOB_FILE)
    inputs = inputs_of(job, directory)
    hidden = confidential_uids(inputs["data"] / "train.parquet")
    tokenizer = Tokenizer.from_file(str(inputs["model"] / "model" / "tokenizer.json"))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    for file in sorted((directory / JOURNAL).glob("step_*.parquet"), reverse=True):
        step = int(file.stem.removeprefix("step_"))
        for row in pq.read_table(file, columns=columns_in(file, _COLUMNS)).to_pylist():
            if row["uid"] in hidden:
                continue
            origin = origin_of(row["source"], row.get("hint_level"))
            yield ShownSample(
                f"step {step}, {origin}, reward {row['reward']:g} ({row['outcome']}), {row['uid']}",
                tokenizer.decode(row["prompt_ids"], skip_special_tokens=False) + _shown_hint(row.get("hint")),
                transcript(
                    row["response_ids"], row["source"], decode, row["prompt_ids"], row.get("context_starts") or ()
                ),
                row["reward"],
            )


def _logged(file: Path) -> Iterator[ShownSample]:
    from luffy.tracking.tracker import read_samples

    if not file.is_file():
        raise DataError(f"{file.parent}: has no {file.name}; give --stage rl or an evaluation")
    for step, row in reversed(list(read_samples(file))):
        hint = "" if row.hint_level is None else f", hint of level {row.hint_level}"
        heading = f"step {step}, {row.source}{hint}, reward {row.reward:g} ({row.outcome}), {row.uid}"
        yield ShownSample(heading, row.prompt, row.response, row.reward)


def _responses(directory: Path) -> Iterator[ShownSample]:
    from luffy.evaluation.sample_files import find_samples, read_samples_of

    folders = [folder for folder in (directory, *sorted(directory.glob("step_*"))) if find_samples(folder)]
    if not folders:
        raise DataError(f"{directory}: has no graded responses; give --stage rl or an evaluation")
    for folder in folders:
        for record in read_samples_of(folder):
            if not record.may_be_shown:
                continue
            where = f"{record.suite}, {record.decoding}, {record.uid} #{record.sample}"
            verdict = f"{record.outcome}: answer {record.answer!r}, reference {record.ground_truth!r}"
            yield ShownSample(f"{where}, {verdict}", record.prompt, record.response, float(record.correct))


def columns_in(file: Path, wanted: Sequence[str]) -> list[str]:
    """The `wanted` columns that a journal's file has."""
    import pyarrow.parquet as pq

    return [name for name in wanted if name in pq.read_schema(file).names]


def _shown_hint(hint: str | None) -> str:
    return "" if not hint else f"\n--- hint while sampling ---\n{hint}\n"


def origin_of(sources: Sequence[int], hint_level: int | None = None) -> str:
    """Who wrote a response, by the sources of its tokens, and the level of the hint that it was sampled with."""
    kinds = set(sources) - {Source.ENVIRONMENT}
    if hint_level is not None:
        learned = "without the hint" if Source.HINTED in kinds else "with the hint"
        return f"rollout with a hint of level {hint_level}, learned {learned}"
    if Source.REPLAY in kinds:
        return "replayed rollout"
    if kinds <= {Source.ON_POLICY}:
        return "rollout"
    return "rollout after a demonstration's prefix" if Source.ON_POLICY in kinds else "demonstration"
