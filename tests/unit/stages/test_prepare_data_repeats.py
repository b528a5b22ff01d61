"""Rows that repeat a problem, benchmarks as they are published, and what must not be shown of them."""

import json
import logging
from pathlib import Path

import pytest
from support.installed import DATASETS, needs_datasets
from synthetic.preparation import prepare as prepared
from synthetic.preparation import row, sources_of, written

import luffy.data.parquet as parquet
from luffy.data.parquet import read_prompts
from luffy.data.shards import filter_shard
from luffy.errors import DataError
from luffy.types import Prompt

LONG = " ".join(f"w{n}" for n in range(60))
SPLITS = ("train", "sft", "rl_complement")


def boxed(words: str, answer: str = "2") -> str:
    return f"{words} \\boxed{{{answer}}}"


def prepare(out, workers=1, **data) -> dict[str, dict]:
    """What the card then says of each source; no row of one is lost."""
    prepared(out, workers, **data)
    sources = sources_of(out)
    for source in sources.values():
        gone = sum(source["rejected"].values()) + source["quarantined"] + source["folded"]
        assert source["rows_in"] == source["rows_out"] + gone
    return sources


def texts(prompts: list[Prompt]) -> dict[str, list[str]]:
    return {prompt.messages[-1].content: [trace.text for trace in prompt.traces] for prompt in prompts}


def merged(folder: Path, rows: list[dict[str, object]], **filters: object) -> tuple[dict, dict[str, list[str]]]:
    """What the card says of these training rows, and what is left of them."""
    card = prepare(folder / "out", train=written(folder / "d.jsonl", rows), filters=filters)["train"]
    return card, texts(read_prompts(folder / "out" / "train.parquet"))


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 5)


def repeated(count: int, times: int) -> list[dict[str, object]]:
    return [row(f"Problem {n}?", boxed(f"by way {way}")) for way in range(times) for n in range(count)]


@pytest.mark.usefixtures("small_shards")
def test_rows_of_one_problem_become_one_prompt_with_their_traces(tmp_path):
    card, found = merged(tmp_path, repeated(7, 3))
    assert found == {f"Problem {n}?": [boxed(f"by way {way}") for way in range(3)] for n in range(7)}
    assert (card["rows_in"], card["rows_out"], card["folded"], card["traces_out"]) == (21, 7, 14, 21)
    assert card["repeats"] == {"3": 7} and card["rejected"] == {}
    assert "| problems by rows folded into one | 3 | 7 |" in (tmp_path / "out" / "card.md").read_text()
    assert not list((tmp_path / "out").rglob("*.spill.jsonl"))


def test_a_row_without_a_new_trace_and_one_with_another_answer_are_rejected(tmp_path):
    rows = [row("One plus one?", boxed("Easy:"))] * 2
    rows += [row("one  plus one?", boxed("Easy:")), row("ONE plus one?", boxed("Hm."), data_source="u")]
    rows += [row("One plus one?", boxed("No,", "3"), answer="3"), row("One plus one?", None)]
    card, found = merged(tmp_path, rows)
    assert found == {"One plus one?": [boxed("Easy:"), boxed("Hm.")]}
    assert card["rejected"] == {"duplicate_uid": 2, "duplicate_problem": 1, "duplicate_with_other_answer": 1}
    assert card["folded"] == 1


def test_repeats_are_rejected_where_that_is_asked_for(tmp_path):
    card, _ = merged(tmp_path, repeated(3, 2), repeats="reject")
    assert (card["rows_out"], card["folded"], card["rejected"]) == (3, 0, {"duplicate_uid": 3})


def test_a_uid_that_a_file_gives_to_two_problems_is_no_repeat_of_either(tmp_path):
    of_x = [row("First?", boxed("a"), uid="x"), row("Second?", boxed("b"), uid="x")]
    card, found = merged(tmp_path, [*of_x, row("Second?", boxed("c"), uid="y")])
    assert found == {"First?": [boxed("a")], "Second?": [boxed("c")]}
    assert (card["rejected"], card["folded"]) == ({"duplicate_uid": 1}, 0)


def test_a_near_duplicate_of_a_rejected_row_stays(tmp_path):
    rows = [row("First?", boxed("a"), uid="x"), row(LONG + " end", boxed("b"), uid="x"), row(LONG, boxed("c"))]
    card, found = merged(tmp_path, rows, near_duplicates=0.8)
    assert found == {"First?": [boxed("a")], LONG: [boxed("c")]}
    assert card["rejected"] == {"duplicate_uid": 1}


def test_a_repeat_of_a_near_duplicate_goes_with_it(tmp_path):
    rows = [row(LONG + end, boxed(way)) for way in ("a", "b") for end in ("", " end")]
    card, found = merged(tmp_path, rows, near_duplicates=0.8)
    assert found == {LONG: [boxed("a"), boxed("b")]}
    assert (card["rejected"], card["folded"]) == ({"near_duplicate": 2}, 1)


