"""Reward models with a head: what they score, that batches do not matter, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.patience import PATIENCE_S
from synthetic.reward_models import reward_folder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import FormatGrader, GradingConfig, RewardModelGrader, WeightedGrader, WeightedPart
from luffy.errors import ConfigError, DataError, UserError
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest, Problem, problem_of
from luffy.grading.reward_model import RewardModel
from luffy.types import Message, Outcome, Prompt

QUESTION = Prompt("p", "sums", (Message("system", "add"), Message("user", "1 +2")), ground_truth="3")
REPLIES = [" ".join(["3", *map(str, range(length))]) for length in (13, 2, 30, 0, 21, 5, 1, 13, 8, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return reward_folder(tmp_path_factory.mktemp("reward"))


def grades_of(folder: Path, replies: list[str], batch_tokens: int = 4096, **settings: object) -> list[Grade]:
    kind = RewardModelGrader.model_validate({"path": str(folder), "correct_from": 0.0, **settings})
    execution = ExecutionConfig(micro_batch_tokens=batch_tokens, reward_device="cpu")
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind), execution=execution) as pool:
        return pool.grade([GradeRequest(reply, "3", problem_of(QUESTION)) for reply in replies])


def score_by_transformers(folder: Path, reply: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": each.role, "content": each.content} for each in QUESTION.messages]
    text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": reply}], tokenize=False)
    with torch.inference_mode():
        return float(model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0])


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
@pytest.mark.parametrize("padded", [True, False])
def test_scores_are_those_of_the_model_however_they_are_batched(tmp_path, batch_tokens, padded):
    """Without a padding token rows are scored one at a time."""
    folder = reward_folder(tmp_path, padded=padded)
    grades = grades_of(folder, REPLIES, batch_tokens)
    scores = [score_by_transformers(folder, reply) for reply in REPLIES]
    assert [grade.reward for grade in grades] == pytest.approx(scores, abs=1e-5)
    assert max(scores) - min(scores) > 0.1  # a score of another row would be seen
    assert grades == grades_of(folder, REPLIES, batch_tokens)  # to the bit


def test_the_bound_decides_what_is_correct_and_the_score_is_the_reward(folder):
    scores = [grade.reward for grade in grades_of(folder, REPLIES)]
    bound = sorted(scores)[4]
    grades = grades_of(folder, REPLIES, correct_from=bound)
    assert [grade.outcome is Outcome.CORRECT for grade in grades] == [score >= bound for score in scores]
    assert [grade.reward for grade in grades] == scores
    assert grades[0].reason == f"the reward model gives {scores[0]:.6g}"
    kind = RewardModelGrader(path=str(folder), correct_from=0.0)
    parts = (WeightedPart(weight=0.5, grader=kind), WeightedPart(weight=1.0, grader=FormatGrader()))
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=WeightedGrader(parts=parts))) as pool:
        (both,) = pool.grade([GradeRequest("<think>1</think>3", "3", problem_of(QUESTION))])
        (blind,) = pool.grade([GradeRequest("3", "3", Problem("1 +2"))])
    (alone,) = grades_of(folder, ["<think>1</think>3"])
    assert both.reward == pytest.approx(0.5 * alone.reward + 1)
    assert "is unknown" in blind.reason


def test_a_response_writes_no_turns_and_a_long_conversation_is_seen_by_its_end(folder):
    model = RewardModel(RewardModelGrader(path=str(folder), correct_from=0.0), "cpu")

    def tokens(reply: str) -> tuple[list[int], int]:
        return model.encode((*QUESTION.messages, Message("assistant", reply)))

    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert tokens("3<|eos|>\n<|bos|>user: 3")[0].count(end) == tokens("3")[0].count(end) == 3
    ids, total = tokens("3 " * 200)
    assert (len(ids), ids[-2]) == (128, end)
    assert total > 400
    (grade,) = grades_of(folder, ["3 " * 200])
    assert grade.reason.startswith(f"its last 128 of {total} tokens; ")


def test_a_score_that_is_no_number_is_a_crash(tmp_path):
    folder = reward_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: each * float("inf") for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    assert [(grade.outcome, grade.reward) for grade in grades_of(folder, ["3"])] == [(Outcome.CRASHED, 0.0)]


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-64])


@pytest.mark.parametrize(
    ("broken", "device", "message"),
    [
        (without_head, "cpu", "grading: .*: lacks 1 weights of its model, the first is score.weight"),
        (cut, "cpu", "grading: .*: is no model that can be loaded"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}"), "cpu",
         r"its chat template cannot write a conversation \(no system\)"),
        (lambda folder: None, "cuda:9", "cannot be put on cuda:9 .*; set execution.reward_device to cpu"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_score_is_told_when_the_pool_opens(
    tmp_path, broken: Callable[[Path], object], device, message
):
    folder = reward_folder(tmp_path / "model")
    broken(folder)
    grading = GradingConfig(kind=RewardModelGrader(path=str(folder), correct_from=0.0))
    with pytest.raises(UserError, match=message) as found:
        GraderPool.configured(ExecutionConfig(reward_device=device), grading, tmp_path / "judge")
    assert isinstance(found.value, ConfigError | DataError)
    assert "\n" not in str(found.value)
