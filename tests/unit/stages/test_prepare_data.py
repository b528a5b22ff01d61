"""The stage `prepare_data`: rows in; rows, splits, card and quarantine out."""

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.installed import DATASETS, needs_datasets
from support.refusals import refused
from synthetic.endpoint import CHAT, Reply, completion
from synthetic.preparation import prepare as prepared
from synthetic.preparation import row, sources_of, written

import luffy.data.parquet as parquet
from luffy.cli.run_view import show_card
from luffy.config.grading import GradingConfig
from luffy.data.parquet import read_prompts
from luffy.data.schema import problem_key
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.grading.pool import JUDGE_CACHE
from luffy.types import Prompt

SMALL: dict[str, object] = {
    "train": {"kind": "arithmetic", "num_prompts": 30, "num_operations": [2, 3]},
    "corpus": {"kind": "arithmetic", "num_prompts": 200, "num_operations": [1], "unique": False},
    "suites": {"retention": {"kind": "arithmetic", "num_prompts": 100, "num_operations": [1]}},
    "max_prompt_tokens": 48,
    "max_trace_tokens": 64,
}
LONG = " ".join(f"w{n}" for n in range(60))
Rows = list[dict[str, object]]


def boxed(words: str, answer: str = "2") -> str:
    return f"{words} \\boxed{{{answer}}}"


WRONG = boxed("No,", "5")


def prepare(out: Path, workers: int = 1, **data: object) -> dict[str, dict]:
    """What the card then says of each source; no row of one is lost."""
    prepared(out, workers, **data)
    sources = sources_of(out)
    for source in sources.values():
        gone = sum(source["rejected"].values()) + source["quarantined"] + source["folded"]
        assert source["rows_in"] == source["rows_out"] + gone
    return sources


def prompts_in(out: Path, name: str = "train") -> list[Prompt]:
    return read_prompts(out / f"{name}.parquet")


def texts(out: Path, name: str = "train") -> dict[str, list[str]]:
    return {prompt.messages[-1].content: [trace.text for trace in prompt.traces] for prompt in prompts_in(out, name)}


@pytest.fixture
def train(tmp_path) -> Callable[..., dict]:
    """`train(rows, **settings)`: what the card says of these training rows, prepared in the folder `out`."""
    return lambda rows, **more: prepare(tmp_path / "out", train=written(tmp_path / "d.jsonl", rows), **more)["train"]


def test_prepared_rows_are_verified_and_within_the_limits_and_a_suites_problems_are_nowhere_else(tmp_path):
    result = prepared(tmp_path, **SMALL)
    files = {"train.parquet", "sft.parquet", "rl_complement.parquet", "corpus.parquet", "suites/retention.parquet"}
    assert {*result.outputs} == files | {"tokenizer", "card.json", "card.md", "quarantine.jsonl"}
    assert all((tmp_path / output).exists() for output in result.outputs)
    tokenizer, prompts = load_tokenizer(tmp_path / "tokenizer"), prompts_in(tmp_path)
    assert len(prompts) == 30 == result.metrics["rows/train"]
    for prompt in prompts:
        prompt_ids = render_prompts(tokenizer, [prompt.messages])[0]
        (trace,) = prompt.traces
        assert trace.verified
        assert len(prompt_ids) <= 48
        assert len(encode_traces(tokenizer, [trace.text])[0]) <= 64
        assert tokenizer.unk_token_id not in prompt_ids
    suite, corpus = (prompts_in(tmp_path, name) for name in ("suites/retention", "corpus"))
    assert not any(prompt.traces for prompt in suite)
    assert not {prompt.uid for prompt in suite} & {prompt.uid for prompt in corpus}
    assert sources_of(tmp_path)["corpus"]["rejected"]["in_evaluation_suite"] == 200 - len(corpus)


def repeated(count: int, times: int) -> Rows:
    return [row(f"Problem {n}?", boxed(f"by way {way}")) for way in range(times) for n in range(count)]


def styled(number: int, style: str, truth: str, *replies: str) -> dict[str, object]:
    """A row that names its grader."""
    return {
        "data_source": "t",
        "prompt": f"Question {number} of {style}",
        "traces": [{"text": reply} for reply in replies],
        "reward_model": {"style": style, "ground_truth": truth},
    }


NEAR = {"filters": {"near_duplicates": 0.8}}
UNVERIFIED = {"require_verified_traces": False}
STEPS = boxed("step " * 40)


