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
    """Where an answer is: its line, and its number in that line."""

    path: Path
    offset: int
    number: int


class AnswerLog:
    """All answers of a stage, and those of `earlier` logs that have the same keys.

    An earlier answer is copied into this log when it is looked for, unless it is a failure or a refusal: asking again
    may help.
    """

    def __init__(self, path: Path, earlier: Sequence[Path] = ()) -> None:
        self._path = path
        self._facts: dict[str, AnswerFacts] = {}
        self._places: dict[str, _Place] = {}
        self._adoptable = {
            key: place for other in earlier for key, facts, place, _ in _entries(other) if facts.status in _ANSWERED
        }
        self.num_adopted = 0
        """Answers copied from earlier logs."""
        is_new = not path.exists()
        self._file: BinaryIO = path.open("ab")
        self._end = 0
        for key, facts, place, end in _entries(path):
            self._facts[key], self._places[key], self._end = facts, place, end
        self._file.truncate(self._end)
        if is_new:
            sync_directory(path.parent)
        self.num_resumed = len(self._facts)
        """Answers of earlier attempts."""

    def find(self, key: str) -> AnswerFacts | None:
        """The answer saved under `key`; None without one."""
        if key not in self._facts and key in self._adoptable:
            teacher, answer = _read(self._adoptable[key])
            self.add(teacher, {key: answer})
            self.num_adopted += 1
        return self._facts.get(key)

    def read(self, key: str) -> TeacherAnswer:
        """The answer saved under `key`."""
        return _read(self._places[key])[1]

    def add(self, teacher: str, answers: Mapping[str, TeacherAnswer]) -> None:
        """Save answers together, all or none; they survive a power cut as soon as this returns."""
        entries = [{"key": key, **_fields(answer)} for key, answer in answers.items()]
        line = json.dumps({"teacher": teacher, "answers": entries}, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        for number, (key, answer) in enumerate(answers.items()):
            self._facts[key] = AnswerFacts(teacher, answer.status, answer.prompt_tokens, answer.num_tokens)
            self._places[key] = _Place(self._path, self._end, number)
        self._end += len(line)

    def has_answered(self, teacher: str) -> bool:
        """Whether there is an answer of that teacher at all."""
        return any(facts.teacher == teacher and facts.status in _ANSWERED for facts in self._facts.values())

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def _entries(path: Path) -> Iterator[tuple[str, AnswerFacts, _Place, int]]:
    """Each saved answer with the offset of its line's end, up to the first invalid line."""
    if not path.is_file():
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                found = _parsed(line)
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            end = start + len(line)
            for number, (teacher, key, answer) in enumerate(found):
                facts = AnswerFacts(teacher, answer.status, answer.prompt_tokens, answer.num_tokens)
                yield key, facts, _Place(path, start, number), end
            start = end


def _read(place: _Place) -> tuple[str, TeacherAnswer]:
    with place.path.open("rb") as file:
        file.seek(place.offset)
        teacher, _, answer = _parsed(file.readline())[place.number]
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
