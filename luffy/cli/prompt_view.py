"""History of one prompt over the RL steps that drew it: `luffy show RUN --prompt UID`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from luffy.cli.sample_view import JOURNAL, columns_in, origin_of
from luffy.errors import ConfigError, DataError
from luffy.pipeline.records import RunRecord
from luffy.types import FinishReason, Source

HISTORY_HEADER = ("step", "rows", "source", "reward", "tokens", "cut", "outcomes")
_COLUMNS = ["uid", "source", "reward", "outcome", "finish_reason", "displaced", "hint_level"]
_NAMED = 3
"""Uids that a message names."""


def prompt_history(record: RunRecord, uid: str) -> tuple[str, list[list[str]]]:
    """The prompt's whole uid, and a row for each step and kind of response; no text is read.

    `uid` may be the beginning of one. Raises DataError without a journal, and ConfigError where no step, or more than
    one prompt, fits.
    """
    folder = next((each.directory / JOURNAL for each in record.stages.values() if _is_journalled(each.directory)), None)
    if folder is None:
        raise DataError(f"{record.name}: no stage has a rollout journal; --prompt reads that of rl")
    files = sorted(folder.glob("step_*.parquet"))
    whole = _whole_uid(uid, files)
    return whole, [line for file in files for line in _lines(file, whole)]


def _is_journalled(directory: Path) -> bool:
    return (directory / JOURNAL).is_dir()


def _whole_uid(uid: str, files: Sequence[Path]) -> str:
    import pyarrow.parquet as pq

    known = {found for file in files for found in pq.read_table(file, columns=["uid"])["uid"].to_pylist()}
    fitting = [uid] if uid in known else sorted(found for found in known if found.startswith(uid))
    if len(fitting) != 1:
        named = ", ".join(fitting[:_NAMED])
        found = f"{len(fitting)} uids start with it ({named}, ...)" if fitting else "no step has drawn such a prompt"
        raise ConfigError(f"--prompt {uid}: {found}; --samples shows uids, and so does train.parquet")
    return fitting[0]


def _lines(file: Path, uid: str) -> Iterator[list[str]]:
    """A line for each kind of response to the prompt in a step, in the order of their first rows."""
    import pyarrow.parquet as pq

    kinds: dict[str, list[dict]] = {}
    columns = columns_in(file, _COLUMNS)
    found = pq.read_table(file, columns=columns, filters=[("uid", "==", uid)]).to_pylist()
    in_place = "a demonstration" if all(row.get("hint_level") is None for row in found) else "one with a hint"
    for row in found:
        left_out = f", replaced by {in_place}" if row.get("hint_level") is None else ", not needed"
        if row["finish_reason"] == FinishReason.ENVIRONMENT_ERROR:
            left_out = ", crashed"
        name = origin_of(row["source"], row.get("hint_level")) + (left_out if row["displaced"] else "")
        kinds.setdefault(name, []).append(row)
    for name, rows in kinds.items():
        outcomes = Counter(row["outcome"] for row in rows)
        lengths = [len(row["source"]) - row["source"].count(Source.ENVIRONMENT) for row in rows]
        yield [
            str(int(file.stem.removeprefix("step_"))),
            str(len(rows)),
            name,
            f"{fmean(row['reward'] for row in rows):.3g}",
            f"{fmean(lengths):.4g}",
            str(sum(row["finish_reason"] != "stop" for row in rows)),
            ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items()),
        ]
