"""The stage `difficulty` with an engine that says what it is told to: what is kept, resumed, adopted and refused.

`tests/integration/test_engine_pool.py` measures by vLLM.
"""

import dataclasses
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from synthetic.answered_stage import (
    assert_an_interrupted_stage_asks_for_the_rest_alone,
    messages_of,
    number_in,
    prompts_and_policy,
    recorded,
    stage_context,
    use,
)

from luffy.config.answers import DifficultyConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import DifficultySettings
from luffy.data.parquet import read_prompts, write_prompts
from luffy.errors import DataError
from luffy.pipeline.events import EventReader
from luffy.stages.difficulty import run

context_in = partial(stage_context, "difficulty")
OUTPUTS = ("pass_rates.parquet", "train.parquet", "card.json", "card.md")


def settings(**changes: object) -> DifficultySettings:
    values = {
        "num_samples": 4, "temperature": 1.0, "max_response_tokens": 12, "min_pass_rate": 0.25, "max_pass_rate": 0.75,
        "engine": "transformers", **changes,
    }  # fmt: skip
    return DifficultySettings(
        seed=7, dtype="float32", difficulty=DifficultyConfig.model_validate(values), grading=GradingConfig()
    )


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    return prompts_and_policy(tmp_path, "base")


def by_seed(prompt: str, seed: int) -> str:
    return f"\\boxed{{{number_in(prompt) + seed % 2}}}"


class Graded:
    """Answers the prompt `i +1` correctly the first `i` times, then wrongly: pass rates 0, 1/4, ... 1, 1."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}

    def __call__(self, prompt: str, seed: int) -> str:
        number = number_in(prompt)
        self.asked[number] = self.asked.get(number, 0) + 1
        return f"\\boxed{{{number + 1}}}" if self.asked[number] <= number else "\\boxed{77}"


def rates(out: Path) -> dict[str, int]:
    return {row["uid"]: row["num_correct"] for row in pq.read_table(out / "pass_rates.parquet").to_pylist()}


def test_prompts_outside_the_bounds_are_left_out_and_the_others_are_as_they_were(tmp_path, inputs, monkeypatch):
    engine = use(monkeypatch, Graded())
    result = run(settings(), context_in(tmp_path / "out", inputs))
    assert rates(tmp_path / "out") == {"p0": 0, "p1": 1, "p2": 2, "p3": 3, "p4": 4, "p5": 4}
    assert read_prompts(tmp_path / "out" / "train.parquet") == read_prompts(inputs["data"] / "train.parquet")[1:4]
    assert (len(engine.requests), engine.closed) == (24, True)
    assert result.metrics["prompts/too_easy"] == 2
    last = EventReader(tmp_path / "out" / "events.jsonl").read()[-1]
    assert (last.step, last.total, last.metrics["reward"]) == (24, 24, pytest.approx(14 / 24))
    assert all((tmp_path / "out" / output).exists() for output in result.outputs)
    assert (tmp_path / "out" / "tokenizer" / "tokenizer_config.json").is_file()


def test_a_draw_depends_on_seed_uid_and_sample_alone(tmp_path, inputs, monkeypatch):
    def seeds(name: str, keep: int, num_samples: int, batch: int) -> dict[tuple[int, ...], list[int]]:
        kept = read_prompts(inputs["data"] / "train.parquet")[-keep:]
        (tmp_path / name).mkdir()
        write_prompts(tmp_path / name / "train.parquet", kept)
        (tmp_path / name / "tokenizer").symlink_to(inputs["data"] / "tokenizer")
        engine = use(monkeypatch, lambda prompt, seed: "\\boxed{1}")
        context = context_in(tmp_path / f"{name}_out", {**inputs, "data": tmp_path / name})
        execution = ExecutionConfig(rollout_batch_size=batch)
        wide = settings(num_samples=num_samples, min_pass_rate=0.0, max_pass_rate=1.0)
        run(wide, dataclasses.replace(context, execution=execution))
        found: dict[tuple[int, ...], list[int]] = {}
        for request in engine.requests:
            found.setdefault(request.prompt_ids, []).append(request.seed)
        return found

    all_of_them, some = seeds("all", 6, 4, 8), seeds("some", 2, 3, 2)
    assert len({seed for each in all_of_them.values() for seed in each}) == 24
    assert {ids: sorted(all_of_them[ids][:3]) for ids in some} == {ids: sorted(some[ids]) for ids in some}


def test_an_interrupted_stage_asks_for_the_rest_alone_and_ends_with_the_same_bytes(tmp_path, inputs, monkeypatch):
    interrupted = lambda out: run(settings(), context_in(out, inputs))  # noqa: E731
    assert_an_interrupted_stage_asks_for_the_rest_alone(interrupted, by_seed, tmp_path, OUTPUTS, monkeypatch)


def test_other_bounds_start_from_what_was_drawn_and_other_responses_do_not(tmp_path, inputs, monkeypatch):
    def run_as(name: str, consumed: str, **changes: object) -> int:
        engine, chosen = use(monkeypatch, by_seed), settings(**changes)
        run(chosen, recorded(context_in(tmp_path / "stages" / name, inputs), chosen, consumed))
        return len(engine.requests)

    assert run_as("a", "x") == 24
    assert run_as("b", "x", min_pass_rate=0.0, max_pass_rate=1.0) == 0
    assert rates(tmp_path / "stages" / "a") == rates(tmp_path / "stages" / "b")
    assert run_as("c", "x", max_response_tokens=11) == 24
    assert run_as("d", "other data", min_pass_rate=0.0) == 24
    assert messages_of(tmp_path / "stages" / "b") == ["reuses the responses sampled for other bounds in a"]


def test_a_range_that_leaves_nothing_is_one_line_and_costs_no_second_draw(tmp_path, inputs, monkeypatch):
    use(monkeypatch, lambda prompt, seed: "\\boxed{77}")
    with pytest.raises(DataError) as refusal:
        run(settings(), context_in(tmp_path / "out", inputs))
    assert str(refusal.value) == (
        "difficulty: no prompt is left of 6: 6 pass rates are below difficulty.min_pass_rate 0.25, 0 above "
        "difficulty.max_pass_rate 0.75 (they range from 0 to 0); widen the range"
    )
    again = use(monkeypatch, by_seed)
    with pytest.raises(DataError, match="no prompt is left"):
        run(settings(), context_in(tmp_path / "out", inputs))
    assert again.requests == []


def test_prompts_that_leave_no_room_stop_the_stage_before_anything_is_generated(tmp_path, inputs, monkeypatch):
    engine = use(monkeypatch, by_seed)
    with pytest.raises(DataError, match=r"6 of 6 prompts do not fit: .* lower data.max_prompt_tokens or difficulty"):
        run(settings(max_response_tokens=45), context_in(tmp_path / "out", inputs))
    assert engine.requests == []


def test_truncated_responses_are_counted(tmp_path, inputs, monkeypatch):
    use(monkeypatch, lambda prompt, seed: "1" * 20)
    result = run(settings(min_pass_rate=0.0), context_in(tmp_path / "out", inputs))
    assert (result.metrics["truncated_share"], result.metrics["pass_rate"]) == (1.0, 0.0)
    row = pq.read_table(tmp_path / "out" / "pass_rates.parquet").to_pylist()[0]
    assert (row["mean_tokens"], row["num_truncated"]) == (12.0, 4)
