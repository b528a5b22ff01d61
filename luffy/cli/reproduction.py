"""Cells of a study run again in a fresh workspace, and compared with the committed results."""

import json
from collections.abc import Sequence
from pathlib import Path

from luffy.config.study import Study
from luffy.errors import UserError
from luffy.evaluation.study.study_progress import StudyProgress
from luffy.evaluation.study.study_results import (
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
    """The committed results; UserError where they have nothing of one of the cells."""
    committed = read_study_results(result_files(study.path, study.config.name))
    for cell in cells:
        if cell not in committed.chosen:
            raise UserError(f"{study.path}: the committed results have no run of cell {cell}; collect it first")
    return committed


def compare_again(study: Study, cells: Sequence[str], workspace: Workspace) -> str | None:
    """Where the runs in `workspace` differ from the committed ones, in a line; None where they are equal."""
    committed = needed_results(study, cells)
    chosen = {study.tuned_cell(cell) or cell: committed.chosen[cell] for cell in cells}
    again = collect_runs(study.reported_runs(cells, chosen), StudyProgress(study, workspace))
    return first_difference(committed.of_cells(cells), again.of_cells(cells))
