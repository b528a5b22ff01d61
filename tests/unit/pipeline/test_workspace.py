import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luffy.errors import WorkspaceError
from luffy.pipeline.disk import usable
from luffy.pipeline.workspace import claiming, find_workspace, link


def test_the_argument_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LUFFY_WORKSPACE", raising=False)
    assert find_workspace().root == tmp_path / "workspace"
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path / "env"))
    assert find_workspace().root == tmp_path / "env"
    assert find_workspace(tmp_path / "given").root == tmp_path / "given"


def test_runs_are_numbered_without_a_clash(workspace):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: workspace.new_run("exp", {"n": n}), range(20)))
    assert sorted(path.name for path in found) == sorted(f"exp-{n}" for n in range(1, 21))
    assert sorted(json.loads((path / "run.json").read_text())["n"] for path in found) == list(range(20))
    workspace.new_run("other-large", {})
    assert workspace.new_run("other", {}).name == "other-1", "its name begins like that of another experiment"


def test_a_claim_locks_a_file_that_is_open_for_reading(workspace):
    """NFS refuses a shared lock of any other."""
    workspace.prepare()
    with claiming(workspace):
        (held,) = (file for file in Path("/proc/self/fd").iterdir() if file.resolve().name == ".claims.lock")
        assert fcntl.fcntl(int(held.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def test_links_are_relative_and_replaced(tmp_path):
    for target in ("one", "two"):
        (tmp_path / target).mkdir()
        link(tmp_path / target, tmp_path / "runs" / "stages" / "rl")
    assert (tmp_path / "runs/stages/rl").readlink() == Path("../../two")


@pytest.mark.parametrize("root", ["/proc/luffy", "/dev/null/luffy", "/dev/full"])
def test_a_place_that_cannot_be_written_is_the_users_mistake(root):
    with pytest.raises(WorkspaceError, match=f"workspace {root}: cannot be written"):
        find_workspace(root).prepare()


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("file", ".*/file is not a folder"),
        ("file/below", ".*/file is not a folder"),
        ("w" * 300, "File name too long"),
        ("~nobody-of-that-name/w", "Could not determine home directory"),
        ("circle", "Symlink loop from .*"),
        ("circle/below/w", "Symlink loop from .*"),
        (os.fsdecode(b"/tmp/\xff"), "its name is not UTF-8, as the records of runs are"),
    ],
)
def test_a_name_that_means_no_folder_is_the_users_mistake(tmp_path, monkeypatch, root, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError, match=rf"^workspace .*: cannot be written \({reason}\); give another"):
        find_workspace(root)


@pytest.mark.parametrize("folder", ["runs", "stages"])
def test_a_link_to_a_disk_that_is_away_is_the_users_mistake(workspace, folder):
    workspace.root.mkdir()
    (workspace.root / folder).symlink_to("/disk-that-is-away/luffy")
    with pytest.raises(WorkspaceError, match=rf"cannot be written \(.*/{folder} is not a folder\)"):
        workspace.prepare()


@pytest.mark.parametrize(("number", "remedy"), [(errno.EACCES, "give another"), (errno.ENOSPC, "free space")])
def test_only_a_full_disk_is_to_be_emptied(number, remedy):
    words = os.strerror(number)
    with pytest.raises(WorkspaceError, match=f"^workspace: /x: {words}; {remedy}"), usable(Path("/y")):
        raise OSError(number, words, "/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root, who may write everywhere")
def test_a_read_only_folder_is_the_users_mistake(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WorkspaceError, match="--workspace"):
        find_workspace(tmp_path / "w").prepare()