def test_uids_are_compared_to_their_last_character(tmp_path):
    uids = ["x", "x\0", "x\0\0", "x" * 5000]
    rows = [row(f"Problem {uid!r}?", boxed("a"), uid=uid) for uid in uids]
    view = {"unique_train_examples": 2}
    card = prepare(tmp_path / "out", train=written(tmp_path / "d.jsonl", rows), sft=view)["train"]
    found = {name: {p.uid for p in read_prompts(tmp_path / "out" / f"{name}.parquet")} for name in SPLITS}
    assert (card["rejected"], found["train"]) == ({}, set(uids))
    assert found["sft"] | found["rl_complement"] == set(uids) and not found["sft"] & found["rl_complement"]


def test_the_complement_holds_no_near_duplicate_of_another_split_or_of_itself(tmp_path):
    long = [" ".join(f"{letter}{n}" for n in range(60)) for letter in "abcd"]
    rows = [row(text, boxed("right")) for text in long[:3]]
    rows += [row(text + end, boxed("wrong", "5")) for text in long for end in (" end", " ends")]
    source = written(tmp_path / "d.jsonl", rows)
    common = {"train": source, "validation_prompts": 1, "sft": {"unique_train_examples": 1}}
    prepare(tmp_path / "out", filters={"near_duplicates": 0.8}, **common)
    (left,) = set(texts(read_prompts(tmp_path / "out" / "rl_complement.parquet"))) - {*long}
    assert left == long[3] + " end"
    prepare(tmp_path / "all", **common)
    assert len(read_prompts(tmp_path / "all" / "rl_complement.parquet")) == 9


@pytest.mark.usefixtures("small_shards")
def test_a_prompt_without_a_trace_takes_over_that_of_a_later_row(tmp_path):
    rows = [row(f"Problem {n}?", None) for n in range(6)] + [row("Problem 2?", boxed("Late."))]
    prepare(tmp_path / "out", train=written(tmp_path / "d.jsonl", rows))
    assert texts(read_prompts(tmp_path / "out" / "sft.parquet")) == {"Problem 2?": [boxed("Late.")]}
    assert len(read_prompts(tmp_path / "out" / "train.parquet")) == 6


def test_difficulty_and_correctness_are_those_of_all_merged_traces(tmp_path):
    long, short = boxed("step " * 40), boxed("short")
    rows = [row("A?", long), row("B?", long), row("A?", short), row("B?", boxed("wrong", "5"))]
    common = {"train": written(tmp_path / "d.jsonl", rows), "require_verified_traces": False}
    filters = {"difficulty": "easy", "difficulty_boundary_tokens": 20}
    prepare(tmp_path / "easy", filters=filters, **common)
    assert set(texts(read_prompts(tmp_path / "easy" / "train.parquet"))) == {"A?", "B?"}
    assert texts(read_prompts(tmp_path / "easy" / "sft.parquet")) == {"A?": [long, short], "B?": [long]}


