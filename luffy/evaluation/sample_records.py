"""A graded response, and its line of JSON in files."""

import json
from dataclasses import MISSING, dataclass, field, fields

from luffy.confidential import is_confidential
from luffy.types import FinishReason


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
    second_grader: str | None = None
    """Kind of the other grader of mathematics, which judged the same response; None where there is none."""
    second_outcome: str | None = None
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

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade."""
        return self.finish_reason == FinishReason.ENVIRONMENT_ERROR

    @property
    def may_be_shown(self) -> bool:
        """Whether prompt, response, answer and reference may be shown (files of earlier versions carry no mark)."""
        return not is_confidential(self.suite, marked=self.confidential)


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

    A file of an earlier version has no value for fields that came later, which have defaults.
    """
    values = json.loads(line)
    return SampleRecord(**{name: values[name] for name in _NAMES if name in values or name in _REQUIRED})
