"""Answers of models on disk, so that none is generated or paid for twice.

    store = AnswerStore(out / "answers.jsonl", [sibling / "answers.jsonl"])
    store.adopt(keys)                # what the other stores have of these
    store.add([(key, answer), ...])  # all or none; durable when it returns
    if key in store: store[key]      # from the file

Each line is the JSON of one answer, and an empty line commits those above it. A kill leaves whole commits and at most a
torn one, which is dropped. So the questions that are left are the rest of the same sequence, in the same batches: the
last bits of an engine's results may depend on the batch.
"""

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from luffy.files import sync_directory
from luffy.grading.request import Grade
from luffy.pipeline.workspace import is_discarded
from luffy.types import FinishReason, Message, Outcome

ANSWERS_FILE = "answers.jsonl"
"""Graded answers of a stage."""
_MISSING = (FinishReason.REFUSED, FinishReason.FAILED, FinishReason.ENVIRONMENT_ERROR)


def siblings(stage: Path) -> list[Path]:
    """Directories of other stages beside a stage's own, whose answers it may adopt."""
    return [path for path in sorted(stage.parent.iterdir()) if path != stage and not is_discarded(path)]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a model answered to one prompt."""

    text: str | None
    """Cut after the first stop text; all turns of an episode. Empty where there is no answer; None: it was graded, and
    its text is not kept."""
    num_tokens: int
    """As the model counts them, reasoning and stop token included; without those of an environment."""
    finish_reason: FinishReason
    reply: str | None = None
    """The last turn of an episode, which is graded; None: the text is a single turn."""
    turns: tuple[Message, ...] = ()
    """The conversation of an episode after its prompt, where traces are made of the answers."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Counts of an episode."""
    logprobs: tuple[float, ...] | None = None
    """One per token of the trace by the policy's tokenizer, where these are the tokens that the model sampled."""
    prompt_tokens: int | None = None
    """None: not counted."""
    fault: str = ""
    """Why the environment failed."""
    grade: Grade | None = None
    grader: str = ""
    """Kind of the grader."""

    @property
    def graded_text(self) -> str:
        """What graders read."""
        text = self.text if self.reply is None else self.reply
        if self.reply is None and self.turns:
            text = self.turns[-1].content
        assert text is not None
        return text

    @property
    def outcome(self) -> Outcome:
        assert self.grade is not None
        return self.grade.outcome

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to grade."""
        return self.finish_reason is FinishReason.ENVIRONMENT_ERROR

    @property
    def is_missing(self) -> bool:
        """Whether it stands for an answer that did not come. Asked again, it may."""
        return self.finish_reason in _MISSING


_Place: TypeAlias = tuple[int, int]
"""Offset and length of a line."""
_Lines: TypeAlias = list[tuple[str, str, bool, bool, _Place]]
"""Key, author, whether it is missing, whether it is graded, and place of each answer."""


class AnswerStore:
    """The answers in one file, which only this process writes, and those of `others`, which may be adopted.

    The others stay open, so that their answers outlast a deletion of their stages. Answers that did not come (refusals,
    failures) are not adopted unless they were graded as that. In memory are only keys and places.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._path = path
        self._places: dict[str, _Place] = {}
        self._authors: set[str] = set()
        self._end = 0
        self._adoptable: dict[str, tuple[BinaryIO, _Place]] = {}
        self.num_adopted = 0
        self._open = ExitStack()
        for other in others:
            with suppress(OSError), ExitStack() as opened:  # it may be deleted at any moment
                file = opened.enter_context(other.open("rb"))
                found = {
                    key: (file, place)
                    for _, lines in _commits(file)
                    for key, _, missing, is_graded, place in lines
                    if is_graded or not missing
                }
                self._adoptable |= found
                if found:
                    self._open.push(opened.pop_all())
        is_new = not path.exists()
        self._file = self._open.enter_context(path.open("a+b", buffering=0))
        with path.open("rb") as file:
            for end, lines in _commits(file):
                self._end = end
                self._places.update((key, place) for key, *_, place in lines)
                self._authors.update(author for _, author, missing, _, _ in lines if not missing)
        self._file.truncate(self._end)
        if is_new:
            sync_directory(path.parent)
        self.num_resumed = len(self)
        """Answers of earlier attempts."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> ModelAnswer:
        return _read(self._file, self._places[key])[1]

    def get(self, key: str) -> ModelAnswer | None:
        """The answer under this key, adopted if only another store has it; None without one."""
        self.adopt([key])
        return self[key] if key in self._places else None

    def has_answered(self, author: str) -> bool:
        """Whether there is an answer of that author that is neither missing nor a refusal."""
        return author in self._authors

    def add(self, answers: Iterable[tuple[str, ModelAnswer]], author: str = "") -> None:
        """Save answers by key together, all or none (none where the iterable raises, which may be long).

        They survive a power cut as soon as this returns.
        """
        self._commit((key, author, answer) for key, answer in answers)

    def adopt(self, keys: Iterable[str]) -> list[Path]:
        """Copy the answers under these keys that only others have, in one commit; returns the others that had any."""
        sources: dict[Path, None] = {}

        def found() -> Iterator[tuple[str, str, ModelAnswer]]:
            for key in keys:
                if key in self._places or key not in self._adoptable:
                    continue
                file, place = self._adoptable[key]
                with suppress(OSError):  # another machine has deleted it from a network disk
                    author, answer = _read(file, place)
                    sources[Path(file.name)] = None
                    yield key, author, answer

        self.num_adopted += self._commit(found())
        return list(sources)

    def remove(self) -> None:
        """Delete the file, once the answers are kept elsewhere."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._open.close()

    def _commit(self, answers: Iterable[tuple[str, str, ModelAnswer]]) -> int:
        places: dict[str, _Place] = {}
        authors: set[str] = set()
        end = self._end
        try:
            for key, author, answer in answers:
                line = _line(key, author, answer)
                _write(self._file, line)
                places[key] = end, len(line)
                end += len(line)
                authors |= set() if answer.is_missing else {author}
            if places:
                _write(self._file, b"\n")
                os.fsync(self._file.fileno())
        except BaseException:
            try:
                self._file.truncate(self._end)
            except (OSError, ValueError):
                self._file.close()  # what is added behind a torn line would be lost at the next start
            raise
        if places:
            self._end = end + 1
        self._places |= places
        self._authors |= authors
        return len(places)


