"""JSON lines that each have a `step`: appended during a run, truncated when it resumes."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from luffy.files import LineAppender, replacing
from luffy.json_text import parse_json

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class StepLines:
    """Appends to `path`; a killed process, or a full disk, leaves at most one torn line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineAppender(path)

    def append(self, line: Mapping[str, Json]) -> None:
        """Write one object; when this returns, it survives the death of this process."""
        # Strict JSON: the caller has to replace values that are not finite.
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        self._file.append(text.encode("utf-8", errors="replace"))

    def truncate(self, after_step: int) -> None:
        """Drop torn lines and those of later steps, which the run is about to write again."""
        self._file.close()
        kept = [line for line, values in _parsed_lines(self._path) if _step(values) <= after_step]
        with replacing(self._path) as file:
            file.write(b"".join(kept))
        self._file = LineAppender(self._path)

    def close(self) -> None:
        """Make everything durable and close the file."""
        if not self._file.is_closed:
            self._file.sync()
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """Yield the objects of a file in order; torn lines are skipped, and a missing file is empty."""
    for _, values in _parsed_lines(path):
        yield values


def read_last_lines(path: Path, num_bytes: int) -> list[dict[str, Json]]:
    """The objects in the last `num_bytes` of a file, in order; none for a missing file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - num_bytes, 0)
        file.seek(max(start - 1, 0))
        lines = file.read().splitlines(keepends=True)
    whole = lines[1:] if start else lines  # the first one is, or may be, the end of a line that began earlier
    return [values for values in map(_parse, whole) if values is not None]


def _parsed_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Json]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            values = _parse(line)
            if values is not None:
                yield line, values


def _parse(line: bytes) -> dict[str, Json] | None:
    """The object in `line`; None for a line torn by a kill or a power cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = parse_json(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _step(values: Mapping[str, Json]) -> int:
    step = values["step"]
    assert isinstance(step, int)
    return step