def one_trace(*answers: tuple[str, str | None], **more: object) -> Rows:
    """Rows of these questions and traces."""
    return [row(question, trace, **more) for question, trace in answers]


# fmt: off
CASES = {  # rows, settings, what is left in each file, what the card says of the source
    "rows of one problem become one prompt with their traces": (
        repeated(7, 3), {},
        {"train": {f"Problem {n}?": [boxed(f"by way {way}") for way in range(3)] for n in range(7)}},
        {"rows_in": 21, "rows_out": 7, "folded": 14, "traces_out": 21, "repeats": {"3": 7}, "rejected": {}},
    ),
    "a row without a new trace and one with another answer are rejected": (
        [*one_trace(*[("One plus one?", boxed("Easy:"))] * 2, ("one  plus one?", boxed("Easy:"))),
         row("ONE plus one?", boxed("Hm."), data_source="u"), row("One plus one?", boxed("No,", "3"), answer="3"),
         row("One plus one?", None)],
        {}, {"train": {"One plus one?": [boxed("Easy:"), boxed("Hm.")]}},
        {"rejected": {"duplicate_uid": 2, "duplicate_problem": 1, "duplicate_with_other_answer": 1}, "folded": 1},
    ),
    "repeats are rejected where that is asked for": (
        repeated(3, 2), {"filters": {"repeats": "reject"}},
        {"train": {f"Problem {n}?": [boxed("by way 0")] for n in range(3)}},
        {"folded": 0, "rejected": {"duplicate_uid": 3}},
    ),
    "a uid that a file gives to two problems is no repeat of either": (
        [*one_trace(("First?", boxed("a")), ("Second?", boxed("b")), uid="x"), row("Second?", boxed("c"), uid="y")],
        {}, {"train": {"First?": [boxed("a")], "Second?": [boxed("c")]}},
        {"rejected": {"duplicate_uid": 1}, "folded": 0},
    ),
    "a near-duplicate of a rejected row stays": (
        [*one_trace(("First?", boxed("a")), (LONG + " end", boxed("b")), uid="x"), row(LONG, boxed("c"))],
        NEAR, {"train": {"First?": [boxed("a")], LONG: [boxed("c")]}}, {"rejected": {"duplicate_uid": 1}},
    ),
    "a repeat of a near-duplicate goes with it": (
        one_trace(*((LONG + end, boxed(way)) for way in ("a", "b") for end in ("", " end"))),
        NEAR, {"train": {LONG: [boxed("a"), boxed("b")]}}, {"rejected": {"near_duplicate": 2}, "folded": 1},
    ),
    "near-duplicates and equal problems are counted apart": (
        one_trace(*((text, boxed("a")) for text in (LONG, LONG.upper(), LONG + " end", "another"))),
        NEAR, {"train": {LONG: [boxed("a")], "another": [boxed("a")]}},
        {"rejected": {"duplicate_problem": 1, "near_duplicate": 1}},
    ),
    "a grader that rows name grades them": (
        [styled(number, "choice", truth, "The answer is (C)") for number, truth in ((1, "C"), (2, "B"))],
        {}, {"train": {"Question 1 of choice": ["The answer is (C)"], "Question 2 of choice": []}},
        {"rejected": {}, "rejected_traces": {"trace_wrong": 1}},
    ),
    "a prompt without a trace takes over that of a later row": (
        one_trace(*((f"Problem {n}?", None) for n in range(6)), ("Problem 2?", boxed("Late."))),
        {}, {"sft": {"Problem 2?": [boxed("Late.")]}}, {"rows_out": 6},
    ),
    "a rejected trace takes its prompt out of RL no more than a missing one": (
        one_trace(("A?", WRONG), ("B?", None), ("C?", boxed("Well,")), ("D?", WRONG), ("D?", boxed("Late."))),
        {"sft": {"unique_train_examples": 1}},
        {"train": {"A?": [], "B?": [], "C?": [boxed("Well,")], "D?": [boxed("Late.")]}},
        {"remarks": {"all_traces_rejected": 2, "no_trace_given": 1}, "rejected_traces": {"trace_wrong": 2}},
    ),
    "correctness is that of all merged traces": (
        one_trace(("A?", STEPS), ("B?", STEPS), ("A?", boxed("short")), ("B?", WRONG)), UNVERIFIED,
        {"train": {"A?": [STEPS, boxed("short")], "B?": [STEPS, WRONG]},
         "sft": {"A?": [STEPS, boxed("short")], "B?": [STEPS]}},
        {"folded": 2},
    ),
    "a correct trace that comes by merging counts, and SFT sees correct ones alone": (
        one_trace(("A?", WRONG), ("A?", boxed("Late.")), ("B?", WRONG)), UNVERIFIED,
        {"train": {"A?": [WRONG, boxed("Late.")], "B?": [WRONG]}, "sft": {"A?": [boxed("Late.")]},
         "rl_complement": {"B?": []}},
        {"folded": 1},
    ),
}
# fmt: on


