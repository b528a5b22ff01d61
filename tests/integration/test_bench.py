"""`luffy bench` with the real stage programs: what it prints and what it leaves."""

import re

import pytest

from luffy.cli.main import main
from luffy.errors import EXIT_FAILURE, EXIT_OK

pytestmark = pytest.mark.slow
SMOKE = "exp_configs/smoke.yaml"
VALIDATED = ["data.validation_prompts=4", "rl.validation={every: 2, source: validation}"]
RL = [SMOKE, "chain=rl", "method=luffy"]


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch) -> None:
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_bench_measures_every_stage_and_leaves_only_data_and_policy(tmp_path, capsys):
    overrides = [*VALIDATED, "difficulty={policy: base, num_samples: 2}"]
    assert main(["bench", *RL, *overrides, "--steps", "1", "--workspace", str(tmp_path)]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "those of the present policy" in shown
    lines = {line.split(":")[0]: line for line in shown.splitlines()}
    assert lines["prepare_data"].endswith("finished") and lines["base"].endswith("finished")
    assert lines["rl"].startswith("rl: 6 x ") and re.search(r" 4 x [\d.]+ s a validation ", lines["rl"])
    assert f"{2 * (24 - 4)} x " in lines["difficulty"]
    assert "s a response (" in lines["evaluate_base"] and lines["evaluate_rl"] == "evaluate_rl: as evaluate_base"
    assert lines["report"].startswith("report: not measured: ")
    cells = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert cells["rl"][-1] == "GiB" and cells["report"][1] == "-" and "without report" in shown
    # Where a step of RL went: parts that add up to it, each rounded.
    parts = re.findall(r"^(\w[\w ,]*?)  +([\d.]+) s( [\d.]+ %)?", shown[shown.index("part of a step") :], re.MULTILINE)
    seconds = {name: float(value) for name, value, _ in parts}
    assert {"generation", "update", "a step", "start, once"} <= seconds.keys()
    assert sum(float(value) for _, value, share in parts if share) == pytest.approx(seconds["a step"], abs=0.04)
    assert "tokens a second" in shown and "MFU" not in shown
    assert {"all", "still"} <= cells.keys()
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == ["base", "prepare_data"]
    assert not any((tmp_path / "runs").iterdir())
    assert [path.name for path in (tmp_path / "bench").iterdir()] == [".lock"]


def test_a_stage_that_cannot_run_gives_its_reason_and_the_others_are_measured(tmp_path, capsys):
    code = main(
        ["bench", SMOKE, "chain=sft", "method=sft", "sft.num_traces=9999", "--steps", "1", "--workspace", str(tmp_path)]
    )
    shown = capsys.readouterr().out
    assert code == EXIT_FAILURE
    (line,) = [line for line in shown.splitlines() if line.startswith("sft: not measured: ")]
    assert "sft.num_traces is 9999" in line
    assert "evaluate_base: " in shown and "without sft, report" in shown
