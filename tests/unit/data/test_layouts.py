"""The column layouts of other systems and of public data sets are read without a configuration of fields."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic.preparation import SMALL, prepare, sources_of

from luffy.cli import main as command
from luffy.config.data import FileSource
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.schema import RowError, prompt_from_row
from luffy.errors import DataError
from luffy.types import Message, Prompt, Trace
from tests.synthetic.loaded_source import LoadedSource, load_source

TEN = range(10)
NUMPYS = "[{'content': 'Be brief.', 'role': 'system'}\n {'content': 'a?', 'role': 'user'}]"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(n: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>\nIt is {n}.\n</think>\nSo \\boxed{{{n}}}."}


def reward(answer: object, style: str = "rule") -> dict[str, object]:
    return {"style": style, "ground_truth": answer}


LAYOUTS = {
    # name: (ten rows, prompts that pass, traces that pass)
    "trl_messages.parquet": ([{"messages": [user(f"tm {n}?"), assistant(n)], "source": "x"} for n in TEN], 10, 10),
    "trl_completion.jsonl": ([{"prompt": [user(f"tc {n}?")], "completion": [assistant(n)]} for n in TEN], 10, 10),
    "trl_deepmath.parquet": ([{"prompt": [user(f"td {n}?")], "solution": f"${n}$"} for n in TEN], 10, 0),
    "open_r1_220k.parquet": (
        [
            {
                "problem": f"or {n}?", "solution": "A long way.", "answer": str(n), "problem_type": "Algebra",
                "source": "olympiads", "uuid": f"u{n}", "is_reasoning_complete": [True, n < 5], "correctness_count": 2,
                "generations": [assistant(n)["content"], assistant(n)["content"] + " "], "finish_reasons": None,
                "messages": [user(f"or {n}?"), assistant(n)],
            }
            for n in TEN
        ], 10, 15,
    ),
    "prime_rl.parquet": (
        [
            {
                "problem_id": f"p{n}", "task_type": "verifiable_math", "prompt": f"pr {n}?",
                "verification_info": json.dumps({"ground_truth": f"\\frac{{{n}}}{{7}}"}), "solve_rate": 0.5,
            }
            for n in TEN
        ], 10, 0,
    ),
    "synthetic_1.csv": ([{"prompt": f"sy {n}?", "verification_info": str({"ground_truth": n})} for n in TEN], 10, 0),
    "openrlhf.jsonl": ([{"input": f"of {n}?", "label": str(n), "datasource": "gsm"} for n in TEN], 10, 0),
    "openrlhf_messages.jsonl": ([{"context_messages": [user(f"om {n}?")], "answer": n} for n in TEN], 10, 0),
    "dapo_17k.parquet": (
        [
            {
                "data_source": "dapo_17k", "prompt": [user(f"da {n // 2}?")], "ability": "MATH",
                "reward_model": reward(str(n // 2), "rule-lighteval/MATH_v2"), "extra_info": {"index": f"i{n}"},
            }
            for n in TEN
        ], 10, 0,
    ),  # five problems twice: those are merged later
    "numina_cot.parquet": (
        [
            {
                "source": "cn_k12", "problem": f"nc {n}?", "messages": [user(f"nc {n}?"), assistant(n)],
                "solution": f"It is $\\boxed{{{n}}}$." if n < 8 else "Proved.",
            }
            for n in TEN
        ], 8, 8,
    ),
    "numina_15.parquet": (
        [
            {
                "problem": f"n5 {n}?", "solution": "Without a box.", "problem_type": "Algebra", "source": "olympiads",
                "answer": ("proof", "notfound", "")[n] if n < 3 else str(n), "synthetic": False,
            }
            for n in TEN
        ], 7, 0,
    ),
    "deepscaler.jsonl": ([{"problem": f"ds {n}?", "answer": n, "solution": "" if n else "x"} for n in TEN], 10, 0),
    "gsm8k.jsonl": ([{"question": f"gs {n}?", "answer": f"2*{n}\n#### {n}"} for n in TEN], 10, 10),
    "luffy.parquet": (
        [
            {
                "data_source": "luffy", "prompt": [{"role": "system", "content": "Think."}, user(f"lu {n}?")],
                "target": [assistant(n)], "ability": "math", "reward_model": reward(str(n)),
                "extra_info": {"index": n, "split": "default"},
            }
            for n in TEN
        ], 10, 10,
    ),
    "verl.csv": (
        [
            {
                "uid": f"verl-{n}", "data_source": "verl", "prompt": json.dumps([user(f"ve {n}?")]), "ability": "math",
                "reward_model": str(reward(str(n))), "extra_info": json.dumps({"index": n}),
            }
            for n in TEN
        ], 10, 0,
    ),
    "prompt_text.csv": ([{"prompt": json.dumps([user(f"pt {n}?"), assistant(n)])} for n in TEN], 10, 10),
    "solutions.jsonl": ([{"question": f"so {n}?", "solutions": [f"\\boxed{{{n}}}"]} for n in TEN], 10, 0),
    "sharegpt.jsonl": (
        [
            {"conversations": [{"from": "human", "value": f"sg {n}?"}, {"from": "gpt", "value": f"\\boxed{{{n}}}"}]}
            for n in TEN
        ], 10, 10,
    ),
}  # fmt: skip


def write(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def load(path: Path, **settings: object) -> LoadedSource:
    return load_source(FileSource.model_validate({"kind": "file", "path": str(path), **settings}), "train", 0)


def test_ten_rows_of_each_layout_are_prepared_without_fields(tmp_path: Path) -> None:
    parts = {}
    for name, (rows, _, _) in LAYOUTS.items():
        write(tmp_path / name, rows)
        source = {"kind": "file", "path": str(tmp_path / name), "author": Path(name).stem}
        parts[Path(name).stem] = {"source": source}
    train = {"kind": "mixture", "parts": parts}
    prepare(tmp_path / "out", train=train, suites={"small": SMALL}, max_trace_tokens=5000)
    card = sources_of(tmp_path / "out")["train"]
    assert card["data_sources"] == {Path(name).stem: count for name, (_, count, _) in LAYOUTS.items()}
    assert card["trace_authors"] == {Path(name).stem: count for name, (_, _, count) in LAYOUTS.items() if count}
    assert (card["folded"], card["rejected"]) == (0, {"duplicate_uid": 5, "reference_fails": 2})
    assert (card["quarantined"], card["malformed"]) == (3, {"solution": 2, "answer": 1})
    prompts = read_prompts(tmp_path / "out" / "train.parquet")
    assert {prompt.messages[-1].role for prompt in prompts} == {"user"}
    assert not any("\\boxed" in message.content for prompt in prompts for message in prompt.messages)
    assert [p.uid for p in prompts if p.data_source == "verl"] == [f"verl-{n}" for n in TEN]


def test_a_solution_at_the_end_of_a_prompt_is_a_trace() -> None:
    turns = [user("a?"), {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}, assistant(2)]
    row = {"data_source": "t", "prompt": turns, "reward_model": reward("2")}
    prompt = prompt_from_row(row, "me")
    assert prompt.messages == (Message("user", "a?"),)
    assert [(len(trace.turns), trace.reply, trace.author) for trace in prompt.traces] == [
        (3, assistant(2)["content"], "me")
    ]
    again = prompt_from_row({**row, "prompt": [user("a?"), assistant(2), user("b?"), assistant(3)]})
    assert [message.role for message in again.messages] == ["user", "assistant", "user"]
    assert [(trace.text, trace.turns) for trace in again.traces] == [(assistant(3)["content"], ())]
    twice = prompt_from_row({**row, "prompt": [user("a?"), assistant(2)], "target": [assistant(2)]})
    assert len(twice.traces) == 1
    with pytest.raises(RowError, match="holds an assistant's message, and no user's"):
        prompt_from_row({**row, "prompt": [assistant(2)]})
    with pytest.raises(RowError, match="written as text, but not as JSON"):
        prompt_from_row({**row, "prompt": NUMPYS})


def test_fields_without_traces_drop_the_solution(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"m": [user("a?"), assistant(2)], "a": "2"}])
    fields = {"data_source": "t", "problem": "m", "answer": {"column": "a"}}
    (prompt,) = load(tmp_path / "d.jsonl", fields=fields).prompts
    assert (prompt.messages, prompt.traces) == ((Message("user", "a?"),), ())


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"text": "a?", "answer": "2"}, '"problem": "COLUMN", "answer": {"column": "answer"}}'),
        ({"question": "a?", "chosen": "2"}, '"problem": "question", "answer": {"column": "COLUMN"}}'),
        ({"question": "a?", "answer": "B", "options": ["1", "2"]}, '"choices": {"column": "options"}}'),
        ({"question": "a?", "answer": "A long explanation. " * 20}, '"answer": {"column": "COLUMN"}}'),
    ],
)
def test_other_columns_are_refused_with_the_line_of_fields_to_give(tmp_path: Path, row: dict, line: str) -> None:
    write(tmp_path / "d.jsonl", [row] * 3)
    with pytest.raises(DataError, match="are of no known layout; name them with fields: ") as caught:
        load(tmp_path / "d.jsonl")
    assert str(caught.value).endswith(line)


def test_data_exported_as_csv_is_read_again_with_its_uids(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = 'A "quoted",\nlong' + "\u2028" + "line"
    turns = (Message("assistant", "call"), Message("tool", "2"), Message("assistant", "\\boxed{2}"))
    prompts = [
        Prompt("u1", "d", (Message("system", "s"), Message("user", text)), "2", extra_info={"level": 3, "x": [text]}),
        Prompt(
            "007", "", (Message("user", "b?"),), "1e5", (Trace("\\boxed{1}", "r1", True, (-0.5, 0.0)),), grader="exact"
        ),
        Prompt("u3", "d", (Message("user", "c?"),), "2", (Trace("call\n2\n\\boxed{2}", "r2", None, turns=turns),)),
        Prompt("secret", "d", (Message("user", "d?"),), "2", extra_info={"confidential": True}),
    ]
    write_prompts(tmp_path / "d.parquet", prompts)
    assert command.main(["export", str(tmp_path / "d.parquet"), str(tmp_path / "d.csv")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 prompts with 2 traces (1 of r1, 1 of r2)" in said and "1 prompts are confidential" in said
    assert load(tmp_path / "d.csv").prompts == prompts[:3]
    one = ["export", str(tmp_path / "d.parquet"), str(tmp_path / "r1.csv"), "--author", "r1"]
    assert command.main(one) == 0
    assert [prompt.uid for prompt in load(tmp_path / "r1.csv").prompts] == ["007"]
    assert command.main(one) == 2