@pytest.mark.parametrize(("rows", "settings", "left", "said"), CASES.values(), ids=CASES)
def test_rows_in_and_what_is_left_of_them(tmp_path, monkeypatch, train, rows, settings, left, said):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 5)
    card = train(rows, **settings)
    assert {name: texts(tmp_path / "out", name) for name in left} == left
    assert {name: card[name] for name in said} == said


def test_rejected_and_malformed_rows_are_accounted_for(tmp_path, capsys, caplog, train):
    rows = [
        *[row("1 + 1", "\\boxed{2}", "2")] * 2,
        row("1 + 2", "\\boxed{4}", "3"),
        row("1 + 3", "\\boxed{4}" + "1234567890" * 10, "4"),
        {**row("1 + 4", "\\boxed{5}", "5"), "reward_model": {"ground_truth": [5]}},
    ]
    card, out = train(rows, **{name: value for name, value in SMALL.items() if name != "train"}), tmp_path / "out"
    assert (card["rows_in"], card["rows_out"], card["quarantined"]) == (5, 3, 1)
    assert card["rejected"] == {"duplicate_uid": 1}
    assert card["rejected_traces"] == {"trace_too_long": 1, "trace_wrong": 1}
    assert "2 rows lost all their traces" in caplog.text and "data.max_trace_tokens" in caplog.text
    assert card["malformed"] == {"reward_model.ground_truth": 1}
    (longest,) = card["longest_rejected"].values()
    show_card(out)
    assert longest > 100 and f"trace too long 1 (up to {longest} tokens)" in capsys.readouterr().out
    quarantined, *samples = map(json.loads, (out / "quarantine.jsonl").read_text().splitlines())
    assert [sample["reason"] for sample in samples if sample["source"] == "train"] == ["trace_wrong", "trace_too_long"]
    assert samples[0]["trace_end"] == "\\boxed{4}"
    found = quarantined["source"], quarantined["row"], quarantined["field"]
    assert found == ("train", 5, "reward_model.ground_truth")


UNMET = ("proof", "notfound", "None", "nan", "inf", "\\frac{1}{")
"""References that no answer can meet."""


def proofs() -> Rows:
    return [row(f"Prove {word}.", "\\boxed{1}", word) for word in UNMET]


def test_a_training_row_whose_reference_nobody_can_meet_is_rejected_and_listed(tmp_path, caplog, train):
    rows = [row("1 + 1?", None, "#### 2"), row("1 + 2?", "\\boxed{3}", "3"), row("Text?", None, "np.sin(1)")]
    rows += [row("1 + 3?", None, '{"ground_truth": "4"}'), row("Empty?", None, "")]
    card, out = train(proofs() + rows), tmp_path / "out"
    assert (card["rows_out"], card["quarantined"], card["rejected"]) == (4, 1, {"reference_fails": 6})
    assert card["golds"] == {"fails": 6, "meets_itself": 3, "text_alone": 1}
    shown = map(json.loads, (out / "quarantine.jsonl").read_text().splitlines())
    assert tuple(line["ground_truth"] for line in shown if line.get("reason") == "reference_fails") == UNMET[:5]
    assert "train: 6 reference answers" in caplog.text and "(fields.answer)" in caplog.text
    assert (len(prompts_in(out)), len(prompts_in(out, "rl_complement"))) == (4, 3)


