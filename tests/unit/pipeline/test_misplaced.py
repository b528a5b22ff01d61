"""What is no result in the place of one: a miss with its reason, and at worst one line."""

from pathlib import Path

import pytest
from support.refusals import refused
from support.stages import execute, opened

from luffy.errors import WorkspaceError


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
