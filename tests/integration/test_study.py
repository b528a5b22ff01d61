"""`luffy study` with real stages of smoke size: stopped, killed, resumed, collected, shown, reproduced."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE_S
from prefect_api import shared_api, without_prefect

from luffy.config.many_runs.study import load_study
from luffy.evaluation.study.study_results import read_study_results, result_files, write_results

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CELLS = ("--cells", "centre")


def start(folder, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "luffy", "study", str(folder / "design.yaml"), *options],
        cwd=ROOT,
        env=without_prefect() | shared_api() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(folder, *options, workspace="workspace"):
    process = start(folder, *options, "--workspace", str(folder / workspace))
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The centre with one seed: stopped by its budget, killed after the first run, and run to its end.

    One run at a time, so that each flow needs one warm server.
    """
    folder = tmp_path_factory.mktemp("study")
    shipped = ROOT / "exp_configs"
    text = (shipped / "study_smoke.yaml").read_text().replace("smoke.yaml", f"{shipped}/smoke.yaml")
    for given, small in (("\nseeds: [1, 2]\n", "\nseeds: [1]\n"), ("\nworkers: 2\n", "\nworkers: 1\n")):
        assert given in text
        text = text.replace(given, small)
    (folder / "design.yaml").write_text(text)
    code, out, err = run(folder, *CELLS, "--budget-hours", "0")
    assert code == 0, err
    assert "the budget of 0 hours is spent; 6 runs are left" in out
    process = start(folder, *CELLS, "--workspace", str(folder / "workspace"))
    for line in process.stdout:
        if re.search(r" centre\.\w+ 100 \(.*: evaluate_\w+: finished", line):
            break
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    return folder, run(folder, *CELLS)


def test_a_killed_study_goes_on_without_its_finished_runs(studied):
    folder, (code, out, err) = studied
    assert code == 0, err
    begun = set(re.findall(r"^\d\d:\d\d:\d\d (centre\.\w+ 100 \([^)]*\))", out, re.MULTILINE))
    assert len(begun) < 4
    code, out, _ = run(folder, *CELLS, "--plan")
    assert code == 0
    rows = {row[0]: row[-4:] for line in out.splitlines() if len(row := line.split()) >= 5}
    assert rows["all"] == ["6", "6", "0", "-"]


def test_results_are_collected_shown_and_reproduced_and_a_changed_file_is_found(studied):
    folder, _ = studied
    code, out, err = run(folder, "--collect", "--page")
    assert code == 0, err
    written = {path.name for path in folder.glob("study_smoke.*")}
    assert written == {
        f"study_smoke.{name}" for name in ("results.parquet", "outcomes.parquet", "html", "results.md", "svg")
    }
    code, out, err = run(folder, "--reproduce", "centre", workspace="again")
    assert (code, err) == (0, ""), err
    assert "reproduced, bit for bit: centre" in out
    files = result_files(folder / "design.yaml", load_study(folder / "design.yaml").config.name)
    results = read_study_results(files)
    first, *rest = results.outcomes  # of the base, which is reproduced too
    wrong = replace(first, correct=(first.correct[0] + 1, *first.correct[1:]))
    write_results(replace(results, outcomes=(wrong, *rest)), files)
    code, out, err = run(folder, "--reproduce", "centre", workspace="again")
    assert code == 1 and err.count("\n") == 1 and "not reproduced: centre, " in err
    (row,) = (line for line in out.splitlines() if line.startswith("centre  "))
    assert re.search(r"luffy +([+-]\d+\.\d \[.*\]) +\1", row), row