def test_a_suite_keeps_its_long_problems_asks_each_once_and_lists_references_that_cannot_be_met(tmp_path, caplog):
    rows = [row(f"Problem {n % 3}?", None, data_source="aime") for n in range(12)] + [row("1" * 5001, None, "n+1")]
    unmet = [row("A?", None, "\\frac{1}{2"), row("B?", None, "np.arcsin(10/13)"), row("C?", None, "3")]
    suites = {name: written(tmp_path / f"{name}.jsonl", of) for name, of in {"s": rows, "unmet": unmet}.items()}
    asked = {"data_source": ["aime", "other"], "prompt": "Problem 1?"}
    suites["some"], out = {**suites["s"], "only": asked, "max_rows": 3}, tmp_path / "out"
    with caplog.at_level(logging.WARNING):
        cards = prepare(out, suites=suites, max_prompt_tokens=48)
    assert list(texts(out, "suites/s")) == [*(f"Problem {n}?" for n in range(3)), "1" * 5001]
    card = cards["suites.s"]
    assert (card["folded"], card["repeats"], card["rejected"]) == (9, {"4": 3}, {})
    assert card["golds"] == {"meets_itself": 4}
    assert (list(texts(out, "suites/some")), cards["suites.some"]["folded"]) == (["Problem 1?"], 2)
    card, uids = cards["suites.unmet"], {p.messages[0].content: p.uid for p in prompts_in(out, "suites/unmet")}
    assert card["golds"] == {"fails": 1, "meets_itself": 1, "text_alone": 1}
    listed = {(each["uid"], each["finding"]) for each in card["gold_findings"]}
    assert listed == {(uids["A?"], "fails"), (uids["B?"], "text_alone")}
    assert "1 reference answers" in caplog.text and uids["A?"] in caplog.text
    assert uids["B?"] in (out / "card.md").read_text() and "arcsin" not in caplog.text


@needs_datasets
@pytest.mark.slow
def test_the_published_evaluation_file_of_luffy_is_folded_and_its_references_are_sound(tmp_path):
    source = {"kind": "file", "path": str(DATASETS / "luffy_eval" / "valid.all.parquet")}
    card = prepare(tmp_path / "out", suites={"luffy": source})["suites.luffy"]
    assert (card["rows_in"], card["rows_out"], card["folded"]) == (6023, 1590, 4433)
    assert card["repeats"] == {"32": 143} and card["rejected"] == {}
    assert card["golds"] == {"meets_itself": 1581, "text_alone": 9}


def test_the_system_prompt_stands_before_prompts_that_have_none(tmp_path, caplog):
    rows = [row("1 + 1", "\\boxed{2}"), row("2 + 1", "\\boxed{3}", "3")]
    rows[1]["prompt"] = [{"role": "system", "content": "mine"}, {"role": "user", "content": "2 + 1"}]
    source, found = written(tmp_path / "d.jsonl", rows), {}
    for name, removes in (("own", False), ("new", True)):
        prepare(tmp_path / name, train=source, system_prompt="think", remove_system=removes)
        found[name] = prompts_in(tmp_path / name)
    for name, systems in {"own": ["think", "mine"], "new": ["think", "think"]}.items():
        shown = [[message.content for message in prompt.messages] for prompt in found[name]]
        assert shown == [[systems[0], "1 + 1"], [systems[1], "2 + 1"]]
    assert [prompt.uid for prompt in found["own"]] == [prompt.uid for prompt in found["new"]]
    assert [sources_of(tmp_path / name)["train"]["remarks"] for name in found] == [{"own_system_prompt": 1}, {}]
    assert "1 rows keep their own system prompt" in caplog.text


def test_the_tokenizer_of_a_given_model_is_kept_and_the_program_and_its_workers_load_without_torch(tmp_path):
    build_tokenizer(["0123456789 +-=r<>/think\\boxed{}Q"]).save_pretrained(tmp_path / "model")
    prepared(tmp_path / "out", **SMALL | {"model_path": str(tmp_path / "model"), "corpus": None})
    assert "Q" in load_tokenizer(tmp_path / "out" / "tokenizer").get_vocab()
    code = "import sys, luffy.stages.prepare_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Splits.

SPLITS = ("train", "sft", "rl_complement", "validation")


def splits_in(out: Path) -> list[list[Prompt]]:
    return [prompts_in(out, name) for name in SPLITS if (out / f"{name}.parquet").exists()]


def test_the_splits_share_the_prompts_out_and_no_problem_comes_back_by_a_row_that_lost_its_trace(tmp_path, train):
    rows = [row(f"{n} + 1 = ?", boxed("a")) for n in range(10)]
    spaces = itertools.cycle(["  ", "   "])
    rows += [row(f"{n} + 1{next(spaces)}= ?", WRONG) for n in [*range(10), 77, 77]]
    train(rows, sft={"unique_train_examples": 4}, validation_prompts=3)
    found = splits_in(tmp_path / "out")
    all_of, sft, complement, validation = ({problem_key(prompt.messages) for prompt in split} for split in found)
    assert [len(each) for each in (all_of, sft, complement, validation)] == [8, 4, 4, 3]  # 77 + 1 has no trace
    assert sft <= all_of and len(sft | complement | validation) == 11
    assert not any(prompt.traces for prompt in found[2])


