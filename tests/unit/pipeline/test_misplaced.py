"""What is no result in the place of one: a miss with its reason, and at worst one line."""

import os
import tempfile
from pathlib import Path

import pytest
from support.refusals import refused
from support.stages import execute, opened

from luffy.errors import WorkspaceError
from luffy.pipeline.gpus import own_gpus


def loop(path: Path) -> None:
    path.symlink_to(path.name)


MISPLACED = {
    "a folder for the manifest": ("manifest.json", Path.mkdir, "manifest.json is not readable", True),
    "a loop for the manifest": ("manifest.json", loop, "manifest.json is not readable", True),
    "a folder for the identity": ("identity.json", Path.mkdir, "identity.json is not readable", True),
    "a file for the stage": ("", Path.touch, "in the place of its folder", False),
    "a loop for the stage": ("", loop, "in the place of its folder", False),
}


@pytest.mark.parametrize(("name", "make", "reason", "is_cleared"), MISPLACED.values(), ids=MISPLACED)
def test_what_is_misplaced_is_a_miss_with_its_reason(tmp_path, name, make, reason, is_cleared):
    experiment = opened(tmp_path, "smoke.yaml")
    directory = experiment.plan_node("prepare_data").directory
    (directory if name else directory.parent).mkdir(parents=True)
    make(directory / name)
    plan = experiment.plan_node("prepare_data")
    assert plan.action == "run" and reason in plan.reason
    if is_cleared:
        execute(experiment, "prepare_data")
        assert experiment.plan_node("prepare_data").action == "reuse"
    else:
        with refused(str(directory), "remove", error=WorkspaceError):
            execute(experiment, "prepare_data")


@pytest.mark.parametrize(
    "place",
    [lambda place: place.symlink_to(place.parent), lambda place: place.touch(), lambda place: place.mkdir(mode=0o777)],
    ids=["a link", "a file", "open to all"],
)
def test_the_locks_of_gpus_lie_in_a_folder_of_ones_own(tmp_path, monkeypatch, place):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-aa, 81920'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = os.umask(0)
    place(tmp_path / f"luffy-gpus-{os.getuid()}")
    os.umask(old)
    with refused("luffy-gpus", "TMPDIR", error=WorkspaceError), own_gpus(1):
        pass
