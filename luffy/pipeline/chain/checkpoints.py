"""Where training stages keep their checkpoints: `checkpoints/step_000040/`, complete once it holds `COMPLETE`."""

import re
from pathlib import Path

CHECKPOINTS_FOLDER = "checkpoints"
COMPLETE_FILE = "COMPLETE"
_NAME = re.compile(r"step_(\d+)")


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Step and folder of each complete checkpoint of the stage in `directory`."""
    return {
        int(match[1]): folder
        for folder in (directory / CHECKPOINTS_FOLDER).glob("step_*")
        if (match := _NAME.fullmatch(folder.name)) and (folder / COMPLETE_FILE).is_file()
    }


def newest_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """Step and folder of the newest complete checkpoint of the stage in `directory`; None without one."""
    return max(complete_checkpoints(directory).items(), default=None)
