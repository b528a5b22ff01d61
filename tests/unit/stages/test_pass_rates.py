"""The stages `difficulty` and `sample`: which prompts and traces are kept, and what is said of them."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from synthetic.answered_stage import measuring, number_in, progress_of, sampling, stage_context, use, write_inputs
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer

from luffy.config.environment import GuessNumberEnvironment
from luffy.config.training import ModelTeacher
from luffy.data.answer_cards import SampleCard, read_card, read_pass_rates
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.templates import decode
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages import difficulty, sample
from luffy.types import Trace

pytestmark = pytest.mark.usefixtures("shared_graders")
measure_in, sample_in = partial(stage_context, "difficulty"), partial(stage_context, "sample_1")


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    return write_inputs(tmp_path, "base/0123abcd")


def wrong(prompt: str, seed: int) -> str:
    return "\\boxed{77}"


def endlessly_right(prompt: str, seed: int) -> str:
    return f"\\boxed{{{number_in(prompt) + 1}}}{' 1' * 20}"


def rates(out: Path) -> dict[str, dict]:
    return {row["uid"]: row for row in pq.read_table(out / "pass_rates.parquet").to_pylist()}


def test_prompts_outside_the_bounds_are_left_out_and_the_others_are_as_they_were(tmp_path, inputs, monkeypatch):
    asked: dict[int, int] = {}

    def graded(prompt: str, seed: int) -> str:
        """Answers the prompt `i +1` correctly the first `i` times: pass rates 0, 1/4, ... 1, 1."""
        number = number_in(prompt)
        asked[number] = asked.get(number, 0) + 1
        return f"\\boxed{{{number + 1}}}" if asked[number] <= number else wrong(prompt, seed)

    use(monkeypatch, graded)
    out = tmp_path / "out"
    result = difficulty.run(measuring(), measure_in(out, inputs))
    found = {uid: row["num_correct"] for uid, row in rates(out).items()}
    assert found == {"p0": 0, "p1": 1, "p2": 2, "p3": 3, "p4": 4, "p5": 4}
    assert read_prompts(out / "train.parquet") == read_prompts(inputs["data"] / "train.parquet")[1:4]
    assert result.metrics["prompts/too_easy"] == 2
    last = progress_of(out)
    assert (last.step, last.total, last.metrics["reward"]) == (24, 24, pytest.approx(14 / 24))
    assert (out / "tokenizer" / "tokenizer_config.json").is_file()


def test_a_teacher_is_measured_in_place_of_the_policy(tmp_path, inputs, monkeypatch):
    """From its folder, under its own tokenizer; the policy is no input. Two of three: it may teach."""
    folder, opened = tmp_path / "teacher", []
    shutil.copytree(inputs["model"] / "model", folder)

    def even_numbers(prompt: str, seed: int) -> str:
        return f"\\boxed{{{number_in(prompt) + 1}}}" if number_in(prompt) % 2 == 0 else wrong(prompt, seed)

    engine = use(monkeypatch, even_numbers)
    monkeypatch.setattr(
        TransformersEngine, "from_folder", lambda path, dtype, batch_size: opened.append((path, dtype)) or engine
    )
    teacher = ModelTeacher(kind="model", path=str(folder), dtype="bfloat16")
    settings = measuring(num_samples=3, min_pass_rate=0.0, max_pass_rate=1.0)
    out = tmp_path / "out"
    context = measure_in(out, {"data": inputs["data"]})
    result = difficulty.run(settings.model_copy(update={"teacher": teacher}), context)
    assert opened == [(folder, "bfloat16")]
    assert read_pass_rates(out / "pass_rates.parquet") == {f"p{i}": float(i % 2 == 0) for i in range(6)}
    assert read_prompts(out / "train.parquet") == read_prompts(inputs["data"] / "train.parquet")
    assert json.loads((out / "card.json").read_text())["policy"] == str(folder)
    assert result.metrics["pass_rate"] == 0.5
    build_tokenizer(["another"] * 4).save_pretrained(folder)  # RL could not have it as a teacher
    with refused(f"difficulty.teacher: the tokenizer of {folder} is not the policy's", error=DataError):
        difficulty.run(settings.model_copy(update={"teacher": teacher}), measure_in(tmp_path / "again", inputs))


@pytest.mark.parametrize(
    ("stage", "settings", "script", "named"),
    [
        (difficulty, measuring(), wrong,
         ("of 6", "6 pass rates", "difficulty.min_pass_rate 0.25", "difficulty.max_pass_rate 0.75", "0 to 0")),
        (sample, sampling(), wrong, ("round 1", "6 prompts x 4", "24 wrong", "0 %", "sample.num_samples")),
        (sample, sampling(), endlessly_right, ("24 correct", "sample.max_response_tokens")),
    ],
)  # fmt: skip
def test_nothing_left_is_one_line_and_costs_no_second_draw(
    tmp_path, inputs, monkeypatch, stage, settings, script, named
):
    first = use(monkeypatch, script)
    context = stage_context("sample_1" if stage is sample else "difficulty", tmp_path / "out", inputs)
    with refused(*named, error=DataError):
        stage.run(settings, context)
    assert len(first.requests) == 24
    again = use(monkeypatch, script)
    with refused(*named, error=DataError):
        stage.run(settings, context)
    assert again.requests == []


def test_the_answers_that_are_kept_say_who_wrote_them_and_how(tmp_path, inputs, monkeypatch):
    asked: dict[int, int] = {}

    def script(prompt: str, seed: int) -> str:
        """Prompt 0 is never solved; of the others, the third answer is the second again and the fourth is cut."""
        number = number_in(prompt)
        asked[number] = asked.get(number, 0) + 1
        if number == 0:
            return wrong(prompt, seed)
        right = f"\\boxed{{{number + 1}}}"
        return (f"1 {right}", f"2 {right}", f"2  {right}", f"{right}{' 1' * 20}")[asked[number] - 1]

    use(monkeypatch, script)
    out = tmp_path / "out"
    result = sample.run(sampling(), sample_in(out, inputs))
    sampled = read_prompts(out / "sampled.parquet")
    assert [prompt.uid for prompt in sampled] == [f"p{i}" for i in range(1, 6)]
    assert [trace.text for trace in sampled[0].traces] == ["1 \\boxed{2}", "2 \\boxed{2}"]
    assert sampled[0].traces[0] == Trace(
        "1 \\boxed{2}", "policy", True, (0.0,) * 6, model="base/0123abcd", decoding="temperature 1", num_tokens=6
    )
    original = {prompt.uid: prompt for prompt in read_prompts(inputs["data"] / "train.parquet")}
    for prompt in sampled:
        assert dataclasses.replace(prompt, traces=original[prompt.uid].traces) == original[prompt.uid]
    assert (len(rates(out)), "fit" in rates(out)["p0"], rates(out)["p0"]["num_correct"]) == (6, False, 0)
    card = read_card(out / "card.json", SampleCard)
    assert (card.kept.prompts, card.kept.traces, card.kept.with_logprobs, card.rates.prompts) == (5, 10, 10, 6)
    assert result.metrics["traces/kept"] == 10


def test_log_probabilities_are_left_out_where_the_text_is_encoded_as_other_tokens(tmp_path, inputs, monkeypatch):
    class CharacterEngine(ScriptedEngine):
        """Samples `boxed` character by character, which the tokenizer would write as one token."""

        def _complete(self, request: RolloutRequest, params: SamplingParams) -> Completion:
            whole = super()._complete(request, params)
            encode, text = tiny_tokenizer(), decode(tiny_tokenizer(), whole.token_ids)
            ids = tuple(each for letter in text for each in encode(letter, add_special_tokens=False)["input_ids"])
            return dataclasses.replace(whole, token_ids=(*ids, whole.token_ids[-1]), logprobs=(0.0,) * (len(ids) + 1))

    engine = CharacterEngine(tiny_tokenizer(), lambda prompt, seed: f"\\boxed{{{number_in(prompt) + 1}}}")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    sample.run(sampling(num_samples=1), sample_in(tmp_path / "out", inputs))
    traces = [trace for prompt in read_prompts(tmp_path / "out/sampled.parquet") for trace in prompt.traces]
    assert [(trace.logprobs, trace.num_tokens) for trace in traces] == [(None, 10)] * 6
    # Truncated responses are counted.
    use(monkeypatch, lambda prompt, seed: "1" * 20)
    result = difficulty.run(measuring(min_pass_rate=0.0, max_response_tokens=12), measure_in(tmp_path / "cut", inputs))
    assert (result.metrics["truncated_share"], result.metrics["pass_rate"]) == (1.0, 0.0)
    row = rates(tmp_path / "cut")["p0"]
    assert (row["mean_tokens"], row["num_truncated"]) == (12.0, 4)


def test_right_games_of_the_policy_become_traces_of_their_turns(tmp_path, inputs, monkeypatch):
    """The scripted policy always guesses 3: it finds 3 at once, and everything else never."""
    games = [
        dataclasses.replace(prompt, ground_truth=str(number), grader="exact", extra_info={"number": number})
        for number, prompt in enumerate(problems(6))
    ]
    write_prompts(inputs["data"] / "train.parquet", games)
    use(monkeypatch, lambda prompt, seed: "3")
    played = GuessNumberEnvironment.model_validate({"kind": "guess_number", "limits": {"max_turns": 2}})
    own = sampling(num_samples=2, max_response_tokens=40, environment=played)
    sample.run(own, sample_in(tmp_path / "out", inputs))
    (sampled,) = read_prompts(tmp_path / "out" / "sampled.parquet")
    assert (sampled.uid, [trace.text for trace in sampled.traces]) == ("p3", ["3"])
    assert sampled.traces[0].num_tokens == 2
    found = rates(tmp_path / "out")
    assert (found["p3"]["num_correct"], found["p4"]["num_correct"]) == (2, 0)
