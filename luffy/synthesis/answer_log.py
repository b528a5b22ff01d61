"""Teachers' answers on disk, so that none is paid for twice.

    log = AnswerLog(out / "answers.jsonl", earlier=other_logs)
    log.add("r1", {key: answer})    # durable when it returns
    log.find(key)                   # facts, held in memory
    log.read(key)                   # the answer, from the file

A key identifies everything that was asked. A kill leaves whole lines and at most a torn one, which is dropped with
everything after it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from luffy.files import sync_directory
from luffy.types import Message


class AnswerStatus(StrEnum):
    """How a question ended, before grading."""

    COMPLETE = "complete"
    TRUNCATED = "truncated"
    """The answer ran into its length limit."""
    REFUSED = "refused"
    """The model or its content filter declined, or the endpoint rejected the request for good."""
    OUT_OF_TURNS = "out_of_turns"
    """An episode that its limit of turns ended."""
    CRASHED = "crashed"
    """The environment failed."""
    FAILED = "failed"
    """No answer after all retries, while other questions were answered."""


_ANSWERED = (AnswerStatus.COMPLETE, AnswerStatus.TRUNCATED, AnswerStatus.OUT_OF_TURNS)
_OF_EPISODES = ("turns", "measures", "reason")
"""Fields that are written only where they hold something."""


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """What a teacher answered to one question."""

    text: str
    """Empty where there is no answer."""
    status: AnswerStatus
    prompt_tokens: int
    num_tokens: int
    """Tokens of the answer as the teacher counts them, reasoning and stop token included."""
    logprobs: tuple[float, ...] | None = None
    """The teacher's log-probabilities, one per token of the trace by the policy's tokenizer, if it sampled them."""
    turns: tuple[Message, ...] = ()
    """The teacher's turns in an episode of many, and the environment's between them. For a single turn that is logged
    on its own (`luffy.synthesis.episode_answers`): what the environment wrote before it."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Measures of an episode."""
    reason: str = ""
    """Why the environment failed."""


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """The facts about a saved answer that are held in memory."""

    teacher: str
    status: AnswerStatus
    prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a log an answer is: its line, and its number in that line."""

    offset: int
    num_bytes: int
    number: int


class AnswerLog:
    """All answers of a stage, and those of `earlier` logs that have the same keys.

    An earlier answer is copied into this log when it is looked for, unless it is a failure or a refusal: asking again
    may help. Earlier logs stay open, so that their answers outlast the deletion of their stages.
    """

    def __init__(self, path: Path, earlier: Sequence[Path] = ()) -> None:
        self._path = path
        self._facts: dict[str, AnswerFacts] = {}
        self._places: dict[str, _Place] = {}
        self._open = ExitStack()
        self._adoptable: dict[str, tuple[BinaryIO, _Place]] = {}
        for other in earlier:
            self._remember(other)
        self.num_adopted = 0
        """Answers copied from earlier logs."""
        is_new = not path.exists()
        self._file: BinaryIO = self._open.enter_context(path.open("ab"))
        self._end = 0
        with path.open("rb") as file:
            for key, facts, place in _entries(file):
                self._facts[key], self._places[key] = facts, place
                self._end = place.offset + place.num_bytes
        self._file.truncate(self._end)
        if is_new:
            sync_directory(path.parent)
        self.num_resumed = len(self._facts)
        """Answers of earlier attempts."""

    def find(self, key: str) -> AnswerFacts | None:
        """The answer saved under `key`; None without one."""
        if key not in self._facts and key in self._adoptable:
            found = None
            with suppress(OSError):  # another machine has deleted it from a network disk
                found = _read(*self._adoptable[key])
            if found is not None:
                teacher, answer = found
                self.add(teacher, {key: answer})
                self.num_adopted += 1
        return self._facts.get(key)

    def read(self, key: str) -> TeacherAnswer:
        """The answer saved under `key`."""
        with self._path.open("rb") as file:
            return _read(file, self._places[key])[1]

    def add(self, teacher: str, answers: Mapping[str, TeacherAnswer]) -> None:
        """Save answers together, all or none; they survive a power cut as soon as this returns."""
        entries = [{"key": key, **_fields(answer)} for key, answer in answers.items()]
        line = json.dumps({"teacher": teacher, "answers": entries}, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        for number, (key, answer) in enumerate(answers.items()):
            self._facts[key] = AnswerFacts(teacher, answer.status, answer.prompt_tokens, answer.num_tokens)
            self._places[key] = _Place(self._end, len(line), number)
        self._end += len(line)

    def has_answered(self, teacher: str) -> bool:
        """Whether there is an answer of that teacher at all."""
        return any(facts.teacher == teacher and facts.status in _ANSWERED for facts in self._facts.values())

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._open.close()

    def _remember(self, earlier: Path) -> None:
        """Enter the answers of an earlier log; it may be deleted at any moment."""
        with suppress(OSError), ExitStack() as opened:
            file = opened.enter_context(earlier.open("rb"))
            found = {key: (file, place) for key, facts, place in _entries(file) if facts.status in _ANSWERED}
            self._adoptable.update(found)
            if found:
                self._open.push(opened.pop_all())


def _entries(file: BinaryIO) -> Iterator[tuple[str, AnswerFacts, _Place]]:
    """Each saved answer, up to the first invalid line."""
    start = 0
    for line in file:
        try:
            found = _parsed(line)
        except (ValueError, KeyError, TypeError):
            return
        if not line.endswith(b"\n"):
            return
        for number, (teacher, key, answer) in enumerate(found):
            facts = AnswerFacts(teacher, answer.status, answer.prompt_tokens, answer.num_tokens)
            yield key, facts, _Place(start, len(line), number)
        start += len(line)


def _read(file: BinaryIO, place: _Place) -> tuple[str, TeacherAnswer]:
    """The teacher and its answer at that place; several threads may read from one file."""
    line = os.pread(file.fileno(), place.num_bytes, place.offset)
    teacher, _, answer = _parsed(line)[place.number]
    return teacher, answer


def _parsed(line: bytes) -> list[tuple[str, str, TeacherAnswer]]:
    fields = json.loads(line)
    return [(fields["teacher"], entry["key"], _answer(entry)) for entry in fields["answers"]]


def _fields(answer: TeacherAnswer) -> dict[str, object]:
    return {name: value for name, value in asdict(answer).items() if value or name not in _OF_EPISODES}


def _answer(entry: dict[str, Any]) -> TeacherAnswer:
    text, logprobs = entry["text"], entry["logprobs"]
    prompt_tokens, num_tokens = entry["prompt_tokens"], entry["num_tokens"]
    if not (isinstance(text, str) and isinstance(prompt_tokens, int) and isinstance(num_tokens, int)):
        raise TypeError("not an answer")
    known = tuple(map(float, logprobs)) if isinstance(logprobs, list) else None
    turns = tuple(Message(**turn) for turn in entry.get("turns", ()))
    status, measures, reason = AnswerStatus(entry["status"]), entry.get("measures", {}), entry.get("reason", "")
    return TeacherAnswer(text, status, prompt_tokens, num_tokens, known, turns, measures, reason)
