"""On-policy distillation from a teacher on a real vLLM server: the training of one whose folder is at hand."""

import shutil
from pathlib import Path

import pytest
import torch
from installed import needs_vllm
from safetensors.torch import load_file, save_file
from toy_run import Recorder
from vllm_serving import NAME, served_by_vllm

from luffy.config import load_experiment
from luffy.errors import StageFailed
from luffy.pipeline.experiment import Experiment, ExperimentRun, open_experiment
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace
from luffy.tracking.metrics import METRICS_FILE, read_metrics

pytestmark = [pytest.mark.slow, needs_vllm]
SMOKE = Path(__file__).parents[2] / "exp_configs" / "smoke.yaml"
KEY = "sk-hunter2"
NEAR = 1e-4
CHANGES = [
    "chain=rl",
    "method=opd",
    "model.architecture={hidden_size: 64, num_heads: 2}",  # vLLM needs heads of 32 on a CPU
    "base.steps=20",
    "rl.steps=2",
    "execution={num_threads: 1, retries: 0}",
]


def opened(workspace: Path, *overrides: str) -> Experiment:
    return open_experiment(load_experiment(SMOKE, [*CHANGES, *overrides]), Workspace(workspace))


def execute(experiment: Experiment, *stages: str) -> None:
    run = ExperimentRun(experiment, experiment.workspace.new_run("test", {}), stage_command)
    for stage in stages:
        run.execute(stage, Recorder())


@pytest.fixture
def teacher(tmp_path, request, monkeypatch) -> Path:
    """The base policy with some noise in its weights, beside the finished stages that RL needs."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
    experiment = opened(tmp_path, "rl.teacher={kind: model, path: nowhere}")
    execute(experiment, "prepare_data", "base")
    folder = tmp_path / "teacher"
    shutil.copytree(experiment.plan_node("base").directory / "model", folder)
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_served_teacher_teaches_as_its_folder_does(tmp_path, teacher):
    metrics, weights = {}, {}
    with served_by_vllm(teacher, tmp_path / "log.txt", KEY) as url:
        where = f"execution.rl_teacher={{urls: [{url}], api_key_variable: TEACHER_KEY}}"
        kinds = {
            "folder": (f"rl.teacher={{kind: model, path: {teacher}}}",),
            "served": (f"rl.teacher={{kind: served, name: {NAME}}}", where),
        }
        for kind, overrides in kinds.items():
            experiment = opened(tmp_path, *overrides)
            execute(experiment, "rl")
            directory = experiment.plan_node("rl").directory
            metrics[kind] = read_metrics(directory / METRICS_FILE)
            weights[kind] = load_file(directory / "model" / "model.safetensors")
        with pytest.raises(StageFailed, match="serves base, and not another"):
            execute(opened(tmp_path, "rl.teacher={kind: served, name: another}", where), "rl")
    name = "actor/distillation_reverse_kl"
    assert [row[name] for row in metrics["served"]] == pytest.approx([row[name] for row in metrics["folder"]], abs=NEAR)
    assert all(row[name] > 100 * NEAR and row["perf/teacher_s"] > 0 for row in metrics["served"])
    torch.testing.assert_close(weights["served"], weights["folder"], rtol=0, atol=NEAR)
    files = [path for path in (tmp_path / "stages").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
