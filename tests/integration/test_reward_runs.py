"""A reward model with a head grades data, an RL run and an evaluation."""

from pathlib import Path

import pytest
import test_methods
from synthetic.reward_models import reward_folder

from luffy.config import load_experiment
from luffy.config.grading import RewardModelGrader
from luffy.data.parquet import read_prompts
from luffy.evaluation.sample_files import SAMPLES_FILE, read_sample_records
from luffy.grading.reward_model import RewardModel
from luffy.pipeline.graph import build_graph
from luffy.stages.program import StageResult
from luffy.types import Message

pytestmark = pytest.mark.slow


def run_stage(stage: str, out: Path, reward: Path, inputs: dict[str, Path]) -> StageResult:
    changes = (
        "chain=rl", "method=on_policy", f"grading.kind={{kind: reward_model, path: '{reward}', correct_from: 0.0}}",
        "rl={steps: 4, prompts_per_step: 2, prompts_per_update: 1, max_response_tokens: 64}",
        "evaluation.only=[longer]",
    )  # fmt: skip
    config = load_experiment(Path("exp_configs/smoke.yaml"), changes)
    return test_methods.run_stage(next(n for n in build_graph(config) if n.stage == stage), config, out, inputs)


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
