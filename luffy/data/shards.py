"""Filtering a source of any size: it is cut into shards, which any number of processes filter in any order.

    filter_source(source, job, folder, num_workers=8, grader=grader)

A shard is 16,384 short rows or 8 MB of text, independent of the number of processes. Its files in `folder`:

    00007.parquet               the rows that passed, in `luffy.data.schema.SCHEMA`
    00007.npz                   lengths, keys of problems, answers and traces of the rows that passed, and sketches
    00007.json                  the statistics, written last: a shard that has them is finished
    inputs.txt                  what the shards were made from

A stage that was killed keeps the finished shards and continues with the others. The reading process holds one shard
more than there are workers; a worker holds one.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from luffy.confidential import may_show_prompt
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig, reward_models
from luffy.data.overlap import NUM_HASHES, signature
from luffy.data.parquet import chunked, text_size, write_prompts
from luffy.data.row_filters import (
    FAILS,
    TEXT_ALONE,
    FilteredRow,
    Gold,
    RowFilter,
    with_instructions,
    with_system_prompt,
    without_system,
)
from luffy.data.schema import problem_key, problem_text
from luffy.data.sources import QuarantinedRow, Row, TraceSource
from luffy.errors import DataError, LostError
from luffy.files import replacing, write_atomic
from luffy.grading.pool import GraderPool
from luffy.processes import die_with
from luffy.types import Prompt

_SHOWN_CHARACTERS = 2000
"""Length of the end of a rejected trace that `quarantine.jsonl` shows: its answer, and how it got there."""
_INPUTS = "inputs.txt"
"""File beside the shards that records their inputs and settings."""

Shard = tuple[int, list[Row]]
"""A number from 0, and the rows."""


@dataclass(frozen=True, slots=True)
class FilterJob:
    """What a worker needs to filter the shards of one source."""

    name: str
    """The source's name, as on the card."""
    filter: RowFilter
    remove_system: bool
    system_prompt: str | None
    instructions: Mapping[str | None, str]
    """Instructions of the environment, for the system message, by data source; those under None are for all others."""
    grading: GradingConfig
    judge_cache: Path
    """Folder of the judge's verdicts, shared by all processes."""
    inputs: str = ""
    """The inputs of all sources of the stage (`TraceSource.inputs`) as text, benchmarks and the texts from which a
    tokenizer is built included, since the result depends on all of them."""


ALL_REJECTED, NONE_GIVEN, OWN_SYSTEM = "all_traces_rejected", "no_trace_given", "own_system_prompt"
MAX_SAMPLES = 5
"""Number of rejected rows and traces of a source that `quarantine.jsonl` shows for each reason."""
_MOST_QUARANTINED = 1000
"""Malformed rows of a source that `quarantine.jsonl` shows: 4 kB of parquet may hold 300,000 of them."""
_QUARANTINED_SIZE = 1000
"""What one takes of a shard, in characters."""


@dataclass(slots=True)
class ShardStatistics:
    """What happened to the rows of a shard, or of a whole source."""

    rows_in: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_traces: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    """Tokens of the longest prompt, and of the longest trace, that were rejected for their length, by the reason."""
    outcomes: Counter[str] = field(default_factory=Counter)
    authors: Counter[str] = field(default_factory=Counter)
    """Traces that passed; `data_sources`: rows that passed."""
    data_sources: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    """Rows without a trace, by why, and those whose own system prompt stands in place of `data.system_prompt`."""
    malformed: Counter[str] = field(default_factory=Counter)
    """Malformed rows by the field at fault."""
    quarantined: list[dict[str, object]] = field(default_factory=list)
    """The first thousand of them."""
    samples: list[dict[str, object]] = field(default_factory=list)
    hits: list[dict[str, object]] = field(default_factory=list)
    golds: Counter[str] = field(default_factory=Counter)
    """References by what they are worth (`luffy.data.row_filters.check_golds`)."""
    gold_findings: list[dict[str, object]] = field(default_factory=list)
    """Uid, finding and outcome of each reference that fails or is accepted only as text; never a text."""

    def __iadd__(self, other: "ShardStatistics") -> "ShardStatistics":
        self.rows_in += other.rows_in
        longest = self.longest | other.longest  # the larger of each
        for part in fields(self)[1:]:
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            mine.update(theirs) if isinstance(mine, Counter) else mine.extend(theirs)
        self.longest = longest
        del self.quarantined[_MOST_QUARANTINED:]
        return self

    def add_gold(self, uid: str, gold: Gold) -> None:
        finding, outcome = gold
        self.golds[finding] += 1
        if finding in (FAILS, TEXT_ALONE):
            self.gold_findings.append({"uid": uid, "finding": finding, "outcome": outcome.value})


