"""A reward model with a head grades data, an RL run and an evaluation, and an interruption costs no bit."""

import json
from filecmp import cmp
from pathlib import Path

import pytest
from synthetic.reward_models import reward_folder

from luffy.config import load_experiment
from luffy.config.grading import RewardModelGrader
from luffy.data.parquet import read_prompts
from luffy.evaluation.sample_files import SAMPLES_FILE, read_sample_records
from luffy.grading.reward_model import RewardModel, RewardModels
from luffy.pipeline.events import EventWriter
from luffy.pipeline.graph import build_graph
from luffy.stages import base, evaluate, prepare_data, rl
from luffy.stages.program import StageContext, StageResult
from luffy.tracking.metrics import read_metrics, without_times
from luffy.types import Message

pytestmark = pytest.mark.slow
STAGES = {"prepare_data": prepare_data, "base": base, "rl": rl, "evaluate": evaluate}


def run_stage(stage: str, out: Path, reward: Path, inputs: dict[str, Path]) -> StageResult:
    """Run one stage of the smoke experiment in this process."""
    changes = (
        "chain=rl", "method=on_policy", f"grading.kind={{kind: reward_model, path: '{reward}', correct_from: 0.0}}",
        "rl={steps: 4, prompts_per_step: 2, prompts_per_update: 1, max_response_tokens: 64}",
        "evaluation.only=[longer]",
    )  # fmt: skip
    config = load_experiment(Path("exp_configs/smoke.yaml"), changes)
    node = next(node for node in build_graph(config) if node.stage == stage)
    out.mkdir(parents=True, exist_ok=True)
    context = StageContext(
        out, inputs, "key", node.name, config.execution, config.tracking, EventWriter(out / "events.jsonl"), None
    )
    return STAGES[stage].run(node.settings, context)


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chain")
    reward, data, model = reward_folder(folder / "reward"), folder / "data", folder / "base"
    run_stage("prepare_data", data, reward, {})
    run_stage("base", model, reward, {"data": data})
    run_stage("rl", folder / "rl", reward, {"data": data, "model": model})
    return {"reward": reward, "data": data, "model": model, "rl": folder / "rl"}


def score(chain: dict[str, Path], messages: tuple[Message, ...], response: str) -> float:
    model = RewardModel(RewardModelGrader(path=str(chain["reward"]), correct_from=0.0), "cpu")
    return model.scores([model.encode((*messages, Message("assistant", response)))[0]], 1)[0]


def test_an_interrupted_run_ends_with_the_same_bits(chain, tmp_path, monkeypatch):
    grade, left = RewardModels.grade, iter(range(3))

    def grade_or_fail(models, requests):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return grade(models, requests)

    inputs = {"data": chain["data"], "model": chain["model"]}
    monkeypatch.setattr(RewardModels, "grade", grade_or_fail)
    with pytest.raises(KeyboardInterrupt):
        run_stage("rl", tmp_path, chain["reward"], inputs)
    monkeypatch.setattr(RewardModels, "grade", grade)
    assert run_stage("rl", tmp_path, chain["reward"], inputs).resumed_from == 2
    rows = [[without_times(row) for row in read_metrics(out / "metrics.jsonl")] for out in (chain["rl"], tmp_path)]
    assert json.dumps(rows[0]) == json.dumps(rows[1])
    assert cmp(chain["rl"] / "model/model.safetensors", tmp_path / "model/model.safetensors", shallow=False)
    assert len({row["reward/mean"] for row in rows[0]}) == 4


def test_an_evaluation_has_the_scores_and_data_the_verdicts(chain, tmp_path):
    run_stage("evaluate", tmp_path, chain["reward"], {"data": chain["data"], "model": chain["rl"]})
    records = list(read_sample_records(tmp_path / SAMPLES_FILE))
    prompts = {prompt.uid: prompt.messages for prompt in read_prompts(chain["data"] / "suites/longer.parquet")}
    assert len(records) == 24
    for record in records[::6]:
        wanted = score(chain, prompts[record.uid], record.graded_text)
        assert float(record.reason.rpartition(" ")[2]) == pytest.approx(wanted, abs=1e-4)
        assert record.correct == (wanted >= 0)
    for prompt in read_prompts(chain["data"] / "train.parquet")[:3]:
        assert all(score(chain, prompt.messages, trace.reply) >= 0 for trace in prompt.traces if trace.verified)
