"""Nothing of a row that changes what is asked or learned is dropped without a word."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from synthetic.loaded_source import load_file, write_rows
from synthetic.preparation import prepare, sources_of

from luffy.data.schema import RowError, as_text, prompt_from_row
from luffy.errors import DataError

TURNS = [{"role": "user", "content": "1 + 1?"}]


def row(*answer, **columns):
    """A row of verl's with an answer at the end of its prompt."""
    return {"data_source": "d", "prompt": [*TURNS, *answer], "reward_model": {"ground_truth": "2"}, **columns}


def says(**parts):
    return {"role": "assistant", "content": r"\boxed{2}", **parts}


def prepared_suites(out, **files):
    """What the card says of the files as suites."""
    prepare(out, suites={name: {"kind": "file", "path": str(file)} for name, file in files.items()})
    return {name: sources_of(out)[f"suites.{name}"] for name in files}


@pytest.mark.parametrize(("turn", "field"), [
    (says(weight=0), "prompt[1].weight"), (says(loss_mask=0), "prompt[1].loss_mask"),
    (says(tool_calls=[{"function": {"name": "f"}}]), "prompt[1].tool_calls"),
    ({"role": "user", "content": "<image> 1 + 1?", "images": ["x.png"]}, "prompt[1].images"),
    (says(content="Let me think.\n<think>"), "prompt"), ({"role": "user", "content": "<image>Find x."}, "prompt"),
])  # fmt: skip
def test_what_is_neither_asked_nor_learned_as_written_is_refused(turn, field):
    with pytest.raises(RowError) as caught:
        prompt_from_row(row(turn))
    assert caught.value.field == field
    prompt_from_row(row(says(weight=1, loss_mask=True, tool_calls=[])))


def test_thoughts_beside_the_content_are_part_of_the_trace_and_a_written_prompt_is_not_written_again():
    for name in ("reasoning_content", "reasoning", "thinking"):
        (trace,) = prompt_from_row(row(says(**{name: "one and one"}))).traces
        assert trace.text == "<think>\none and one\n</think>\n\\boxed{2}"
    for opening in ("<|im_start|>user\n", "<s>[INST] ", "<|begin_of_text|><|start_header_id|>user"):
        with pytest.raises(RowError, match="already written by a chat template"):
            prompt_from_row(row() | {"prompt": f"{opening}1 + 1?"})


PLAIN, CHAT = {"prompt": "1 + 1?", "answer": "2"}, {"messages": [*TURNS, says()]}
CALLING = [says(content="I will.", tool_calls=[{"function": {"name": "f"}}]), {"role": "tool", "content": "2"}, says()]


@pytest.mark.parametrize(("columns", "named"), [
    *(({**known, column: ["Be brief."]}, column)
      for known in (PLAIN, CHAT) for column in ("system", "context", "images", "system_prompt", "passage")),
    ({"prompt": TURNS, "completion": CALLING, "answer": "2"}, "completion[0].tool_calls"),
    ({"instruction": "Add.", "input": "1 and 1", "output": r"\boxed{2}"}, "instruction"),  # of Alpaca
])  # fmt: skip
def test_a_part_of_the_question_in_another_column_and_calls_in_a_field_are_refused(tmp_path, columns, named):
    with refused("data.train", named, error=DataError):
        load_file(write_rows(tmp_path / "rows.jsonl", columns))


def test_a_row_without_an_answer_is_read_by_the_box_of_its_completion_whatever_the_others_have(tmp_path):
    rows = [{"prompt": f"{n} + 1?", "completion": rf"So \\boxed{{{n + 1}}}"} for n in range(6)]
    rows += [{"prompt": "3 + 4?", "completion": "Seven.", "answer": "7"}, {"prompt": "5?", "completion": "Five."}]
    loaded = load_file(write_rows(tmp_path / "a.jsonl", *rows))
    assert [prompt.ground_truth for prompt in loaded.prompts] == [*map(str, range(1, 7)), "7"]
    assert [row.field for row in loaded.quarantined] == ["completion"]


def test_completions_that_begin_late_or_in_another_file_are_read(tmp_path):
    without = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "completion": None} for n in range(50)]
    write_rows(tmp_path / "a.jsonl", *without)
    late = [each | {"completion": r"\boxed{" + each["answer"] + "}"} for each in without]
    write_rows(tmp_path / "b.jsonl", *without[:41], *late[41:])
    assert sum(len(prompt.traces) for prompt in load_file(tmp_path / "*.jsonl").prompts) == 9


def test_a_reference_is_the_shortest_text_of_its_columns_number(tmp_path):
    numbers = {0.1 + 0.2: "0.3", 27.0: "27", 1e-7: "1e-07", 0.1: "0.1"}
    assert {number: as_text(number) for number in numbers} == numbers
    for kind in (np.float16, np.float32, np.float64):
        answers = pa.array([kind(0.1), kind(2.5), None, kind(3)])
        listed = pa.ListArray.from_arrays([0, 1, 2, 3, 4], answers)
        for column in (answers, listed):
            pq.write_table(pa.table({"prompt": ["a?", "b?", "c?", "d?"], "answer": column}), tmp_path / "rows.parquet")
            loaded = load_file(tmp_path / "rows.parquet")
            assert [prompt.ground_truth for prompt in loaded.prompts] == ["0.1", "2.5", "3"]


def test_log_and_card_name_columns_that_are_not_read(tmp_path, caplog):
    layouts = {"verl": [row(says()), row(says(), notes="x")], "plain": [{**PLAIN, "notes": "x"}]}
    files = {
        name: write_rows(tmp_path / f"{name}.jsonl", *({**each, "weight": 0.5, "empty": None} for each in rows))
        for name, rows in layouts.items()
    }
    for name, card in prepared_suites(tmp_path / "out", **files).items():
        assert card["unread"] == {"notes": 1, "weight": len(layouts[name])}
        assert any(
            f"suites.{name}: " in said and "not read" in said and "notes (1)" in said for said in caplog.messages
        )
    assert "| columns not read | weight |" in (tmp_path / "out/card.md").read_text()


def test_a_small_file_of_any_number_of_malformed_rows_has_all_counted_and_the_first_thousand_kept(tmp_path):
    file, rows = tmp_path / "rows.parquet", 30_000
    texts = pa.array(["1 + 1 ="] * 3 + [None] * rows, pa.string())
    pq.write_table(pa.table({"prompt": texts, "answer": pa.array(["2"] * (rows + 3))}), file)
    card = prepared_suites(tmp_path / "out", more=file)["more"]
    assert (card["rows_in"], card["quarantined"], card["malformed"]) == (rows + 3, rows, {"prompt": rows})
    kept = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [each["row"] for each in kept if each["source"] == "suites.more"] == list(range(4, 1004))