def filter_source(source: TraceSource, job: FilterJob, folder: Path, num_workers: int, grader: GraderPool) -> int:
    """Filter all rows of `source` into shards under `folder`; return the number of shards.

    Short generated sources, single shards and `num_workers` 1 are processed in this process with `grader`, and so are
    rows for a reward model, which is loaded once. Shards that were made from other inputs (`job.inputs`) are made
    again. LostError when a worker dies.
    """
    record = folder / _INPUTS  # a dataset may have changed since the stage was interrupted
    if folder.is_dir() and not (record.is_file() and record.read_text(encoding="utf-8") == job.inputs):
        record.unlink(missing_ok=True)  # first: a kill may leave some of the other files
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(record, job.inputs)
    count = 0

    def unfinished() -> Iterator[Shard]:
        nonlocal count
        chunks = chunked(source.rows(), lambda row: text_size(row) if isinstance(row, Prompt) else _QUARANTINED_SIZE)
        for count, rows in enumerate(chunks, start=1):
            if not _file(folder, count - 1, "json").is_file():
                yield count - 1, rows

    waiting = unfinished()
    head = list(itertools.islice(waiting, 2))
    if source.is_light or num_workers == 1 or len(head) < 2 or reward_models(job.grading.kinds):
        for index, rows in itertools.chain(head, waiting):
            filter_shard(job, index, rows, folder, grader)
    else:
        _in_processes(itertools.chain(head, waiting), job, folder, num_workers)
    assert len(finished_shards(folder)) == count, "a shard was lost"
    return count


def finished_shards(folder: Path) -> list[Path]:
    """Return the statistics files of all finished shards, in the order of their rows."""
    return sorted(folder.glob("?????.json"))


def read_statistics(path: Path) -> ShardStatistics:
    """Return the statistics of one shard."""
    statistics = ShardStatistics()
    for name, value in json.loads(path.read_text(encoding="utf-8")).items():
        setattr(statistics, name, Counter(value) if isinstance(value, dict) else value)
    return statistics


def digest(text: str) -> int:
    """Return a 64-bit hash for comparing texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def filter_shard(job: FilterJob, index: int, rows: Sequence[Row], folder: Path, grader: GraderPool) -> None:
    """Filter the rows and write the shard's files; DataError where a row names a grader that does not exist."""
    prompts = [row for row in rows if isinstance(row, Prompt)]
    grading = job.grading
    unknown = sorted({prompt.grader for prompt in prompts if prompt.grader is not None} - set(grading.names))
    if unknown:
        raise DataError(
            f"data.{job.name}: field reward_model.style names {', '.join(unknown)}, which is no grader; "
            f"there are rule, {', '.join(grading.names)} (add others to grading.named)"
        )
    if job.remove_system:
        prompts = without_system(prompts)
    own = 0
    if job.system_prompt is not None:
        own = sum(any(message.role == "system" for message in prompt.messages) for prompt in prompts)
        prompts = with_system_prompt(prompts, job.system_prompt)
    if job.instructions:
        prompts = with_instructions(prompts, job.instructions)
    judged = job.filter.apply(prompts, grader)
    passed = [row for row in judged if row.reason is None]
    write_prompts(_file(folder, index, "parquet"), [row.prompt for row in passed])
    compared = passed if job.filter.rules.repeats != "allow" else []
    problems = [digest(problem_key(row.prompt.messages)) for row in compared]
    answers = [digest(f"{row.prompt.grader}:{row.prompt.ground_truth}") for row in compared]
    traces = [digest(trace.text) for row in compared for trace in row.prompt.traces]
    sketched = passed if job.filter.rules.near_duplicates is not None else []
    sketches = [signature(problem_text(row.prompt.messages)) for row in sketched]
    verified = [[bool(trace.verified) for trace in row.prompt.traces] for row in passed]
    with replacing(_file(folder, index, "npz")) as file:
        np.savez(
            file,
            prompt_tokens=np.array([row.prompt_tokens for row in passed], dtype=np.int32),
            num_traces=np.array([len(row.trace_tokens) for row in passed], dtype=np.int32),
            trace_tokens=np.array([tokens for row in passed for tokens in row.trace_tokens], dtype=np.int32),
            problems=np.array(problems, dtype=np.uint64),
            answers=np.array(answers, dtype=np.uint64),
            traces=np.array(traces, dtype=np.uint64),
            sketches=np.array(sketches, dtype=np.uint16).reshape(-1, NUM_HASHES),
            all_verified=np.array(list(map(all, verified)), dtype=np.bool_),
            any_verified=np.array(list(map(any, verified)), dtype=np.bool_),
        )
    statistics = _statistics(rows, judged)
    statistics.remarks += Counter({OWN_SYSTEM: own})
    contents = {part.name: getattr(statistics, part.name) for part in fields(statistics)}
    write_atomic(_file(folder, index, "json"), json.dumps(contents))