@pytest.mark.usefixtures("small_shards")
def test_what_was_interrupted_while_merging_does_not_merge_twice(tmp_path, monkeypatch):
    source = written(tmp_path / "d.jsonl", repeated(7, 3))
    work = filter_shard

    def interrupted(self, index, rows, folder, grader):
        if folder.name == "suites.small":
            raise KeyboardInterrupt
        work(self, index, rows, folder, grader)

    prepare(tmp_path / "undisturbed", train=source)
    out = tmp_path / "out"
    monkeypatch.setattr("luffy.data.shards.filter_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(out, train=source)
    assert list(out.rglob("*.merged.parquet"))
    (out / "shards" / "train" / "00000.spill.jsonl").write_text("half a let")
    monkeypatch.setattr("luffy.data.shards.filter_shard", work)
    prepare(out, train=source)
    for name in ("train.parquet", "sft.parquet"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_a_suite_asks_each_problem_once_and_says_how_often_it_stood_there(tmp_path):
    rows = [row(f"Problem {n % 3}?", None, data_source="aime") for n in range(12)] + [row("Other?", None, "n+1")]
    suites = {"s": written(tmp_path / "d.jsonl", rows)}
    card = prepare(tmp_path / "out", suites=suites)["suites.s"]
    assert len(read_prompts(tmp_path / "out" / "suites" / "s.parquet")) == card["rows_out"] == 4
    assert (card["folded"], card["repeats"], card["rejected"]) == (9, {"4": 3}, {})
    assert card["golds"] == {"meets_itself": 4}


@needs_datasets
@pytest.mark.slow
def test_the_published_evaluation_file_of_luffy_is_folded_and_its_references_are_sound(tmp_path):
    source = {"kind": "file", "path": str(DATASETS / "luffy_eval" / "valid.all.parquet")}
    card = prepare(tmp_path / "out", suites={"luffy": source})["suites.luffy"]
    assert (card["rows_in"], card["rows_out"], card["folded"]) == (6023, 1590, 4433)
    assert card["repeats"] == {"32": 143} and card["rejected"] == {}
    assert card["golds"] == {"meets_itself": 1581, "text_alone": 9}


def test_only_the_rows_asked_for_are_read(tmp_path):
    rows = [row(f"Problem {n}?", boxed("x"), data_source="abc"[n % 3], level=n % 2) for n in range(12)]
    file = tmp_path / "d.jsonl"
    suites = {
        "a": written(file, rows, only={"data_source": "a"}),
        "ab": written(file, rows, only={"data_source": ["a", "b"], "level": 1}, max_rows=3),
    }
    prepare(tmp_path / "out", suites=suites)
    found = {name: read_prompts(tmp_path / "out" / "suites" / f"{name}.parquet") for name in suites}
    assert list(texts(found["a"])) == [f"Problem {n}?" for n in (0, 3, 6, 9)]
    assert list(texts(found["ab"])) == [f"Problem {n}?" for n in (1, 3, 7)]


def test_a_filter_that_nothing_keeps_says_what_there_is(tmp_path):
    rows = [row(f"Problem {n}?", boxed("x"), data_source=f"s{n}") for n in range(12)]
    source = written(tmp_path / "d.jsonl", rows, only={"data_source": "amc"})
    with pytest.raises(
        DataError, match=r"no row matches only: \{'data_source': 'amc'\}; data_source is s0, .*s9, \.\.\."
    ):
        prepare(tmp_path / "out", suites={"s": source})


def test_references_that_cannot_be_met_are_listed_by_uid(tmp_path, caplog):
    rows = [row("A?", None, "\\frac{1}{2"), row("B?", None, "np.arcsin(10/13)"), row("C?", None, "3")]
    source = written(tmp_path / "d.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        card = prepare(tmp_path / "out", suites={"s": source})["suites.s"]
    assert card["golds"] == {"fails": 1, "meets_itself": 1, "text_alone": 1}
    uids = {p.messages[0].content: p.uid for p in read_prompts(tmp_path / "out" / "suites" / "s.parquet")}
    listed = {(each["uid"], each["finding"]) for each in card["gold_findings"]}
    assert listed == {(uids["A?"], "fails"), (uids["B?"], "text_alone")}
    assert f"1 reference answers are not graded correct as answers: {uids['A?']}" in caplog.text
    assert uids["B?"] in (tmp_path / "out" / "card.md").read_text() and "arcsin" not in caplog.text


def test_nothing_is_shown_of_a_confidential_source(tmp_path, caplog):
    fields = {
        "data_source": "quiz",
        "problem": "q",
        "choices": {"correct": "r", "incorrect": ["w"]},
        "traces": [{"column": "t"}],
    }
    rows = [{"q": f"hush {n}", "r": "hush right", "w": f"hush {n}", "t": boxed("hush", "A")} for n in range(20)]
    rows += [{"q": ["hush"], "r": "x", "w": "y"}, {"q": "hush", "r": ["hush"], "w": 1}]
    source = written(tmp_path / "d.jsonl", rows, fields=fields, confidential=True)
    train = {**source, "max_rows": 22}
    with caplog.at_level(logging.DEBUG):
        prepare(tmp_path / "out", train=train, suites={"s": {**source, "only": {"q": "hush 1"}}})
    shown = [path.read_text() for path in (tmp_path / "out").glob("*.*") if path.suffix in (".json", ".jsonl", ".md")]
    assert "hush" not in "".join(shown) + caplog.text
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [line["field"] for line in quarantined if line["source"] == "train" and "field" in line] == ["q[0]", "r"]
    assert any(line.get("reason") == "trace_wrong" and line["problem"] == "" for line in quarantined)
    assert all(p.extra_info["confidential"] is True for p in read_prompts(tmp_path / "out" / "train.parquet"))


def test_a_confidential_source_that_cannot_be_used_says_no_more_than_where(tmp_path):
    fields = {"data_source": "d", "problem": "q", "answer": {"column": "a"}}
    source = written(tmp_path / "d.jsonl", [{"q": ["hush"], "a": "1"}], fields=fields, confidential=True)
    with pytest.raises(DataError, match=r"the first: row 1, field q\[0\]: cannot be used") as caught:
        prepare(tmp_path / "out", suites={"s": source})
    assert "hush" not in str(caught.value)
    with pytest.raises(DataError, match="no row matches only") as caught:
        prepare(tmp_path / "other", suites={"s": {**source, "only": {"a": "2"}}})
    assert "a is" not in str(caught.value)
