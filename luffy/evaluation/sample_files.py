"""`samples.jsonl.zst`: the graded responses of an evaluation, a line each (`zstdcat FILE | head`).

Compressed in blocks that stand alone (zstd frames): neither who writes nor who reads holds more than a block.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from luffy.confidential import is_confidential, may_show_prompt
from luffy.errors import DataError
from luffy.files import replacing
from luffy.grading.request import Grade, problem_of
from luffy.types import FinishReason, Outcome, Prompt

_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""Keys of a problem's subject or level in `extra_info`, which differ between data sets."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One graded response."""

    suite: str
    decoding: str
    uid: str
    """Uid of the problem."""
    sample: int
    """Which of the problem's responses, from 0."""
    seed: int
    prompt: str
    """As the model saw it: chat template applied."""
    response: str
    answer: str | None
    """The extracted answer, which was compared with the reference."""
    ground_truth: str
    outcome: str
    reason: str
    """Reason for the outcome, in a short phrase."""
    correct: bool
    finish_reason: str
    num_tokens: int
    """In the response, stop token included."""
    grader: str = ""
    """Kind of the grader, e.g. `math`."""
    subject: str | None = None
    """Subject of the problem, where its data names one."""
    level: str | None = None
    num_options: int | None = None
    """For multiple-choice questions."""
    confidential: bool = False
    """Fields of the problem's data; `may_be_shown` decides whether to display them."""
    reply: str | None = None
    """The last turn of an episode with an environment, which was graded; None: the response is a single turn."""
    measures: dict[str, float] = field(default_factory=dict)
    """Counts of the episode, by name."""

    @property
    def graded_text(self) -> str:
        """What graders read."""
        return self.response if self.reply is None else self.reply

    def graded(self, grader: str, grade: Grade) -> "SampleRecord":
        """This response with the grade by a grader of that kind instead of its own."""
        return replace(
            self,
            answer=grade.extracted,
            outcome=grade.outcome.value,
            reason=grade.reason,
            correct=grade.outcome is Outcome.CORRECT,
            grader=grader,
        )

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade."""
        return self.finish_reason == FinishReason.ENVIRONMENT_ERROR

    @property
    def may_be_shown(self) -> bool:
        """Whether prompt, response, answer and reference may be shown (files of earlier versions carry no mark)."""
        return not is_confidential(self.suite, marked=self.confidential)


def ungraded_record(prompt: Prompt, shown: str, **of_response: Any) -> SampleRecord:
    """The record of a response to `prompt`, `shown` as that text, before it is graded.

    `of_response` has the fields of the response: suite, decoding, sample, seed, response, finish_reason and num_tokens,
    and for an episode reply and measures.
    """

    def label(names: Sequence[str]) -> str | None:
        found = (prompt.extra_info.get(name) for name in names)
        return next((str(value) for value in found if isinstance(value, str | int) and value != ""), None)

    num_options = prompt.extra_info.get("num_options") or len(problem_of(prompt).options)
    return SampleRecord(
        uid=prompt.uid,
        prompt=shown,
        ground_truth=prompt.ground_truth,
        answer=None,
        outcome="",
        reason="",
        correct=False,
        subject=label(_SUBJECTS),
        level=label(_LEVELS),
        num_options=num_options if isinstance(num_options, int) and num_options else None,
        confidential=not may_show_prompt(prompt),
        **of_response,
    )


_NAMES = tuple(field.name for field in fields(SampleRecord))
_REQUIRED = frozenset(
    field.name for field in fields(SampleRecord) if field.default is MISSING and field.default_factory is MISSING
)


def record_line(record: SampleRecord) -> bytes:
    """The line of `record` in a file of samples."""
    values = {name: getattr(record, name) for name in _NAMES}
    return json.dumps(values, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"


def parse_record(line: str | bytes) -> SampleRecord:
    """The record of a line; ValueError (no JSON), KeyError or TypeError when `record_line` did not make it.

    A file of an earlier version has no value for fields that came later, which have defaults; values of fields that
    are no more are left out.
    """
    values = json.loads(line)
    return SampleRecord(**{name: values[name] for name in _NAMES if name in values or name in _REQUIRED})


SAMPLES_FILE = "samples.jsonl.zst"
_PLAIN_FILE = "samples.jsonl"
"""What an earlier version called it."""
_COMPRESSED = ".zst"
_MAX_LINE_BYTES = 1 << 28
_BLOCK_BYTES = 4 << 20
"""Size of a block: large enough for many responses to a problem, which repeat its prompt."""
_LEVEL = 3


def find_samples(directory: Path) -> Path | None:
    """The file of graded responses in the directory of an evaluation; None where it has none."""
    files = (directory / SAMPLES_FILE, directory / _PLAIN_FILE)
    return next((file for file in files if file.is_file()), None)


def read_samples_of(directory: Path) -> Iterator[SampleRecord]:
    """Yield the graded responses of a finished evaluation, a suite and decoding after the other.

    Raises DataError where there are none, or the file is damaged.
    """
    path = find_samples(directory)
    if path is None:
        raise DataError(f"{directory}: has no {SAMPLES_FILE}")
    try:
        yield from read_sample_records(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: holds no graded responses ({error})") from None


def read_sample_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the records of a file, compressed or not.

    Raises OSError, ValueError, KeyError or TypeError when it is not what `write_sample_records` wrote.
    """
    if path.suffix != _COMPRESSED:
        opened: IO[bytes] = path.open("rb")
    else:
        import pyarrow as pa  # flows, which show samples, start without it

        opened = io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 16)
    with opened as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if len(line) == _MAX_LINE_BYTES:  # a few kilobytes of zstd can hold gigabytes
                raise ValueError(f"a line is longer than {_MAX_LINE_BYTES} bytes")
            yield parse_record(line)


def write_sample_records(path: Path, *cells: Iterable[SampleRecord]) -> None:
    """Write the records as they come, those of each cell in blocks of their own: all of them or nothing."""
    import pyarrow as pa  # as above

    codec = pa.Codec("zstd", compression_level=_LEVEL)
    with replacing(path) as file:
        for records in cells:
            waiting, size = list[bytes](), 0
            for line in map(record_line, records):
                waiting.append(line)
                size += len(line)
                if size >= _BLOCK_BYTES:
                    file.write(codec.compress(b"".join(waiting), asbytes=True))
                    waiting, size = [], 0
            if waiting:
                file.write(codec.compress(b"".join(waiting), asbytes=True))
