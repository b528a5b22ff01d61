"""Whole or not at all."""

from pathlib import Path

import pytest

from luffy.files import clone_or_copy, link_or_copy, replacing, write_atomic


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_atomic(target, "old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_new_text_takes_the_place_of_the_old(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    for text in ("old", "neu: ä"):
        write_atomic(target, text)
        assert target.read_text(encoding="utf-8") == text


def test_a_link_replaces_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    link_or_copy(str(source), str(target))
    assert target.read_text() == "new"
    assert source.stat().st_ino == target.stat().st_ino


def test_a_copy_replaces_what_was_there_and_is_a_file_of_its_own(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old, and longer")
    clone_or_copy(str(source), str(target))
    source.write_text("newest")
    assert target.read_text() == "new"