def _file(folder: Path, index: int, ending: str) -> Path:
    return folder / f"{index:05d}.{ending}"


def _in_processes(shards: Iterable[Shard], job: FilterJob, folder: Path, num_workers: int) -> None:
    """Filter shards in worker processes. One more than there are workers is queued, so that none of them idles."""
    # spawn: this process has threads, whose locks a fork would copy as they are.
    context = multiprocessing.get_context("spawn")
    start = (pickle.dumps(job), str(folder), os.getpid())
    under_way: set[Future[None]] = set()
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=start)
    try:
        for index, rows in shards:
            under_way.add(pool.submit(_work, index, rows))
            if len(under_way) > num_workers:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        for future in under_way:
            future.result()
    except BrokenProcessPool:
        raise LostError(
            "a process of prepare_data was killed (out of memory? lower execution.data_workers); the same command "
            "keeps the finished shards and continues"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[FilterJob, Path, GraderPool]
"""State of a worker process; unset in the parent."""


def _start_worker(job_bytes: bytes, folder: str, parent: int) -> None:
    global _worker
    die_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    job: FilterJob = pickle.loads(job_bytes)  # noqa: S301 - made by this process's parent
    _worker = (
        job,
        Path(folder),
        GraderPool.configured(ExecutionConfig(grader_workers=1), job.grading, job.judge_cache, check_functions=False),
    )


def _work(index: int, rows: list[Row]) -> None:
    job, folder, grader = _worker
    filter_shard(job, index, rows, folder, grader)


def _statistics(rows: Sequence[Row], judged: Sequence[FilteredRow]) -> ShardStatistics:
    statistics = ShardStatistics(rows_in=len(rows))
    malformed = [row for row in rows if isinstance(row, QuarantinedRow)]
    statistics.malformed = Counter(row.field for row in malformed)
    statistics.quarantined = [asdict(row) for row in malformed[:_MOST_QUARANTINED]]
    shown: Counter[str] = Counter()
    for row in judged:
        statistics.outcomes.update(row.outcomes)
        statistics.longest |= Counter({reason.value: tokens for reason, tokens in row.too_long.items()})
        statistics.rejected_traces.update(reason for _, reason in row.rejected_traces)
        statistics.hits += [{"uid": row.prompt.uid, "where": where, **asdict(hit)} for where, hit in row.hits]
        if row.gold is not None:
            statistics.add_gold(row.prompt.uid, row.gold)
        if row.reason is None:
            statistics.data_sources[row.prompt.data_source] += 1
            if not row.trace_tokens:
                statistics.remarks[ALL_REJECTED if row.rejected_traces else NONE_GIVEN] += 1
            statistics.authors.update(trace.author for trace in row.prompt.traces)
        else:
            statistics.rejected[row.reason] += 1
        # What `quarantine.jsonl` shows. The text is left out when it is confidential or contains a benchmark's problem:
        # some benchmarks ask not to be redistributed.
        hidden = row.hits or not may_show_prompt(row.prompt)
        problem = "" if hidden else problem_text(row.prompt.messages)[:_SHOWN_CHARACTERS]
        common = {"uid": row.prompt.uid, "problem": problem, "ground_truth": row.prompt.ground_truth if problem else ""}
        found: list[tuple[str, dict[str, object]]] = []
        if row.reason is not None:
            found.append((row.reason, {}))
        for trace, reason in row.rejected_traces:
            end = trace.text[-_SHOWN_CHARACTERS:] if problem else ""
            found.append((reason, {"author": trace.author, "trace_end": end}))
        for why, more in found:
            shown[why] += 1
            if shown[why] <= MAX_SAMPLES:
                statistics.samples.append({"reason": why, **common, **more})
    return statistics
