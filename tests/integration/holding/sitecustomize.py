"""With this folder on PYTHONPATH, tests set the pace of stages.

`TEST_HOLD=STAGE:STEP:FILE`: the stage stops at a step while the file exists, so that a test can strike there. Once it
is there, `FILE.reached` exists. `TEST_PACE=STAGE:TOTAL:SECONDS`: a stage of that many steps pauses after each, so that
one that only has to be there leaves the cores to others. One of the two at a time. Stage programs are forked from a
server that has imported nothing of luffy, so the module is changed whenever it is imported.
"""

import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

AfterStep = Callable[[str, int, int], None]
"""Called with the kind of a stage, its step and its number of steps."""


class ChangingFinder(MetaPathFinder):
    """Imports the module of the events with a `progress` that calls `after_step`."""

    def __init__(self, after_step: AfterStep) -> None:
        self.after_step = after_step

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual module, changed right after it has run."""
        if fullname != "luffy.pipeline.events":
            return None
        spec = PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self.change(module.EventWriter)

        spec.loader.exec_module = run_and_change
        return spec

    def change(self, writer: type) -> None:
        """Let `writer.progress` return once `after_step` does."""
        tell = writer.progress

        def progress(events: Any, step: int, total: int, **metrics: float) -> None:
            tell(events, step, total, **metrics)
            self.after_step(events._file.path.parent.parent.name, step, total)

        writer.progress = progress


def hold(stage: str, step: int, total: int) -> None:
    """Return once the file of TEST_HOLD is gone."""
    kind, first, file = os.environ["TEST_HOLD"].split(":", 2)
    if stage == kind and step >= int(first):
        if Path(file).exists():
            Path(file).with_suffix(".reached").touch()
        while Path(file).exists():
            time.sleep(0.02)


def pace(stage: str, step: int, total: int) -> None:
    """Return after the pause of TEST_PACE."""
    kind, steps, seconds = os.environ["TEST_PACE"].split(":")
    if (stage, total) == (kind, int(steps)):
        time.sleep(float(seconds))


for name, after_step in {"TEST_HOLD": hold, "TEST_PACE": pace}.items():
    if name in os.environ:
        sys.meta_path.insert(0, ChangingFinder(after_step))
