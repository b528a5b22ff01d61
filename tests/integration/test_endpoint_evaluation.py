"""The whole chain of a model behind an API, by the real stage programs: the endpoint dies and is there again."""

import json
from pathlib import Path

import pytest
from synthetic.endpoint import CHAT, Endpoint, by_seed, mortal, refusal
from toy_run import Recorder

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.derived import evaluation_of
from luffy.errors import StageFailed
from luffy.evaluation.results import read_results
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace

pytestmark = pytest.mark.slow
SMOKE = Path(__file__).parents[2] / "exp_configs" / "smoke.yaml"
KEY = "sk-hunter2"
BEFORE_IT_DIES = 60
NODES = ("prepare_data", "base", "evaluate_base", "report")


def evaluate(root: Path, url: str) -> dict[str, Recorder]:
    """What happened to each stage of the chain that flows/evaluate_checkpoint.py runs."""
    own = load_experiment(SMOKE, ["execution.server={max_retries: 1, api_key_variable: SERVED_KEY}"])
    config = evaluation_of(own, "api:org/gpt-x", urls=[url], request={"reasoning_effort": "low"})
    # Without the code in the keys: an edit between two starts must not make them different stages.
    experiment = open_experiment(config, Workspace(root), code=lambda rooms: {})
    run = ExperimentRun(experiment, experiment.workspace.new_run("smoke", {}), stage_command)
    recorders = {name: Recorder() for name in NODES}
    for name, recorder in recorders.items():
        run.execute(name, recorder)
    return recorders


def test_an_endpoint_that_dies_costs_nothing_and_its_model_is_on_the_leaderboard(
    tmp_path, request, monkeypatch, capsys
):
    monkeypatch.setenv("SERVED_KEY", KEY)
    request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
    dies = mortal(BEFORE_IT_DIES, by_seed, refusal(503, f"out of memory for {KEY}"))
    dying, healthy = Endpoint(dies, (CHAT,), KEY), Endpoint(by_seed, (CHAT,), KEY)
    with pytest.raises(
        StageFailed, match=r"status 503: out of memory for \*\*\*; finished responses are saved"
    ) as failed:
        evaluate(tmp_path, f"{dying.url}/v1")
    evaluate(tmp_path, healthy.url)
    (directory,) = (tmp_path / "stages" / "evaluate").iterdir()
    rows = read_results(directory / "results.json").rows
    assert len(healthy.asked) == sum(row.num_problems * row.num_samples for row in rows) - BEFORE_IT_DIES
    assert (tmp_path / "runs" / "smoke-2").is_dir()
    dying.close()
    healthy.close()
    again = evaluate(tmp_path, healthy.url)
    assert {recorder.texts("planned")[0] for recorder in again.values()} == {"reused"}

    assert main(["show", "--leaderboard", "--workspace", str(tmp_path)]) == 0
    tables = json.loads((tmp_path / "leaderboard.json").read_text())["tables"]
    assert {row["checkpoint"] for table in tables for row in table["rows"]} == {"org/gpt-x (API)"}
    assert "org/gpt-x (API)" in capsys.readouterr().out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in str(failed.value)
