"""What a bench makes of the stages that it ran for a few steps, and how it shortens them."""

import pytest

from luffy.config import load_experiment
from luffy.config.settings import CONFIGURE, RLSettings, SFTSettings
from luffy.costs.bench import Measured, shortened, some_problems, training_cost
from luffy.data.parquet import read_prompts, write_prompts
from luffy.pipeline.events import Event
from luffy.types import Message, Prompt

VALIDATED = ["data.validation_prompts=4", "rl.validation={every: 4, source: validation}"]


def settings_of(stage: str, *overrides: str) -> SFTSettings | RLSettings:
    settings = CONFIGURE[stage](load_experiment("smoke", overrides))
    assert isinstance(settings, SFTSettings | RLSettings)
    return settings


def measured(*step_s: float, wall_s: float, save_s: float = 0.0, validation_s: float = 0.0) -> Measured:
    """A stage with steps of so many seconds and a checkpoint before its last report, measured at both ends."""
    rows = [
        {"step": number + 1, "perf/step_s": seconds, "perf/tokens_per_s": 100.0}
        for number, seconds in enumerate(step_s)
    ]
    rows = [{**row, "perf/peak_memory_gib": 2.0 + row["step"]} for row in rows]
    if validation_s:
        rows = [
            {"step": 0, "perf/validation_s": validation_s},
            *rows[:-1],
            {**rows[-1], "perf/validation_s": validation_s},
        ]
    ends = [sum(step_s[: number + 1]) for number in range(len(step_s))]
    ends[-1] += save_s + validation_s
    return Measured(wall_s, rows, [Event("progress", time, 1, step=number + 1) for number, time in enumerate(ends)])


def test_the_time_of_a_stage_is_that_of_its_steps_checkpoints_validations_and_of_its_start():
    # 9 + 2 + 2 s of steps, 0.5 s for the checkpoint and 3 s for each of two validations: 13.5 s of 30 remain, and the
    # first step took 7 s more than the others.
    run = measured(9.0, 2.0, 2.0, wall_s=30.0, save_s=0.5, validation_s=3.0)
    cost = training_cost("rl", run, 0, 10, settings_of("rl", *VALIDATED), save_every=4)
    # Checkpoints after steps 4, 8 and 10; validations before the first step and after 4, 8 and 10.
    assert cost.seconds == pytest.approx((30 - 3 * 2 - 0.5 - 2 * 3) + 10 * 2 + 3 * 0.5 + 4 * 3)
    assert cost.words == "10 x 2.00 s a step + 3 x 0.50 s a checkpoint + 4 x 3.00 s a validation + 17.5 s once"
    assert (cost.state, cost.memory) == ("measured", "5.00 GiB")
    assert cost.times is not None and cost.times.step_s == 2.0 and cost.times.tokens_per_s == 100.0


def test_with_rollouts_ahead_of_the_trainer_neither_the_first_nor_the_last_steps_count():
    run = measured(9.0, 9.0, 2.0, 2.0, 1.0, wall_s=23.0)
    assert training_cost("rl", run, 1, 1, settings_of("rl"), save_every=4).words.startswith("1 x 2.00 s a step")


def test_sft_saves_nothing_after_its_last_step_and_of_unknown_length_has_no_time():
    run = measured(2.0, 2.0, wall_s=4.5, save_s=0.5)
    assert "2 x 0.50 s a checkpoint" in training_cost("sft", run, 0, 12, settings_of("sft"), save_every=4).words
    cost = training_cost("sft", run, 0, None, settings_of("sft"), save_every=4)
    assert (cost.seconds, cost.state) == (None, "unknown")
    assert "depends on traces that are yet to be made" in cost.words


def test_a_shortened_stage_makes_all_of_its_steps_and_is_measured_before_and_after_them():
    sft = shortened(settings_of("sft", "sft={steps: 9, epochs: null, max_tokens: 10}"), 5)
    best = "rl.validation={every: 2, source: validation, keep_best: {}, patience: 1}"
    rl = shortened(settings_of("rl", "rl.max_tokens=10", VALIDATED[0], best), 6)
    assert isinstance(sft, SFTSettings) and isinstance(rl, RLSettings) and rl.validation is not None
    assert (sft.sft.steps, sft.sft.max_tokens, rl.rl.steps, rl.rl.max_tokens) == (5, None, 6, None)
    schedule = rl.validation.schedule
    assert (schedule.every, schedule.keep_best, schedule.patience) == (6, None, None)


def test_a_batch_of_each_suite_is_left_and_everything_else_is_there(tmp_path):
    data = tmp_path / "data"
    (data / "suites").mkdir(parents=True)
    prompts = [Prompt(str(number), "s", (Message("user", "1+1"),), "2") for number in range(30)]
    files = {name: data / "suites" / f"{name}.parquet" for name in ("often", "once")}
    for file in files.values():
        write_prompts(file, prompts)
    (data / "card.json").write_text("{}")
    assert some_problems(data, files, {"often": 32, "once": 1}, 16, tmp_path / "some") == (32 + 16, 30 * 32 + 30)
    assert [len(read_prompts(tmp_path / "some" / "suites" / f"{name}.parquet")) for name in files] == [1, 16]
    assert (tmp_path / "some" / "card.json").read_text() == "{}"
