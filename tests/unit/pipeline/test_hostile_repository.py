"""An unpacked experiment may be a git repository with a configuration of its author's, and private files beside it."""

import os
import subprocess
from pathlib import Path

import pytest
from support.stages import opened

from luffy.pipeline.experiment import start_run
from luffy.pipeline.manifest import uncommitted_changes

RUNS_PROGRAMS = """
[core]
    fsmonitor = "touch {mark}; false"
    hooksPath = {hooks}
[diff]
    external = touch {mark}
[diff "mine"]
    command = touch {mark}
    textconv = touch {mark}; cat
[filter "mine"]
    clean = touch {mark}; cat
    process = touch {mark}
"""


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "a.py").write_text("one\n")
    (folder / "same.py").write_text("one\n")
    (folder / "drawn.txt").write_text("one\n")
    (folder / "filtered.txt").write_text("one\n")
    (folder / "keys.env").write_text("KEY=1\n")
    (folder / "keys.env").chmod(0o600)
    for arguments in ("init -q", "add .", "-c user.name=A -c user.email=a@b commit -qm 1"):
        subprocess.run(["git", *arguments.split()], check=True)
    return folder


def test_a_repository_of_others_runs_no_program(repository, tmp_path):
    mark, hooks = tmp_path / "ran", tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (hooks / "post-index-change").chmod(0o700)
    (repository / ".gitattributes").write_text("drawn.txt diff=mine\nf*ed.* filter=mine\n")
    (repository / "fetched.py").write_text("unknown to git\n")
    with (repository / ".git/config").open("a") as config:
        config.write(RUNS_PROGRAMS.format(mark=mark, hooks=hooks))
    for name in ("a.py", "drawn.txt", "filtered.txt"):
        (repository / name).write_text("two\n")  # as long as before: git compares the contents, by filters
    os.utime(repository / "same.py", (1, 1))  # as after unpacking: git then looks at all files again
    patch = uncommitted_changes(repository / "workspace")["mine"]
    assert b"same.py" not in patch and b"fetched.py" not in patch
    assert not mark.exists()
    assert b"a.py" in patch and b"drawn.txt" in patch
    # Seen to be run by git itself.
    subprocess.run(["git", "diff"], capture_output=True)
    assert mark.exists()


def test_of_what_git_does_not_know_only_code_that_all_may_read_is_kept(repository, tmp_path):
    (repository / "keys.env").write_text("KEY=canary\n")
    (repository / "new.py").write_text("new = 1\n")
    for name in ("private.py", "env.sh", "own.toml", "own.yaml"):
        (repository / name).write_text("canary\n")
    (repository / "private.py").chmod(0o600)
    with start_run(opened(tmp_path / "work", "smoke.yaml")) as run:
        patch = run.directory / "uncommitted-mine.patch"
        assert patch.stat().st_mode & 0o777 == 0o600
        assert "new = 1" in patch.read_text() and "canary" not in patch.read_text()