def test_uids_are_compared_to_their_last_character(tmp_path, train):
    uids = {"x", "x\0", "x\0\0", "x" * 5000}
    rows = [row(f"Problem {uid!r}?", boxed("a"), uid=uid) for uid in sorted(uids)]
    assert train(rows, sft={"unique_train_examples": 2})["rejected"] == {}
    all_of, sft, complement = ({prompt.uid for prompt in split} for split in splits_in(tmp_path / "out"))
    assert all_of == sft | complement == uids and not sft & complement


@pytest.mark.parametrize(("view", "in_sft"), [("all", 5), (3, 3)])
def test_a_prompt_without_a_correct_trace_is_not_lost_between_sft_and_the_complement(tmp_path, train, view, in_sft):
    rows = [row(f"Problem {n}?", WRONG if n % 2 else boxed("a")) for n in range(10)]
    train(rows, sft={"unique_train_examples": view}, **UNVERIFIED)
    _, sft, complement = splits_in(tmp_path / "out")
    assert (len(sft), len({prompt.uid for prompt in [*sft, *complement]})) == (in_sft, 10)
    assert all(trace.verified for prompt in sft for trace in prompt.traces)


def test_the_complement_holds_no_near_duplicate_of_another_split_or_of_itself(tmp_path, train):
    long = [" ".join(f"{letter}{n}" for n in range(60)) for letter in "abcd"]
    rows = [row(text, boxed("right")) for text in long[:3]]
    rows += [row(text + end, WRONG) for text in long for end in (" end", " ends")]
    train(rows, validation_prompts=1, sft={"unique_train_examples": 1}, **NEAR)
    (left,) = set(texts(tmp_path / "out", "rl_complement")) - {*long}
    assert left == long[3] + " end"


# Refusals.

FIVE = one_trace(*((f"Problem {n}?", boxed("a")) for n in range(5)))
SIX_CORRECT = {"sft": {"unique_train_examples": 6}, **UNVERIFIED}


@pytest.mark.parametrize(("rows", "source", "settings", "named"), [
    ([row("1" * 50, boxed("")), *proofs()], {}, SMALL,
     ("of 7", "1 prompt_too_long", "6 reference_fails", "the longest has 5", "data.max_prompt_tokens")),
    (FIVE, {}, {"suites": "train"}, ("5 in_evaluation_suite", "data.suites")),
    (proofs(), {}, {}, ("6 reference_fails", "column")),
    (FIVE, {}, {"rl": "complement"}, ("data.rl", "complement", "data.sft.unique_train_examples")),
    (FIVE, {}, {"sft": {"unique_train_examples": 99}}, ("data.sft.unique_train_examples", "99", "5 training")),
    ([*FIVE, row("More?", WRONG)], {}, SIX_CORRECT, ("6 asked for", "5 training prompts have a correct trace")),
    (FIVE, {}, {"validation_prompts": 5}, ("data.validation_prompts", "5 of the 5")),
    (FIVE, {"only": {"data_source": "amc"}}, {}, ("{'data_source': 'amc'}", "data_source is t")),
])  # fmt: skip
def test_what_cannot_be_prepared_is_refused_with_the_numbers_and_the_remedy(tmp_path, rows, source, settings, named):
    train = written(tmp_path / "d.jsonl", rows, **source)
    data = {**settings, "train": train}
    if settings.get("suites") == "train":
        data["suites"] = {"same": train}
    with refused(*named, error=DataError):
        prepare(tmp_path / "out", **data)


# What must not be shown, and what is checked.


def test_nothing_is_shown_of_a_confidential_source(tmp_path, caplog):
    choices = {"correct": "r", "incorrect": ["w"]}
    fields = {"data_source": "quiz", "problem": "q", "choices": choices, "traces": [{"column": "t"}]}
    rows = [{"q": f"hush {n}", "r": "hush right", "w": f"hush {n}", "t": boxed("hush", "A")} for n in range(20)]
    rows += [{"q": ["hush"], "r": "x", "w": "y"}, {"q": "hush", "r": ["hush"], "w": 1}]
    source = written(tmp_path / "d.jsonl", rows, fields=fields, confidential=True)
    train, out = {**source, "max_rows": 22}, tmp_path / "out"
    with caplog.at_level(logging.DEBUG):
        prepare(out, train=train, suites={"s": {**source, "only": {"q": "hush 1"}}})
    shown = [path.read_text() for path in out.glob("*.*") if path.suffix in (".json", ".jsonl", ".md")]
    assert "hush" not in "".join(shown) + caplog.text
    quarantined = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [line["field"] for line in quarantined if line["source"] == "train" and "field" in line] == ["q[0]", "r"]
    assert any(line.get("reason") == "trace_wrong" and line["problem"] == "" for line in quarantined)
    assert all(prompt.extra_info["confidential"] is True for prompt in prompts_in(out))


