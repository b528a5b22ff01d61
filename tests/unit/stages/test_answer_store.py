"""Answers on disk: what a kill leaves of them, and what other stages take over."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from luffy.errors import DataError
from luffy.grading.request import Grade
from luffy.stages.answers import store as module
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.types import FinishReason, Message, Outcome

GRADE = Grade(Outcome.WRONG, "1/3", "other value")
EPISODE = ModelAnswer(
    "guess\u2028 3", 4, FinishReason.TURNS, "", (Message("assistant", "3"), Message("tool", "higher")), {"turns": 1.0},
    (-0.1, -1e-300), 7, "a fault", GRADE, "math",
)  # fmt: skip


def answer(text: str, reason: FinishReason = FinishReason.STOP) -> ModelAnswer:
    return ModelAnswer(text, len(text), reason, prompt_tokens=3)


def stored(path: Path, *batches: dict[str, ModelAnswer], author: str = "") -> bytes:
    store = AnswerStore(path)
    for batch in batches:
        store.add(batch.items(), author)
    store.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


def test_a_kill_at_any_byte_leaves_whole_batches_and_the_rest_is_added_as_before(path):
    batches = [
        {"k1": answer("one\n\n\u2028"), "k2": EPISODE},
        {"k3": answer("zwölf"), "k4": answer("", FinishReason.FAILED)},
        {"k5": ModelAnswer(None, 4, FinishReason.LENGTH, grade=GRADE, grader="math")},
    ]
    ends = [len(stored(path, batch)) for batch in batches]
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        store = AnswerStore(path)
        kept = sum(end <= cut for end in ends)
        assert (store.num_resumed, len(store)) == (sum(map(len, batches[:kept])),) * 2
        for batch in batches[kept:]:
            assert not any(key in store for key in batch)
            store.add(batch.items())
        assert {key: store[key] for batch in batches for key in batch} == {k: v for b in batches for k, v in b.items()}
        store.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "torn",
    [
        *(b'{"uid": 3}\n', b"5\n", b'"abc"\n', b"[]\n", b"\0\0\0\n", b'{"key": "k2", "num_tokens": 3}\n\n'),
        b'{"key": "k2", "author": null, "text": "a", "num_tokens": "3", "end": "stop"}\n',
        b'{"key": "k2", "author": null, "text": 5, "num_tokens": 3, "end": "stop"}\n',
    ],
)
def test_a_line_that_is_no_answer_and_all_after_it_are_dropped(path, torn):
    whole = stored(path, {"k1": answer("one")})
    path.write_bytes(whole + torn + whole.replace(b"k1", b"k3"))
    store = AnswerStore(path)
    assert ("k1" in store, len(store)) == (True, 1)
    assert path.read_bytes() == whole


def test_a_batch_that_fails_leaves_those_before_and_after(path, monkeypatch):
    """By its iterator, or by a disk that becomes full."""

    def failing() -> Iterator[tuple[str, ModelAnswer]]:
        yield "k2", EPISODE
        raise DataError("another problem")

    def half(file: object, data: bytes) -> None:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    write = module._write
    whole = stored(path, {"k1": answer("one")})
    store = AnswerStore(path)
    with pytest.raises(DataError):
        store.add(failing())
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(module, "_write", half)
        store.add([("k2", answer("two"))])
    assert path.read_bytes() == whole
    store.add([("k3", answer("three"))])
    assert (store["k1"].text, store["k3"].text, "k2" in store) == ("one", "three", False)
    assert len(AnswerStore(path)) == 2


def test_answers_of_other_stages_are_adopted_and_those_that_did_not_come_are_not(tmp_path, path):
    other = tmp_path / "other.jsonl"
    failed, refused = answer("", FinishReason.FAILED), answer("", FinishReason.REFUSED)
    graded = ModelAnswer("", 0, FinishReason.ENVIRONMENT_ERROR, grade=GRADE, grader="math")
    stored(other, {"k1": answer("one"), "k2": failed, "k3": refused, "k4": graded, "k5": answer("not wanted")})
    store = AnswerStore(path, [tmp_path / "missing.jsonl", other])
    assert not store.has_answered("a")
    assert store.adopt(["k0", "k1", "k2", "k3", "k4"]) == [other]
    assert (store["k1"], store["k4"], len(store)) == (answer("one"), graded, 2)
    assert (store.num_adopted, store.num_resumed, store.adopt(["k1"])) == (2, 0, [])
    assert path.read_bytes().count(b"\n\n") == 1, "one commit, and so one fsync"


def test_who_has_answered_is_known_and_what_earlier_versions_wrote_is_read(path):
    stored(path, {"k1": answer("\ud800!")}, author="a")
    stored(path, {"k2": answer("", FinishReason.FAILED)}, author="b")
    store = AnswerStore(path)
    assert [store.has_answered(author) for author in "abc"] == [True, False, False]
    assert store["k1"].text == "?!"  # a lone surrogate
    path.unlink()
    line = stored(path, {"k": EPISODE})
    path.write_bytes(line.replace(b'"grade":', b'"second": ["no_answer", null, ""], "grade":'))
    assert AnswerStore(path)["k"] == EPISODE, "graded twice, it has its first grade"


def stale(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """As NFS answers after another machine has deleted the file."""
    raise OSError(errno.ESTALE, "Stale file handle")


def test_answers_of_a_stage_that_is_deleted_meanwhile_are_used_while_they_can_be_read(tmp_path, path, monkeypatch):
    other = tmp_path / "other" / "answers.jsonl"
    other.parent.mkdir()
    stored(other, {"k1": answer("one"), "k2": answer("two")})
    store = AnswerStore(path, [other, tmp_path / "deleted" / "answers.jsonl"])
    shutil.rmtree(other.parent)
    assert store.get("k2") == answer("two")
    monkeypatch.setattr(module.os, "pread", stale)
    assert (store.get("k1"), store.num_adopted) == (None, 1)