def _write(file: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that becomes full takes a part without an error; the rest then raises it
        left = left[file.write(left) :]


def _commits(file: BinaryIO) -> Iterator[tuple[int, _Lines]]:
    """Each commit: where it ends, and its lines; up to the first line that is torn or no answer."""
    end, waiting = 0, _Lines()
    for line in file:
        start, end = end, end + len(line)
        if not line.endswith(b"\n"):
            return
        if line == b"\n":
            yield end, waiting
            waiting = _Lines()
            continue
        try:
            key, author, answer = _parsed(line)
        except (ValueError, LookupError, TypeError, AttributeError):
            return
        waiting.append((key, author, answer.is_missing, answer.grade is not None, (start, len(line))))


def _read(file: Any, place: _Place) -> tuple[str, ModelAnswer]:
    """The author and the answer; several threads may read from one file."""
    _, author, answer = _parsed(os.pread(file.fileno(), place[1], place[0]))
    return author, answer


def _line(key: str, author: str, answer: ModelAnswer) -> bytes:
    known, grade = answer.logprobs, answer.grade
    fields = {
        "key": key,
        "author": author or None,
        "text": answer.text,
        "num_tokens": answer.num_tokens,
        "end": answer.finish_reason.value,
        "reply": answer.reply,
        "turns": [[turn.role, turn.content] for turn in answer.turns] or None,
        "measures": dict(answer.measures) or None,
        "logprobs": None if known is None else base64.b64encode(np.asarray(known, "<f8").tobytes()).decode(),
        "prompt_tokens": answer.prompt_tokens,
        "fault": answer.fault or None,
        "grader": answer.grader or None,
        "grade": None if grade is None else [grade.outcome.value, grade.extracted, grade.reason],
    }
    written = {name: value for name, value in fields.items() if value is not None}
    # A lone surrogate cannot be written.
    return json.dumps(written, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"


def _parsed(line: bytes) -> tuple[str, str, ModelAnswer]:
    """Key, author and answer."""
    fields = json.loads(line)
    text, num_tokens, grade = fields.get("text"), fields["num_tokens"], None
    if not (isinstance(num_tokens, int) and (text is None or isinstance(text, str))):
        raise TypeError("not an answer")
    if "grade" in fields:
        outcome, extracted, reason = fields["grade"]
        grade = Grade(Outcome(outcome), extracted, reason)
    known = fields.get("logprobs")
    answer = ModelAnswer(
        text,
        num_tokens,
        FinishReason(fields["end"]),
        fields.get("reply"),
        tuple(Message(*turn) for turn in fields.get("turns", ())),
        fields.get("measures", {}),
        None if known is None else tuple(np.frombuffer(base64.b64decode(known), "<f8").tolist()),
        fields.get("prompt_tokens"),
        fields.get("fault", ""),
        grade,
        fields.get("grader", ""),
    )
    return fields["key"], fields.get("author", ""), answer
