"""Stages that stop at a step until a test lets them go on."""

import subprocess
from pathlib import Path

from support.patience import wait_until

_FOLDER = Path(__file__).parents[1] / "integration" / "holding"


class Hold:
    """`environment` makes stages of kind `stage` stop once `step` steps are done, while the file is there."""

    def __init__(self, folder: Path, stage: str, step: int) -> None:
        self._file = folder / "hold"
        self._reached = self._file.with_suffix(".reached")
        self._reached.unlink(missing_ok=True)  # of an earlier one
        self._file.touch()
        self.environment = {"TEST_HOLD": f"{stage}:{step}:{self._file}", "PYTHONPATH": str(_FOLDER)}

    def is_reached(self) -> bool:
        return self._reached.exists()

    def wait(self, run: subprocess.Popen[str] | None = None) -> None:
        """Return once the stage has stopped; `run` is the process that runs it, and does not end before that."""
        wait_until(lambda: self._reached.exists() or (run is not None and run.poll() is not None), "the stage's stop")
        assert run is None or run.poll() is None, run.communicate()

    def release(self) -> None:
        """Let the stage go on, and let later ones pass."""
        self._file.unlink()