@pytest.mark.parametrize(("only", "named"), [({}, r"row 1, field q\[0\]"), ({"only": {"a": "2"}}, "no row matches")])
def test_a_confidential_source_that_cannot_be_used_says_no_more_than_where(tmp_path, only, named):
    fields = {"data_source": "d", "problem": "q", "answer": {"column": "a"}}
    rows = [{"q": ["hush"], "a": "hush"}]
    source = written(tmp_path / "d.jsonl", rows, fields=fields, confidential=True, **only)
    with pytest.raises(DataError, match=named) as caught:
        prepare(tmp_path / "out", suites={"s": source})
    assert "hush" not in str(caught.value)


def test_the_card_names_what_was_and_was_not_checked(tmp_path):
    bench, out = tmp_path / "bench.jsonl", tmp_path / "out"
    bench.write_text(json.dumps({"q": "Secret  problem", "a": "2"}))
    fields = {"data_source": "b", "problem": "q", "answer": {"column": "a"}}
    rows = [row("Problem?", boxed("a")), row("secret problem", boxed("a"))]
    benchmarks = {"math500": {"kind": "file", "path": str(bench), "fields": fields}}
    prepare(out, train=written(tmp_path / "d.jsonl", rows), decontamination={"benchmarks": benchmarks})
    card = json.loads((out / "card.json").read_text())
    assert card["benchmarks"]["checked"] == {"small": 4, "math500": 1}
    assert "aime24" in card["benchmarks"]["not_checked"] and "math500" not in card["benchmarks"]["not_checked"]
    (hit,) = card["sources"]["train"]["hits"]
    assert (hit["where"], hit["benchmark"], hit["row"]) == ("prompt", "math500", 1)
    assert "secret" not in (out / "quarantine.jsonl").read_text()
    assert card["sources"]["train"]["prompt_tokens"]["max"] >= card["sources"]["train"]["prompt_tokens"]["p50"]
    for path in out.glob("*.parquet"):
        assert set(card["outputs"][path.name]) == {"rows", "bytes", "sha256"}
    assert "not checked: aime24" in (out / "card.md").read_text()


# Rows that name their graders, judged in the processes of the stage.

OWN = "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return int(solution_str) % 2 == 0\n"


def verdict(path: str, body: dict) -> Reply:
    """A judge who takes `yes` for right."""
    is_right = "[Answer]\nyes" in body["messages"][0]["content"]
    return completion(f"VERDICT: {'CORRECT' if is_right else 'INCORRECT'}")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_grader_works_in_every_process(tmp_path, monkeypatch, serve, workers):
    judge = serve(verdict, (CHAT,))
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_graders.py").write_text(OWN)
    named = {
        "parity": {"kind": "custom", "function": "own_graders:even"},
        "asked": {"kind": "judge", "url": f"{judge.url}/v1", "model": "m"},
    }
    graded = {  # style: reference, a wrong reply, a right one
        "rule": ("2", "\\boxed{3}", "\\boxed{2}"),
        "choice": ("C", "The answer is (B)", "The answer is (C)"),
        "parity": ("even", "5", "4"),
        "asked": ("yes", "no", "yes"),
    }
    rows = [styled(n, style, *texts) for n in range(3) for style, texts in graded.items()]
    source, out = written(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    prepared(out, workers, GradingConfig.model_validate_json(json.dumps({"named": named})), train=source)
    expected = [(None if style == "rule" else style, [texts[-1]]) for style, texts in graded.items()] * 3
    assert [(prompt.grader, [trace.text for trace in prompt.traces]) for prompt in prompts_in(out)] == expected
    assert len(judge.asked) == 6 == len(list((out / JUDGE_CACHE).glob("*.json")))
    rows = [styled(n, "prose" if n == 9 else "rule", "2", "\\boxed{2}") for n in range(12)]
    with refused("data.train", "reward_model.style", "prose", error=DataError):
        prepared(tmp_path / "other", workers, train=written(tmp_path / "others.jsonl", rows))
