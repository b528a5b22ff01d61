"""Where the cells of a study are run again."""

from pathlib import Path

import pytest

from luffy.cli.reproduction import fresh_workspace
from luffy.config.many_runs.study import load_study
from luffy.errors import UserError


def test_results_are_made_again_in_a_folder_of_their_own(tmp_path: Path) -> None:
    study, root = load_study("study_smoke"), tmp_path / "again"
    for _ in range(2):  # also where an earlier attempt was interrupted
        assert fresh_workspace(study, root).root == root
        (root / "stages").mkdir(exist_ok=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "stages").touch()
    with pytest.raises(UserError, match="other: is not empty, so results there would be reused"):
        fresh_workspace(study, tmp_path / "other")
    with pytest.raises(UserError, match="stages: is a file; give a folder"):
        fresh_workspace(study, tmp_path / "other" / "stages")
