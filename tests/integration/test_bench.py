"""`luffy bench` with the real stage programs: what it prints, what it leaves, and what plans make of it."""

import json
from pathlib import Path

import pytest
from installed import needs_vllm

from luffy.cli.main import main
from luffy.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR

pytestmark = pytest.mark.slow
SMOKE = "exp_configs/smoke.yaml"
VALIDATED = ["data.validation_prompts=4", "rl.validation={every: 2, source: validation}"]
RL = [SMOKE, "chain=rl", "method=luffy", *VALIDATED, "difficulty={policy: base, num_samples: 2}"]


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_bench_measures_every_stage_and_plans_show_its_times(tmp_path: Path, capsys) -> None:
    where = ["--workspace", str(tmp_path)]
    assert main(["bench", *RL, "--steps", "2", "--response-tokens", "20", *where]) == EXIT_OK
    shown = capsys.readouterr().out
    for words in (
        "data: the run's own prompts and traces",
        "policy: random weights in the shape of model.architecture",
        "base (4 steps)",
        "rl (2 steps)",
        "20 tokens on average, as given by --response-tokens (20 tokens each in the measurement)",
        "a product of float32 matrices, measured in the same process",
        "a validation  ",
        "difficulty (",
        "evaluate_rl: as evaluate_base",
        "report: not measured",
    ):
        assert words in shown
    # Nothing is left but the prepared data and the times: no result of a stage that ran for a few steps.
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == ["prepare_data"]
    assert not any((tmp_path / "runs").iterdir())
    assert all(path.suffix == ".json" for path in (tmp_path / "benches").iterdir())

    assert main(["plan", *RL, "rl.steps=1000", *where]) == EXIT_OK
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "reused" in lines["prepare_data"]
    (rl,) = [json.loads(path.read_text()) for path in (tmp_path / "benches").glob("rl-*.json")]
    assert rl["unit_s"] > 0 and rl["fixed_s"] > 0 and rl["validation_s"] > 0
    (difficulty,) = [json.loads(path.read_text()) for path in (tmp_path / "benches").glob("difficulty-*.json")]
    assert difficulty["unit_s"] > 0 and difficulty["num_units"] == 2 * (24 - 4)
    assert any(unit in lines["rl"] for unit in ("m", "h"))
    assert lines["times:"].startswith("times: bench of ")


@needs_vllm
def test_a_stage_that_cannot_run_gives_its_reason_and_the_others_are_measured(tmp_path: Path, capsys) -> None:
    # The engine says so when RL starts.
    refused = ["rl.engine=vllm", "execution.vllm.max_num_batched_tokens=8"]
    code = main(["bench", *RL[:3], *refused, "--steps", "2", "--workspace", str(tmp_path)])
    shown = capsys.readouterr().out
    assert code == EXIT_FAILURE
    (line,) = [line for line in shown.splitlines() if line.startswith("rl: not measured: ")]
    assert "max_num_batched_tokens: 8 is less than one sequence" in line
    assert "evaluate_base (" in shown and "base (4 steps)" in shown


def test_a_comparison_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    code = main(["bench", "exp_configs/compare_arithmetic.yaml", "--workspace", str(tmp_path)])
    assert code == EXIT_USER_ERROR
    assert "is a comparison of methods" in capsys.readouterr().err
