"""Finds the files of prepared suites, the validation split included."""

from collections.abc import Sequence
from pathlib import Path

from luffy.config.evaluation import VALIDATION
from luffy.errors import DataError

VALIDATION_FILE = f"{VALIDATION}.parquet"


def suite_files(data: Path, only: Sequence[str] | None) -> dict[str, Path]:
    """The files of the suites in the prepared `data` by name: all of them, sorted, or those in `only`, in that order.

    Raises DataError for a suite that is missing.
    """
    files = {path.stem: path for path in sorted((data / "suites").glob("*.parquet"))}
    if only is None:
        return files
    held_out = {VALIDATION: data / VALIDATION_FILE} if (data / VALIDATION_FILE).is_file() else {}
    files = held_out | files
    missing = [name for name in only if name not in files]
    if missing:
        raise DataError(f"{data}: no suite {missing[0]}; there are {', '.join(files) or 'none'}")
    return {name: files[name] for name in only}
