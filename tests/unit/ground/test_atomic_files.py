"""Whole or not at all."""

import resource

import pytest

from luffy.files import LineAppender, clone_or_copy, link_or_copy, replacing, write_atomic


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    write_atomic(target, "old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_new_text_takes_the_place_of_the_old(tmp_path):
    target = tmp_path / "a.txt"
    for text in ("old", "neu: ä"):
        write_atomic(target, text)
        assert target.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("place", [link_or_copy, clone_or_copy])
def test_a_link_or_copy_replaces_what_was_there_and_a_copy_is_a_file_of_its_own(tmp_path, place):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old, and longer")
    place(str(source), str(target))
    assert target.read_text() == "new"
    source.write_text("newest")
    assert target.read_text() == ("newest" if place is link_or_copy else "new")


def test_a_line_that_does_not_fit_is_an_error_and_spoils_no_other(tmp_path):
    """The limit ends a write within the line, as a disk does whose last block is taken."""
    path, limits = tmp_path / "lines", resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineAppender(path)
    lines.append(b"one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 2, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                lines.append(b"two, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"one\ntw"
    lines.append(b"three")
    lines.close()
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_lines_go_on_after_one_that_a_kill_has_torn(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    lines = LineAppender(path)
    for line in (b"three", b"four"):
        lines.append(line)
    assert path.read_bytes() == b"one\ntw\nthree\nfour\n"
