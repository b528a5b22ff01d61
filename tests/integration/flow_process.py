"""Flows as processes of their own, which report to the shared server, and what they say."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE_S
from support.prefect_api import shared_api, without_prefect

ROOT = Path(__file__).parents[2]
IN_PROCESS = str(Path(__file__).with_name("flow_in_process.py"))
UNDISTURBED = ("exp_configs/smoke.yaml", "execution.checkpoint.keep=3")
"""What the fixture `undisturbed` has run. Its report shows every setting, so other settings make another report."""


def start(workspace, *arguments, flow="run_sweep", **environment):
    """A flow of `flows/`, or with `flow=IN_PROCESS` any command, whose stages then need no process each."""
    program = IN_PROCESS if flow == IN_PROCESS else f"flows/{flow}.py"
    env = {"PYTHONUNBUFFERED": "1", "LUFFY_WORKSPACE": str(workspace), **environment}
    command = [sys.executable, program, *map(str, arguments)]
    return in_terminal(command, subprocess.PIPE, cwd=ROOT, env=without_prefect() | shared_api() | env)


def in_terminal(command, stderr=subprocess.STDOUT, **options):
    """Start it as in a terminal: a shell that runs this in the background has its children ignore Ctrl-C."""
    options |= {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


def run(workspace, *arguments, flow="run_sweep", **environment):
    process = start(workspace, *arguments, flow=flow, **environment)
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stage_states(result):
    """What the last line of each stage of a chain says: `{"sft": "reused", ...}`."""
    return dict(re.findall(r"^\d\d:\d\d:\d\d (\w+): (\w+)", result.stdout, re.MULTILINE))


def states(result):
    """The same for the stages of many runs, `{"luffy 1: rl": "reused", ...}`, without lines of runs that failed."""
    line = r"^\d\d:\d\d:\d\d ([\w ]+(?: \([^)]*\))?(?:: (?!failed:)\w+)?): (\w+)\b(?!: )"
    return dict(re.findall(line, result.stdout, re.MULTILINE))
