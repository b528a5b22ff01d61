"""Answers on disk: what a kill leaves of them, and what other stages take over."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from luffy.synthesis.answer_log import AnswerLog, AnswerStatus, TeacherAnswer


def answer(text: str, status: AnswerStatus = AnswerStatus.COMPLETE) -> TeacherAnswer:
    return TeacherAnswer(text, status, prompt_tokens=3, num_tokens=len(text), logprobs=(-0.5, -1.25))


def test_a_torn_line_is_dropped_and_whole_ones_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = AnswerLog(path)
    log.add("a", {"k1": answer("one\n\u2028"), "k2": answer("zwölf")})
    log.add("b", {"k3": answer("three")})
    log.close()
    whole = path.read_bytes()
    for end in range(len(whole.splitlines(keepends=True)[0]), len(whole)):
        path.write_bytes(whole[:end])
        again = AnswerLog(path)
        assert again.num_resumed == 2
        assert again.find("k3") is None
        again.add("b", {"k3": answer("three")})
        assert [again.read(key).text for key in ("k1", "k2", "k3")] == ["one\n\u2028", "zwölf", "three"]
        again.close()
        assert path.read_bytes() == whole


def test_a_batch_is_kept_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "log.jsonl")
    log.add("a", {"k1": answer("one"), "k2": answer("two")})
    log.close()
    assert len((tmp_path / "log.jsonl").read_bytes().splitlines()) == 1


def test_answers_of_other_stages_are_copied_when_they_are_looked_for_and_failures_are_not(tmp_path: Path) -> None:
    other = AnswerLog(tmp_path / "other.jsonl")
    other.add("a", {"k1": answer("one"), "k2": answer("", AnswerStatus.FAILED), "k3": answer("not looked for")})
    other.close()
    log = AnswerLog(tmp_path / "log.jsonl", [tmp_path / "other.jsonl", tmp_path / "missing.jsonl"])
    assert (log.find("k2"), log.has_answered("a")) == (None, False)
    assert log.find("k1") is not None
    assert (log.read("k1"), log.num_adopted, log.num_resumed) == (answer("one"), 1, 0)
    log.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [entry["key"] for entry in json.loads(line)["answers"]] == ["k1"]


def test_answers_of_a_stage_that_is_deleted_meanwhile_are_not_paid_for_again(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = AnswerLog(tmp_path / "other/log.jsonl")
    other.add("a", {"k1": answer("one"), "k2": answer("two")})
    other.close()
    log = AnswerLog(tmp_path / "log.jsonl", [tmp_path / "other/log.jsonl", tmp_path / "deleted/log.jsonl"])
    shutil.rmtree(tmp_path / "other")
    assert log.find("k2") is not None
    assert log.read("k2") == answer("two")
    log.close()


def test_an_answer_that_cannot_be_read_any_more_is_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = AnswerLog(tmp_path / "other.jsonl")
    other.add("a", {"k1": answer("one")})
    other.close()
    log = AnswerLog(tmp_path / "log.jsonl", [tmp_path / "other.jsonl"])
    monkeypatch.setattr("luffy.synthesis.answer_log.os.pread", stale)
    assert (log.find("k1"), log.num_adopted) == (None, 0)


def stale(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """As NFS answers after another machine has deleted the file."""
    raise OSError(errno.ESTALE, "Stale file handle")
