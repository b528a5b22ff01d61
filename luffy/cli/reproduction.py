"""Cells of a study run again in a fresh workspace, and compared with the committed results."""

import json
from collections.abc import Sequence
from pathlib import Path

from luffy.config.many_runs.study import Study
from luffy.errors import UserError
from luffy.evaluation.study.study_progress import StudyProgress
from luffy.evaluation.study.study_results import (
    REPORTED,
    StudyResults,
    collect_runs,
    first_difference,
    read_study_results,
    result_files,
)
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace

_MARK = "reproduction.json"


def fresh_workspace(study: Study, root: Path) -> Workspace:
    """A workspace at `root` that holds nothing but earlier attempts to reproduce this study; else UserError."""
    mark, own = root / _MARK, json.dumps({"study": study.config.name})
    if root.exists() and any(root.iterdir()) and not (mark.is_file() and mark.read_text(encoding="utf-8") == own):
        raise UserError(f"{root}: is not empty, so results there would be reused; give another folder by --workspace")
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(mark, own)
    return Workspace(root)


def needed_results(study: Study, cells: Sequence[str]) -> StudyResults:
    """The committed results; UserError where a run of one of the cells is missing."""
    committed = read_study_results(result_files(study.path, study.config.name))
    there = {(row.cell, row.arm, row.seed) for row in committed.outcomes if row.role == REPORTED}
    for cell in cells:
        wanted = [(cell, arm, seed) for arm in study.config.arms for seed in study.seeds(cell)]
        if missing := [f"{arm} {seed}" for _, arm, seed in wanted if (cell, arm, seed) not in there]:
            raise UserError(
                f"{study.path}: of cell {cell}, the committed results lack {len(missing)} of {len(wanted)} runs "
                f"({missing[0]} is the first); finish and collect it before it is run again"
            )
    return committed


def compare_again(study: Study, cells: Sequence[str], workspace: Workspace) -> str | None:
    """Where the runs in `workspace` differ from the committed ones, in a line; None where they are equal."""
    committed = needed_results(study, cells)
    chosen = committed.chosen_for(study, cells)
    again = collect_runs(study.reported_runs(cells, chosen), StudyProgress(study, workspace))
    return first_difference(committed.of_cells(cells), again.of_cells(cells))
