"""With this folder on PYTHONPATH, a stage stops at a step while a file exists, so that a test can strike there.

`TEST_HOLD=STAGE:STEP:FILE`. Once the stage is there, `FILE.reached` exists. Stage programs are forked from a server
that has imported nothing of luffy, so the module is changed whenever it is imported.
"""

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class HoldingFinder(MetaPathFinder):
    """Imports the module of the events with a `progress` that holds."""

    def __init__(self, stage: str, step: int, file: Path) -> None:
        self.stage, self.step, self.file = stage, step, file

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual module, changed right after it has run."""
        if fullname != "luffy.pipeline.machine.events":
            return None
        spec = PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self.change(module.EventWriter)

        spec.loader.exec_module = run_and_change
        return spec

    def change(self, writer: type) -> None:
        """Let `writer.progress` return once the file is gone."""
        tell = writer.progress

        def progress(events: Any, step: int, total: int, **metrics: float) -> None:
            tell(events, step, total, **metrics)
            if step >= self.step and Path(events._file.name).parent.parent.name == self.stage:
                self.hold()

        writer.progress = progress

    def hold(self) -> None:
        """Return once the file is gone."""
        if self.file.exists():
            self.file.with_suffix(".reached").touch()
        while self.file.exists():
            time.sleep(0.02)


if "TEST_HOLD" in os.environ:
    stage, step, file = os.environ["TEST_HOLD"].split(":", 2)
    sys.meta_path.insert(0, HoldingFinder(stage, int(step), Path(file)))
