"""Samples of a stage as a person reads them, and the history of one prompt over the RL steps that drew it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
from tokenizers import Tokenizer  # without transformers, which loads for seconds

from luffy.data.parquet import shown_references
from luffy.environments.transcript import transcript
from luffy.errors import ConfigError, DataError
from luffy.evaluation.sample_files import find_samples, read_samples_of
from luffy.pipeline.graph import providing, showing
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.records import RunRecord
from luffy.tracking.tracker import SAMPLES_FILE, read_samples
from luffy.types import FinishReason, Source

JOURNAL = "journal"
HISTORY_HEADER = ("step", "rows", "source", "reward", "tokens", "cut", "outcomes")
_COLUMNS = [
    "uid", "prompt_ids", "response_ids", "source", "reward", "outcome", "context_starts", "start", "dose", "hint",
]  # fmt: skip
_HISTORY_COLUMNS = ["uid", "source", "reward", "outcome", "finish_reason", "displaced", "hint"]
_NAMED = 3
"""Uids that a message names."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One response."""

    heading: str
    """Its origin and its grade."""
    prompt: str
    response: str
    reward: float
    reference: str = ""
    """The reference answer; empty where it is not known."""


def read_range(text: str) -> tuple[float, float]:
    """The lowest and the highest of `0..0.5`, `..0.5`, `0.5..` or `1`; ConfigError for anything else."""
    low, dots, high = text.partition("..")
    try:
        first = float(low or "-inf")
        last = float(high or "inf") if dots else first
    except ValueError:
        raise ConfigError(f"--reward {text}: give a number or a range, e.g. 1 or 0..0.5") from None
    if not first <= last or not text.strip("."):  # nan is in no order
        raise ConfigError(f"--reward {text}: the range is empty; give it as LOW..HIGH")
    return first, last


def samples_of(record: RunRecord, stage: str | None, wanted: tuple[float, float], count: int) -> list[ShownSample]:
    """`count` samples at most with a reward within `wanted`, of RL the newest first; confidential ones are left out.

    `stage` is a node of the run; None: RL, else the last evaluation. Raises DataError without samples.
    """
    low, high = wanted
    with_samples = providing("evaluation", record.kinds) + showing("rollout_samples", record.kinds)
    node = stage or next(reversed(with_samples), None)
    if node is None or node not in record.stages:
        asked = f"--stage {stage}: no such stage" if stage else "no stage with samples"
        raise DataError(f"{record.name}: {asked}; there are {', '.join(record.stages) or 'none'}")
    directory = record.stages[node].directory
    if (directory / JOURNAL).is_dir():
        found = _journalled(directory)
    elif showing("training_curves", {node: record.kinds[node]}):
        found = _logged(directory / SAMPLES_FILE)
    else:
        found = _responses(directory)
    return list(islice((sample for sample in found if low <= sample.reward <= high), count))


def _journalled(directory: Path) -> Iterator[ShownSample]:
    """All rollouts of an RL stage, decoded; a demonstration is one whose tokens are."""
    job = read_job(directory / JOB_FILE)
    inputs = inputs_of(job, directory)
    references = shown_references(inputs["data"] / "train.parquet")
    tokenizer = Tokenizer.from_file(str(inputs["model"] / "model" / "tokenizer.json"))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    for file in sorted((directory / JOURNAL).glob("step_*.parquet"), reverse=True):
        step = int(file.stem.removeprefix("step_"))
        for row in pq.read_table(file, columns=columns_in(file, _COLUMNS)).to_pylist():
            if (reference := references.get(row["uid"], "")) is None:
                continue
            hint = row.get("hint")
            origin = origin_of(row["source"], hint is not None) + given(row.get("start"), row.get("dose"))
            heading = f"step {step}, {origin}, reward {row['reward']:g} ({row['outcome']}), {row['uid']}"
            prompt = decode(row["prompt_ids"]) + (f"\n--- hint while sampling ---\n{hint}\n" if hint else "")
            starts = row.get("context_starts") or ()
            response = transcript(row["response_ids"], row["source"], decode, row["prompt_ids"], starts)
            yield ShownSample(heading, prompt, response, row["reward"], reference)


def _logged(file: Path) -> Iterator[ShownSample]:
    if not file.is_file():
        advice = "give --stage rl or an evaluation of a finished run"
        raise DataError(f"{file.parent}: has no {file.name}, or none yet; {advice}")
    for step, row in reversed(list(read_samples(file))):
        origin = f"{row.source}{given(row.start, row.dose)}"
        heading = f"step {step}, {origin}, reward {row.reward:g} ({row.outcome}), {row.uid}"
        yield ShownSample(heading, row.prompt, row.response, row.reward, row.reference)


