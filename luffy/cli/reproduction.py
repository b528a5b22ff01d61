"""Cells of a study run again in a fresh workspace, and compared with the committed results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config.many_runs.study import Study
from luffy.errors import UserError
from luffy.evaluation.study.study_findings import Effect, find_effects
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
EFFECTS_HEADER = ("cell", "arm", "committed", "again")


def fresh_workspace(study: Study, root: Path) -> Workspace:
    """A workspace at `root` that holds nothing but earlier attempts to reproduce this study; else UserError."""
    mark, own = root / _MARK, json.dumps({"study": study.config.name})
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: is a file; give a folder by --workspace")
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
                f"{study.path}: the committed results of cell {cell} lack {len(missing)} of {len(wanted)} runs "
                f"({missing[0]} is the first); finish and collect them before reproducing"
            )
    return committed


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Cells that were run again, beside the committed results."""

    difference: str | None
    """The first difference, in a line; None where everything is equal bit for bit."""
    effects: tuple[tuple[str, ...], ...]
    """Rows under `EFFECTS_HEADER`: each arm against the reference on the primary measure, as committed and again."""


def compare_again(study: Study, cells: Sequence[str], workspace: Workspace) -> Reproduction:
    """Compare the runs in `workspace` with the committed ones."""
    committed = needed_results(study, cells)
    chosen = committed.chosen_for(study, cells)
    again = collect_runs(study.reported_runs(cells, chosen), StudyProgress(study, workspace))
    before, after = committed.of_cells(cells), again.of_cells(cells)
    difference = first_difference(before, after)
    if difference is None:
        return Reproduction(None, ())
    sides = find_effects(study, before), find_effects(study, after)
    rows = [
        (cell, arm, *(effect_words(side.effect(cell, arm)) for side in sides))
        for cell in cells
        for arm in sides[0].others
    ]
    return Reproduction(difference, tuple(rows))


def effect_words(effect: Effect | None) -> str:
    """The difference in percentage points with its interval, without a correction for many tests."""
    if effect is None:
        return "-"
    found = effect.result.difference
    return f"{100 * found.value:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
