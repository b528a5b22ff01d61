"""A tiny run from data to an RL step, in a temporary workspace: whether everything works together."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import luffy
from luffy.cli.checkup.finding import Finding, broken, ok
from luffy.cli.console import duration
from luffy.config.shipped import EXPERIMENTS

TINY = ("stages=[prepare_data, base, sft, rl]", "base.steps=2", "sft.epochs=1", "rl.steps=1")
"""Overrides of `smoke` for the trial."""
_TIME_LIMIT_S = 600.0
_SERVER_VARIABLES = ("PREFECT_", "LUFFY_")


def trial_run(overrides: Sequence[str] = TINY) -> Finding:
    """Run a tiny experiment from data to an RL step, with an embedded Prefect server, as a user would."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="luffy-doctor-") as folder:
        command = [sys.executable, "-m", "luffy", "run", str(EXPERIMENTS / "smoke.yaml"), *overrides]
        try:
            done = subprocess.run(
                [*command, "--workspace", str(Path(folder, "workspace"))],
                cwd=folder,  # away from a prefect.toml: the trial must not become a run of that server
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            remedy = "look for other load on this machine (top), then run luffy doctor again"
            return broken("trial run", f"has not ended in {duration(_TIME_LIMIT_S)}", remedy)
    if done.returncode == 0:
        return ok("trial run", f"data, base policy, SFT and an RL step in {duration(time.monotonic() - began)}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
    return broken("trial run", f"exit code {done.returncode}: {why}", f"luffy run smoke {' '.join(_quoted(overrides))}")


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    package = str(Path(luffy.__file__).parents[1])
    kept = {name: value for name, value in inherited.items() if not name.startswith(_SERVER_VARIABLES)}
    path = os.pathsep.join(filter(None, [package, kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, "WANDB_MODE": "disabled"}


def _quoted(overrides: Sequence[str]) -> list[str]:
    return [f"'{each}'" if " " in each else each for each in overrides]