def _responses(directory: Path) -> Iterator[ShownSample]:
    folders = [folder for folder in (directory, *sorted(directory.glob("step_*"))) if find_samples(folder)]
    if not folders:
        raise DataError(f"{directory}: has no graded responses; give --stage rl or an evaluation")
    for folder in folders:
        for record in read_samples_of(folder):
            if not record.may_be_shown:
                continue
            where = f"{record.suite}, {record.decoding}, {record.uid} #{record.sample}"
            heading, reward = f"{where}, {record.outcome}: answer {record.answer!r}", float(record.correct)
            yield ShownSample(heading, record.prompt, record.response, reward, record.ground_truth)


def columns_in(file: Path, wanted: Sequence[str]) -> list[str]:
    """The `wanted` columns that a journal's file has; older ones lack those of hints."""
    return [name for name in wanted if name in pq.read_schema(file).names]


def given(start: str | None, dose: float | None) -> str:
    """What a response was given, behind what is said of it; empty: nothing, or a share of 0."""
    if start is None or dose == 0:
        return ""
    return f", {start}" + (f" {dose:.2g}" if dose is not None else "")


def origin_of(sources: Sequence[int], is_hinted: bool = False) -> str:
    """Who wrote a response, by the sources of its tokens, and whether its prompt had a hint, as a critique is called
    here, too."""
    kinds = set(sources) - {Source.ENVIRONMENT}
    if is_hinted:
        return f"rollout with a hint, learned {'without' if Source.HINTED in kinds else 'with'} it"
    if Source.REPLAY in kinds:
        return "replayed rollout"
    if kinds <= {Source.ON_POLICY}:
        return "rollout"
    return "rollout after a demonstration's prefix" if Source.ON_POLICY in kinds else "demonstration"


def prompt_history(record: RunRecord, uid: str) -> tuple[str, list[list[str]]]:
    """The prompt's whole uid, and a row for each step and kind of response; no text is read.

    `uid` may be the beginning of one. Raises DataError without a journal, and ConfigError where no step, or more than
    one prompt, fits.
    """
    folders = (entry.directory / JOURNAL for entry in record.stages.values())
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        raise DataError(f"{record.name}: no stage has a rollout journal; --prompt reads that of rl")
    files = sorted(folder.glob("step_*.parquet"))
    known = {found for file in files for found in pq.read_table(file, columns=["uid"])["uid"].to_pylist()}
    fitting = [uid] if uid in known else sorted(found for found in known if found.startswith(uid))
    if len(fitting) != 1:
        named = ", ".join(fitting[:_NAMED])
        found = f"{len(fitting)} uids start with it ({named}, ...)" if fitting else "no step has drawn such a prompt"
        raise ConfigError(f"--prompt {uid}: {found}; --samples shows uids, and so does train.parquet")
    return fitting[0], [line for file in files for line in _lines(file, fitting[0])]


def _lines(file: Path, uid: str) -> Iterator[list[str]]:
    """A line for each kind of response to the prompt in a step, in the order of their first rows."""
    kinds: dict[str, list[dict]] = {}
    columns = columns_in(file, _HISTORY_COLUMNS)
    found = pq.read_table(file, columns=columns, filters=[("uid", "==", uid)]).to_pylist()
    in_place = "a demonstration" if all(row.get("hint") is None for row in found) else "one with a hint"
    for row in found:
        is_own = row.get("hint") is None and Source.OFF_POLICY not in row["source"]
        left_out = f", replaced by {in_place}" if is_own else ", not needed"
        if row["finish_reason"] == FinishReason.ENVIRONMENT_ERROR:
            left_out = ", crashed"
        name = origin_of(row["source"], row.get("hint") is not None) + (left_out if row["displaced"] else "")
        kinds.setdefault(name, []).append(row)
    for name, rows in kinds.items():
        outcomes = Counter(row["outcome"] for row in rows)
        lengths = [len(row["source"]) - row["source"].count(Source.ENVIRONMENT) for row in rows]
        yield [
            str(int(file.stem.removeprefix("step_"))),
            str(len(rows)),
            name,
            f"{fmean(row['reward'] for row in rows):.3g}",
            f"{fmean(lengths):.4g}",
            str(sum(row["finish_reason"] != "stop" for row in rows)),
            ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items()),
        ]
