"""The stage `prepare_data`, run for real."""

import json
import re
import subprocess
import sys

import pytest
from synthetic.preparation import prepare as prepared
from synthetic.preparation import row, sources_of
from synthetic.preparation import written as file_source

from luffy.cli.run_view import show_card
from luffy.data.parquet import read_prompts
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError

SMALL: dict[str, object] = {
    "train": {"kind": "arithmetic", "num_prompts": 30, "num_operations": [2, 3]},
    "corpus": {"kind": "arithmetic", "num_prompts": 200, "num_operations": [1], "unique": False},
    "suites": {"retention": {"kind": "arithmetic", "num_prompts": 100, "num_operations": [1]}},
    "max_prompt_tokens": 48,
    "max_trace_tokens": 64,
}


def prepare(out, **changes):
    return prepared(out, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The outputs of SMALL. Not to be changed."""
    out = tmp_path_factory.mktemp("made")
    result = prepare(out)
    assert result.metrics["rows/train"] == 30
    assert all((out / output).exists() for output in result.outputs)
    assert set(result.outputs) == {
        "train.parquet", "sft.parquet", "rl_complement.parquet", "corpus.parquet", "suites/retention.parquet",
        "tokenizer", "card.json", "card.md", "quarantine.jsonl",
    }  # fmt: skip
    return out


def test_prepared_rows_are_verified_and_within_the_limits(made):
    tokenizer, prompts = load_tokenizer(made / "tokenizer"), read_prompts(made / "train.parquet")
    assert len(prompts) == 30
    for prompt in prompts:
        prompt_ids = render_prompts(tokenizer, [prompt.messages])[0]
        (trace,) = prompt.traces
        assert trace.verified
        assert len(prompt_ids) <= 48
        assert len(encode_traces(tokenizer, [trace.text])[0]) <= 64
        assert tokenizer.unk_token_id not in prompt_ids


def test_a_second_run_writes_the_same_bytes(made, tmp_path):
    prepare(tmp_path)
    outputs = [path.relative_to(made) for path in made.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    assert [path for path in outputs if (made / path).read_bytes() != (tmp_path / path).read_bytes()] == []


def test_a_suite_holds_no_demonstration_and_its_problems_are_nowhere_else(made):
    suite, corpus = (read_prompts(made / name) for name in ("suites/retention.parquet", "corpus.parquet"))
    assert not any(prompt.traces for prompt in suite)
    assert not {prompt.uid for prompt in suite} & {prompt.uid for prompt in corpus}
    assert sources_of(made)["corpus"]["rejected"]["in_evaluation_suite"] == 200 - len(corpus)


def test_rejected_and_malformed_rows_are_accounted_for(tmp_path, capsys):
    rows = [
        row("1 + 1", "\\boxed{2}", "2"),
        row("1 + 1", "\\boxed{2}", "2"),
        row("1 + 2", "\\boxed{4}", "3"),
        row("1 + 3", "\\boxed{4}" + "1234567890" * 10, "4"),
        {**row("1 + 4", "\\boxed{5}", "5"), "reward_model": {"ground_truth": [5]}},
    ]
    prepare(tmp_path / "out", train=file_source(tmp_path / "d.jsonl", rows))
    card = sources_of(tmp_path / "out")["train"]
    assert (card["rows_in"], card["rows_out"], card["quarantined"]) == (5, 1, 1)
    assert card["rejected"] == {"duplicate_uid": 1, "trace_too_long": 1, "trace_wrong": 1}
    (longest,) = card["longest_rejected"].values()
    show_card(tmp_path / "out")
    assert longest > 100 and f"trace too long 1 (up to {longest} tokens)" in capsys.readouterr().out
    quarantined, *samples = map(json.loads, (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines())
    assert [sample["reason"] for sample in samples if sample["source"] == "train"] == ["trace_wrong", "trace_too_long"]
    assert samples[0]["trace_end"] == "\\boxed{4}"
    assert (quarantined["source"], quarantined["row"]) == ("train", 5)
    assert quarantined["field"] == "reward_model.ground_truth"
    assert card["malformed"] == {"reward_model.ground_truth": 1}


def test_nothing_left_says_how_many_rows_went_for_which_reason(tmp_path):
    rows = [row("1 + 1", "\\boxed{3}", "2"), row("1" * 50, "\\boxed{2}", "2")]
    with pytest.raises(DataError, match=r"no row is left of 2: rejected 1 prompt_too_long, 1 trace_wrong") as caught:
        prepare(tmp_path / "out", train=file_source(tmp_path / "d.jsonl", rows))
    assert "\n" not in str(caught.value)
    assert re.search(r"; the longest has 5\d tokens: raise data\.max_prompt_tokens to keep it;", str(caught.value))


def test_nothing_left_says_what_would_help(tmp_path):
    asked = file_source(tmp_path / "d.jsonl", [row(f"What is 1 + {n}?", "\\boxed{9}", str(n + 1)) for n in range(3)])
    with pytest.raises(
        DataError, match=r"rejected 3 in_evaluation_suite; use problems that are not in data\.suites or [^;]*$"
    ):
        prepare(tmp_path / "a", train=asked, suites={"same": asked})
    with pytest.raises(DataError, match=r"rejected 3 trace_wrong; check the reference answers [^;]*_traces: false$"):
        prepare(tmp_path / "b", train=asked)


def test_a_training_row_whose_reference_nobody_can_meet_is_rejected_with_the_remedy(tmp_path, caplog):
    words = ("proof", "notfound", "None", "nan", "inf", "\\frac{1}{")
    bad = [row(f"Prove {word}.", "\\boxed{1}", word) for word in words]
    rows = [*bad, row("1 + 1?", None, "#### 2"), row("1 + 2?", "\\boxed{3}", "3"), row("Text?", None, "np.sin(1)")]
    rows += [row("1 + 3?", None, '{"ground_truth": "4"}'), row("Empty?", None, "")]
    prepare(tmp_path / "out", train=file_source(tmp_path / "d.jsonl", rows), rejected_samples=9)
    card = sources_of(tmp_path / "out")["train"]
    assert (card["rows_out"], card["quarantined"], card["rejected"]) == (4, 1, {"reference_fails": 6})
    assert card["golds"] == {"fails": 6, "meets_itself": 3, "text_alone": 1}
    shown = map(json.loads, (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines())
    found = [line["ground_truth"] for line in shown if line.get("reason") == "reference_fails"]
    assert tuple(found) == words
    assert "train: 6 reference answers are not graded correct" in caplog.text and "(fields.answer)" in caplog.text
    left = {path.name: len(read_prompts(path)) for path in (tmp_path / "out").glob("*.parquet")}
    assert (left["train.parquet"], left["rl_complement.parquet"]) == (4, 3)
    with pytest.raises(DataError, match=r"rejected 6 reference_fails; give problems with an answer, name the column"):
        prepare(tmp_path / "none", train=file_source(tmp_path / "b.jsonl", bad))


def test_rl_after_sft_without_a_prompt_left_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(DataError, match=r"data\.rl: the complement is empty, .* lower data\.sft\.unique_train_exampl"):
        prepare(tmp_path / "all", rl="complement")
    prepare(tmp_path / "some", rl="complement", sft={"unique_train_examples": 20})
    assert len(read_prompts(tmp_path / "some" / "rl_complement.parquet")) == 10


def test_a_suite_keeps_its_long_problems(tmp_path):
    rows = [row("1 + 1", "\\boxed{2}", "2"), row("1" * 90, "\\boxed{2}", "2")]
    suite = file_source(tmp_path / "suite.jsonl", rows)
    prepare(tmp_path / "out", suites={"long": suite})
    kept = read_prompts(tmp_path / "out" / "suites" / "long.parquet")
    assert [prompt.messages[-1].content for prompt in kept] == ["1 + 1", "1" * 90]


def test_a_grader_that_rows_name_grades_them(tmp_path):
    rows = [row("Which?", "The answer is (C)", "C"), row("Or?", "The answer is (C)", "B")]
    for one in rows:
        one["reward_model"]["style"] = "choice"  # type: ignore[index]
    prepare(tmp_path / "a", train=file_source(tmp_path / "rows.jsonl", rows))
    (kept,) = read_prompts(tmp_path / "a" / "train.parquet")
    assert (kept.ground_truth, kept.grader) == ("C", "choice")


def test_the_system_prompt_stands_before_prompts_that_have_none(tmp_path):
    own = {"role": "system", "content": "mine"}
    rows = [row("1 + 1", "\\boxed{2}", "2"), row("2 + 1", "\\boxed{3}", "3")]
    rows[1]["prompt"] = [own, {"role": "user", "content": "2 + 1"}]
    prepare(tmp_path / "out", train=file_source(tmp_path / "d.jsonl", rows), system_prompt="think")
    prompts = read_prompts(tmp_path / "out" / "train.parquet")
    assert [prompt.messages[0].content for prompt in prompts] == ["think", "mine"]
    source = file_source(tmp_path / "d.jsonl", rows)
    prepare(tmp_path / "new", train=source, system_prompt="think", remove_system=True)
    replaced = read_prompts(tmp_path / "new" / "train.parquet")
    assert [[m.content for m in prompt.messages] for prompt in replaced] == [["think", "1 + 1"], ["think", "2 + 1"]]
    assert [prompt.uid for prompt in replaced] == [prompt.uid for prompt in prompts]


def test_the_tokenizer_of_a_given_model_is_kept(tmp_path):
    build_tokenizer(["0123456789 +-=r<>/think\\boxed{}Q"]).save_pretrained(tmp_path / "model")
    prepare(tmp_path / "out", model_path=str(tmp_path / "model"), corpus=None)
    assert "Q" in load_tokenizer(tmp_path / "out" / "tokenizer").get_vocab()


def test_the_program_and_its_workers_load_without_torch():
    code = "import sys, luffy.stages.prepare_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
