"""The evaluations of a workspace as DataFrames, for notebooks (`luffy.load_results`)."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.evaluation.across_runs.board import Column, Entry, read_entries
from luffy.pipeline.workspace import find_workspace

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ("experiment", "method", "checkpoint", "variant", "suite", "decoding")


def load_results(workspace: str | Path | None = None) -> "pd.DataFrame":
    """Every finished evaluation: one row per model, protocol and suite, the newest evaluations first.

    `workspace` is found as by the command line when left out. Raises DataError where nothing was evaluated. Columns:

    - `experiment`, `method`, `checkpoint`, `variant`: the model as the leaderboard names it; `runs`: the names of the
      runs that evaluated it; `model`: digest of its weights (evaluations of equal weights share a row)
    - `suite`, `decoding`, `temperature`, `top_p`, `max_response_tokens`, `template`: what was evaluated, and how
    - `num_problems`, `num_samples` (responses per problem)
    - `accuracy`, `low`, `high` in [0, 1], `confidence`, `interval_method`
    - `pass_at_k`, `maj_at_k`: for the largest k sampled (`num_samples`); missing with one response per problem
    - `mean_tokens`, `truncated_share`, `no_answer_share`: of the responses
    - `evaluation`: key of the stage; `ended`: when it ended (UTC)
    """
    import pandas as pd  # loads for half a second

    rows = []
    for entry in read_entries(find_workspace(workspace))[0]:
        for column, cell in entry.cells.items():
            row, settings = cell.row, entry.protocol.settings
            result = {
                "temperature": float(settings["temperature"]),
                "top_p": float(settings.get("top_p", 1.0)),
                "max_response_tokens": int(settings["max_response_tokens"]),
                "template": settings.get("template", "own"),
                **{name: getattr(row, name) for name in ("num_problems", "num_samples", "accuracy")},
                "low": row.interval[0],
                "high": row.interval[1],
                "confidence": float(settings["confidence"]),
                "interval_method": row.method,
                "pass_at_k": row.pass_at_k.get(str(row.num_samples)),
                "maj_at_k": row.maj_at_k.get(str(row.num_samples)),
                **{name: getattr(row, name) for name in ("mean_tokens", "truncated_share", "no_answer_share")},
                "evaluation": cell.evaluation,
                "ended": cell.ended,
            }
            rows.append(_names(entry, column) | result)
    frame = pd.DataFrame(rows)
    frame["ended"] = pd.to_datetime(frame["ended"], utc=True)
    return frame


def load_problem_results(workspace: str | Path | None = None) -> "pd.DataFrame":
    """As `load_results`, but one row per problem, for statistics of one's own.

    Columns: `experiment`, `method`, `checkpoint`, `variant`, `suite`, `decoding`, `uid` (of the problem), `correct` and
    `num_samples` (responses), `evaluation` (key of the stage). No text of a problem or a response.
    """
    import pandas as pd  # as above

    return pd.DataFrame(
        {
            **{name: value for name, value in _names(entry, column).items() if name in _KEYS},
            "uid": uid,
            "correct": correct,
            "num_samples": column.num_samples,
            "evaluation": cell.evaluation,
        }
        for entry in read_entries(find_workspace(workspace))[0]
        for column, cell in entry.cells.items()
        for uid, correct in cell.correct.items()
    )


def _names(entry: Entry, column: Column) -> dict[str, object]:
    return {
        **asdict(entry.name),
        "runs": entry.runs,
        "model": entry.model,
        "suite": column.suite,
        "decoding": entry.protocol.decoding,
    }
