"""Scores of scripted turns by verifiers' own evaluation, in the interpreter that `LUFFY_TEST_TASK_SETS` names."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import PATIENCE_S

PYTHON = os.environ.get("LUFFY_TEST_TASK_SETS")
needs_interpreter = pytest.mark.skipif(
    PYTHON is None, reason="needs verifiers 0.4.0: name its interpreter in LUFFY_TEST_TASK_SETS"
)
needs_uv = pytest.mark.skipif(
    PYTHON is None or not Path(PYTHON).with_name("uv").exists(),
    reason="needs uv beside the interpreter that LUFFY_TEST_TASK_SETS names",
)


def own_evaluation(
    environment: str, role: str, cases: Sequence[tuple[int, object]], **configuration: object
) -> list[dict[str, float]]:
    """Reward and scores of each case: the position of a task, and the policy's turns as `said` makes them."""
    asked = {"environment": environment, "role": role, "configuration": configuration}
    result = subprocess.run(
        [PYTHON, Path(__file__).parent / "task_set_evaluation.py"],
        input=json.dumps({**asked, "cases": [{"row": row, "turns": turns} for row, turns in cases]}) + "\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def said(text: str, *calls: dict[str, str]) -> dict[str, object]:
    """A turn in the form of OpenAI's protocol."""
    functions = [{"id": f"c{place}", "type": "function", "function": call} for place, call in enumerate(calls)]
    return {"content": text, "tool_calls": functions}
