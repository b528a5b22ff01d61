"""The stage `sample` with an engine that says what it is told to: traces, resumption, adoption and refusals."""

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
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer

from luffy.config.answers import SampleConfig
from luffy.config.environment import GuessNumberEnvironment
from luffy.config.grading import GradingConfig
from luffy.config.settings import SampleSettings
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.pass_rates import SampleCard, read_card
from luffy.data.templates import decode
from luffy.errors import DataError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.sample import run
from luffy.types import Trace

context_in = partial(stage_context, "sample_1")
OUTPUTS = ("pass_rates.parquet", "sampled.parquet", "card.json", "card.md")


def settings(number: int = 1, **changes: object) -> SampleSettings:
    values = {
        "num_samples": 4, "max_response_tokens": 16, "engine": "transformers",
        "keep": {"choose": "first", "max_per_prompt": 2}, **changes,
    }  # fmt: skip
    sample = SampleConfig.model_validate(values)
    return SampleSettings(seed=7, dtype="float32", sample=sample, grading=GradingConfig(), round=number)


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    return prompts_and_policy(tmp_path, "base/0123abcd")


def by_seed(prompt: str, seed: int) -> str:
    """Right or wrong, and written in one of several ways."""
    return f"{'+' * (seed % 3)}\\boxed{{{number_in(prompt) + seed // 3 % 2}}}"


def test_the_answers_that_are_kept_say_who_wrote_them_and_how(tmp_path, inputs, monkeypatch):
    def script(prompt: str, seed: int) -> str:
        """Prompt 0 is never solved; of the others, the third answer is the second again and the fourth is cut."""
        number = number_in(prompt)
        asked[number] = asked.get(number, 0) + 1
        if number == 0:
            return "\\boxed{77}"
        right = f"\\boxed{{{number + 1}}}"
        return (f"1 {right}", f"2 {right}", f"2  {right}", f"{right}{' 1' * 20}")[asked[number] - 1]

    asked: dict[int, int] = {}
    engine = use(monkeypatch, script)
    result = run(settings(), context_in(tmp_path / "out", inputs))
    sampled = read_prompts(tmp_path / "out" / "sampled.parquet")
    assert [prompt.uid for prompt in sampled] == [f"p{i}" for i in range(1, 6)]
    assert [trace.text for trace in sampled[0].traces] == ["1 \\boxed{2}", "2 \\boxed{2}"]
    assert sampled[0].traces[0] == Trace(
        "1 \\boxed{2}", "policy", True, (0.0,) * 6, model="base/0123abcd", decoding="temperature 1", num_tokens=6
    )
    original = {prompt.uid: prompt for prompt in read_prompts(inputs["data"] / "train.parquet")}
    for prompt in sampled:
        assert dataclasses.replace(prompt, traces=original[prompt.uid].traces) == original[prompt.uid]
    rows = pq.read_table(tmp_path / "out" / "pass_rates.parquet").to_pylist()
    assert (len(rows), "fit" in rows[0], rows[0]["num_correct"]) == (6, False, 0)
    card = read_card(tmp_path / "out" / "card.json", SampleCard)
    assert (card.kept.prompts, card.kept.traces, card.kept.with_logprobs, card.rates.prompts) == (5, 10, 10, 6)
    assert (len(engine.requests), engine.closed, result.metrics["traces/kept"]) == (24, True, 10)
    assert all((tmp_path / "out" / output).exists() for output in result.outputs)


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
    run(settings(num_samples=1), context_in(tmp_path / "out", inputs))
    traces = [trace for prompt in read_prompts(tmp_path / "out/sampled.parquet") for trace in prompt.traces]
    assert [(trace.logprobs, trace.num_tokens) for trace in traces] == [(None, 10)] * 6


def test_an_interrupted_stage_draws_nothing_twice_and_ends_with_the_same_bytes(tmp_path, inputs, monkeypatch):
    interrupted = lambda out: run(settings(), context_in(out, inputs))  # noqa: E731
    assert_an_interrupted_stage_asks_for_the_rest_alone(interrupted, by_seed, tmp_path, OUTPUTS, monkeypatch)


def test_what_is_sampled_depends_on_the_round_and_not_on_batches(tmp_path, inputs, monkeypatch):
    def sampled(name: str, number: int, batch: int) -> tuple[set[int], bytes]:
        engine = use(monkeypatch, by_seed)
        run(settings(number), context_in(tmp_path / name, inputs, batch))
        return {request.seed for request in engine.requests}, (tmp_path / name / "sampled.parquet").read_bytes()

    one, wide, other = sampled("one", 1, 4), sampled("wide", 1, 24), sampled("other", 2, 4)
    assert one == wide
    assert len(one[0]) == 24 and one[0].isdisjoint(other[0])


def test_another_rule_of_keeping_reuses_what_a_stage_that_is_not_discarded_sampled(tmp_path, inputs, monkeypatch):
    def run_as(name: str, **changes: object) -> int:
        engine, chosen = use(monkeypatch, by_seed), settings(**changes)
        run(chosen, recorded(context_in(tmp_path / "stages" / name, inputs), chosen))
        return len(engine.requests)

    assert run_as(".trash-a") == 24
    assert run_as("a") == 24
    assert run_as("b", keep={"choose": "shortest", "max_per_prompt": 1}) == 0
    assert run_as("c", temperature=0.5) == 24
    traces = [prompt.traces for prompt in read_prompts(tmp_path / "stages/b/sampled.parquet")]
    more = [prompt.traces for prompt in read_prompts(tmp_path / "stages/a/sampled.parquet")]
    assert all(len(each) == 1 for each in traces) and any(len(each) == 2 for each in more)
    assert messages_of(tmp_path / "stages/b") == ["reuses the responses sampled for another sample.keep in a"]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (lambda prompt, seed: "\\boxed{77}", r"round 1 produced no correct response to 6 prompts x 4 \(24 wrong; 0 %"),
        (
            lambda prompt, seed: f"\\boxed{{{number_in(prompt) + 1}}}{' 1' * 20}",
            "none of the 24 correct responses is text that ended by itself",
        ),
    ],
)
def test_a_round_without_a_trace_is_one_line(tmp_path, inputs, monkeypatch, script, line):
    use(monkeypatch, script)
    with pytest.raises(DataError, match=line) as refusal:
        run(settings(), context_in(tmp_path / "out", inputs))
    assert "\n" not in str(refusal.value)


def test_right_games_of_the_policy_become_traces_of_their_turns(tmp_path, inputs, monkeypatch):
    """The scripted policy always guesses 3: it finds 3 at once, and everything else never."""
    games = [
        dataclasses.replace(prompt, ground_truth=str(number), grader="exact", extra_info={"number": number})
        for number, prompt in enumerate(problems(6))
    ]
    write_prompts(inputs["data"] / "train.parquet", games)
    use(monkeypatch, lambda prompt, seed: "3")
    played = GuessNumberEnvironment.model_validate({"kind": "guess_number", "limits": {"max_turns": 2}})
    own = settings(num_samples=2, max_response_tokens=40).model_copy(update={"environment": played})
    run(own, context_in(tmp_path / "out", inputs))
    (sampled,) = read_prompts(tmp_path / "out" / "sampled.parquet")
    assert (sampled.uid, [trace.text for trace in sampled.traces]) == ("p3", ["3"])
    assert sampled.traces[0].num_tokens == 2
    rates = {row["uid"]: row for row in pq.read_table(tmp_path / "out" / "pass_rates.parquet").to_pylist()}
    assert rates["p3"]["num_correct"] == 2
    assert rates["p4"]["num_correct"] == 0
