"""A workspace on a real disk that is full, too small, read-only or another one (tmpfs, where mounting is allowed)."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.refusals import refused
from toy_run import Recorder, toy_experiment, toy_run

from luffy.cli.main import main
from luffy.errors import StageFailed, WorkspaceError
from luffy.files import write_atomic
from luffy.pipeline.disk import lack_of_space
from luffy.pipeline.experiment import start_run
from luffy.pipeline.garbage import Retention, dispose, survey
from luffy.pipeline.workspace import Workspace, claiming
from luffy.stages.training_span import adopt_shorter_run

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of so many MiB at a folder."""
    mounted = []

    def mount(size_mib: int, folder: Path = tmp_path / "disk") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("needs leave to mount: run as root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(MIB))
    return folder / "filler"


def test_a_read_only_disk_is_refused_before_anything_starts(disk, capsys):
    root = disk(1)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    with refused(f"workspace {root}: cannot be written (Read-only file system)", "--workspace", error=WorkspaceError):
        Workspace(root).prepare()
    with refused("Read-only file system", error=WorkspaceError), claiming(Workspace(root)):
        pass
    commands = [["show"], ["gc"], ["gc", "--delete"]]
    assert [main([*command, "--workspace", str(root)]) for command in commands] == [0, 0, 2]
    assert "Read-only file system" in capsys.readouterr().err


def test_what_will_not_fit_is_refused_before_it_begins(disk, tmp_path):
    """A run, and a stage of one that has begun."""
    root = disk(20)
    full = (f"workspace {root}: its disk is full (20 MiB left", "luffy gc", "--workspace")
    with refused(*full, error=WorkspaceError), start_run(toy_experiment(root)):
        pass
    root = disk(60, tmp_path / "larger")
    run = toy_run(root, "model.architecture.hidden_size=768", "model.architecture.num_layers=4")
    run.execute("prepare_data", recorder := Recorder())
    needed = ("base needs", "parameters: a model in float32", "checkpoints of", "MiB left", "--workspace")
    with refused(*needed, error=WorkspaceError):
        run.execute("base", recorder)
    assert not list((root / "stages").glob("base/*"))
    assert len(recorder.texts("error")) == 1


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(disk):
    root = disk(40)
    with pytest.raises(StageFailed, match="rl failed"), start_run(toy_experiment(root)):
        fill(root)
        raise StageFailed("rl failed")


def test_a_full_disk_is_recognised_without_an_errno(disk):
    root = disk(1)
    with pytest.raises(Exception, match="os error 28") as caught:
        save_file({"x": np.zeros(MIB)}, root / "x.safetensors")
    assert lack_of_space(caught.value) == "no space left"
    (root / "x.safetensors").unlink(missing_ok=True)
    fill(root)
    with pytest.raises(OSError, match="No space") as caught:
        write_atomic(root / "y", "z" * MIB)
    assert lack_of_space(caught.value) == "no space left"
    assert [path.name for path in root.iterdir()] == ["filler"]
    assert lack_of_space(RuntimeError("the matrix is not finite")) is None


def test_stages_may_be_on_a_different_disk_from_runs_and_other_stages(disk, tmp_path):
    workspace = Workspace(tmp_path / "workspace")
    shorter = workspace.stages / "base" / "0000000000000001"
    disk(2, workspace.stages / "rl")
    longer = workspace.stages / "rl" / "0000000000000002"
    for folder in (shorter / "journal", shorter / "checkpoints" / "step_000004", longer):
        folder.mkdir(parents=True)
    (shorter / "checkpoints" / "step_000004" / "COMPLETE").touch()
    (shorter / "journal" / "step_000001.parquet").write_bytes(b"rows")
    adopt_shorter_run(shorter, longer, ("journal",))
    assert (longer / "checkpoints" / "step_000004" / "COMPLETE").is_file()
    assert (longer / "journal" / "step_000001.parquet").read_bytes() == b"rows"
    (longer / "config.yaml").touch()
    assert dispose(workspace, Retention(), survey(workspace, Retention()).garbage) == []
    assert not list((workspace.stages / "rl").iterdir())
