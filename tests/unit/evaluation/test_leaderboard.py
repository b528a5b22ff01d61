"""The leaderboard: which rows there are, what they are called, who is compared with whom, and who is the best."""

import json
import re
import shutil
from pathlib import Path

import pytest
from synthetic.evaluated_workspace import Verdict, first, write_evaluation, write_run

from luffy.cli.main import main
from luffy.errors import ConfigError
from luffy.evaluation.across_runs.board import Board, read_board, read_published
from luffy.pipeline.manifest import collect_outputs, finished_manifest, write_manifest
from luffy.pipeline.workspace import Workspace
from luffy.report.leaderboard_page import accuracy_table, leaderboard_page
from luffy.report.page import html

GREEDY = ("math", "greedy")
SAMPLED = ("math", "sampled")


@pytest.fixture
def workspace(tmp_path, request, monkeypatch) -> Workspace:
    monkeypatch.chdir(request.config.rootpath)
    return Workspace(tmp_path / "w")


def names(board: Board, table: int = 0) -> list[str]:
    return [entry.name.text for entry in board.tables[table].rows]


def test_a_stage_that_several_runs_reused_is_one_row_with_the_name_of_its_run(workspace):
    write_evaluation(workspace, "b", {GREEDY: first(10)})
    write_evaluation(workspace, "r", {GREEDY: first(60)}, checkpoint="rl")
    for number in (1, 2, 3):
        write_run(workspace, f"smoke-{number}", {"evaluate_base": "b", "evaluate_rl": "r"})
    board = read_board(workspace)
    assert names(board) == ["smoke · luffy · RL step 6", "smoke · base"]
    assert board.tables[0].rows[0].runs == ("smoke-1", "smoke-2", "smoke-3")


def test_equal_weights_evaluated_again_are_one_row_and_the_newer_result_counts(workspace):
    write_evaluation(workspace, "old", {GREEDY: first(90), ("other", "greedy"): first(5)}, model="m", day=1)
    write_evaluation(workspace, "new", {GREEDY: first(40)}, model="m", day=2)
    (table,) = read_board(workspace).tables
    (row,) = table.rows
    found = {column.suite: (cell.row.accuracy, cell.evaluation) for column, cell in row.cells.items()}
    assert found == {"math": (0.4, "new"), "other": (0.05, "old")}


@pytest.mark.parametrize(("keep_best", "num_rows"), [(None, 1), ({"metric": "accuracy"}, 2)])
def test_the_last_step_of_a_sweep_is_the_runs_model_unless_that_has_the_best_weights(workspace, keep_best, num_rows):
    evaluated = write_evaluation(workspace, "e", {GREEDY: first(60)}, checkpoint="rl", model="m")
    found = finished_manifest(evaluated)
    rl, sweep = workspace.stage_directory("rl", "r"), workspace.stage_directory("sweep", "s")
    shutil.copytree(evaluated, sweep / "step_000006")
    settings = {"rl": {"steps": 6}, "validation": {"schedule": {"every": 2, "keep_best": keep_best}}}
    rl.mkdir(parents=True)
    write_manifest(rl, found.model_copy(update={"stage": "rl", "key": "r", "settings": settings, "outputs": ()}))
    outputs = collect_outputs(sweep, ["step_000006/results.json"])
    of_sweep = {"stage": "sweep", "key": "s", "settings": {"protocol": found.settings}, "outputs": outputs}
    write_manifest(sweep, found.model_copy(update={**of_sweep, "upstream": {"model": "r"}}))
    (table,) = read_board(workspace).tables
    assert len(table.rows) == num_rows


def test_rows_of_one_name_say_what_differs(workspace):
    for key, overrides in {"x": ["seed=1"], "y": ["seed=2", "rl.optimizer.lr=2e-3"], "z": ["method=dapo"]}.items():
        write_evaluation(workspace, key, {GREEDY: first(50)}, checkpoint="rl", model=key)
        write_run(workspace, f"smoke-{key}", {"evaluate_rl": key}, *overrides)
    found = set(names(read_board(workspace)))
    assert found == {
        "smoke · luffy · RL step 6 · seed=1, rl.optimizer.lr=0.001",
        "smoke · luffy · RL step 6 · seed=2, rl.optimizer.lr=0.002",
        "smoke · dapo · RL step 6",
    }


def test_what_a_checkpoint_does_not_depend_on_tells_no_rows_apart(workspace):
    """Difficulty chooses the prompts of RL alone; of the settings of RL, SFT knows nothing."""
    for key, rate in {"x": "0.5", "y": "0.75"}.items():
        changes = [f"difficulty.max_pass_rate={rate}", "difficulty.policy=sft"]
        for checkpoint in ("sft", "rl"):
            write_evaluation(workspace, checkpoint + key, {GREEDY: first(50)}, checkpoint=checkpoint, model=key)
        write_run(workspace, f"smoke-{key}", {"evaluate_sft": f"sft{key}", "evaluate_rl": f"rl{key}"}, *changes)
    found = set(names(read_board(workspace)))
    assert {f"smoke · luffy · RL step 6 · difficulty.max_pass_rate={rate}" for rate in ("0.5", "0.75")} <= found
    assert not any("difficulty" in name for name in found if "SFT" in name)


def test_rows_whose_runs_are_gone_are_told_apart_by_their_weights(workspace):
    for key in ("aaaaaaaaaa", "bbbbbbbbbb"):
        write_evaluation(workspace, key, {GREEDY: first(50)})
    found = names(read_board(workspace))
    assert sorted(found) == ["base · transformers, float32, aaaaaaaa", "base · transformers, float32, bbbbbbbb"]


def test_protocols_are_never_in_one_table(workspace):
    write_evaluation(workspace, "a", {GREEDY: first(50), SAMPLED: first(50)})
    write_evaluation(workspace, "b", {GREEDY: first(60)}, evaluation={"max_response_tokens": 2048})
    write_evaluation(workspace, "c", {GREEDY: first(70)}, evaluation={"engine": "vllm"})
    tables = read_board(workspace).tables
    found = {
        table.protocol.text: sorted(cell.evaluation for row in table.rows for cell in row.cells.values())
        for table in tables
    }
    assert found == {
        "greedy decoding, up to 1,024 tokens a response": ["a", "c"],
        "temperature 0.6, up to 1,024 tokens a response": ["a"],
        "greedy decoding, up to 2,048 tokens a response": ["b"],
    }


def test_tables_whose_protocols_read_the_same_say_what_differs(workspace):
    write_evaluation(workspace, "a", {SAMPLED: first(50)})
    eight = {"decodings": {"sampled": {"temperature": 0.6, "num_samples": 8}}}
    write_evaluation(workspace, "b", {SAMPLED: first(50)}, evaluation=eight)
    assert {table.note for table in read_board(workspace).tables} == {"num_samples: 4", "num_samples: 8"}


@pytest.mark.parametrize(
    ("evaluations", "num_tables", "num_columns"),
    [
        ([{}, {"problems": [f"q{i}" for i in range(100)]}], 1, 2),
        ([{}, {"evaluation": {"graders": {"math": "math_strict"}}}], 1, 2),
        ([{}, {"reference": "3"}], 1, 2),
        ([{"system_prompt": "Think."}, {"system_prompt": "Answer."}, {"system_prompt": "Answer."}], 2, 1),
        # A fixed template knows no system prompt.
        ([{"system_prompt": text, "evaluation": {"template": "r1_zero"}} for text in ("Think.", "Answer.")], 1, 1),
    ],
)
def test_other_problems_references_and_graders_are_other_columns_and_another_prompt_another_table(
    workspace, evaluations, num_tables, num_columns
):
    for number, fields in enumerate(evaluations):
        write_evaluation(workspace, f"e{number}", {GREEDY: first(50 + number)}, model=f"m{number}", **fields)
    tables = read_board(workspace).tables
    assert len(tables) == num_tables and sum(len(table.rows) for table in tables) == len(evaluations)
    assert {len(table.columns) for table in tables} == {num_columns}
    for table in tables:
        assert len(table.leads) == (num_columns == 1 and len(table.rows) > 1)
        assert len(set(accuracy_table(table).header)) == 3 + num_columns


@pytest.mark.parametrize(("best", "following", "is_marked"), [(70, 40, True), (52, 50, False), (50, 50, False)])
def test_the_best_is_marked_only_where_it_is_certainly_better(workspace, best, following, is_marked):
    write_evaluation(workspace, "a", {GREEDY: lambda problem, sample: (problem * 37) % 100 < best})
    write_evaluation(workspace, "b", {GREEDY: lambda problem, sample: (problem * 53) % 100 < following})
    write_evaluation(workspace, "c", {GREEDY: first(1)})
    (table,) = read_board(workspace).tables
    marked = [row[0].text for row in accuracy_table(table).rows if "★" in row[3].text]
    assert len(marked) == is_marked
    assert [lead.is_clear for lead in table.leads.values()] == [is_marked]


def test_a_lead_is_taken_over_the_same_problems_whatever_their_order(workspace):
    """Thirty problems won and none lost is a clear lead, though the two intervals overlap."""
    problems = [f"p{i}" for i in range(300)]
    write_evaluation(workspace, "a", {GREEDY: lambda problem, sample: problem < 165}, problems=problems)
    write_evaluation(workspace, "b", {GREEDY: lambda problem, sample: problem >= 165}, problems=problems[::-1])
    (table,) = read_board(workspace).tables
    (lead,) = table.leads.values()
    assert (lead.comparison.paired.wins, lead.comparison.paired.losses, lead.is_clear) == (30, 0, True)
    rows = [row.cells[column].row for row in table.rows for column in table.columns]
    assert rows[0].interval[0] < rows[1].interval[1]


def test_the_mean_is_over_all_suites_with_an_interval_narrower_than_theirs(workspace):
    write_evaluation(workspace, "a", {GREEDY: first(50), ("other", "greedy"): first(30)})
    write_evaluation(workspace, "b", {GREEDY: first(90)})
    (table,) = read_board(workspace).tables
    whole = next(row for row in table.rows if len(row.cells) == 2)
    mean = table.mean(whole)
    assert mean is not None
    assert mean.value == pytest.approx(0.4)
    low, high = mean.interval
    widths = [cell.row.interval[1] - cell.row.interval[0] for cell in whole.cells.values()]
    assert high - low == pytest.approx(sum(width**2 for width in widths) ** 0.5 / 2, rel=0.02)
    assert next(table.mean(row) for row in table.rows if len(row.cells) == 1) is None


def test_what_cannot_be_trusted_is_left_out_and_named(workspace):
    write_evaluation(workspace, "good", {GREEDY: first(50)})
    (write_evaluation(workspace, "damaged", {GREEDY: first(50)}) / "samples.jsonl.zst").write_text("{}")
    (write_evaluation(workspace, "running", {GREEDY: first(50)}) / "manifest.json").unlink()
    (write_evaluation(workspace, "older", {GREEDY: first(50)}) / "manifest.json").write_text('{"stage": "evaluate"}')
    write_evaluation(workspace, "earlier", {GREEDY: first(50)}, without="reason")
    board = read_board(workspace)
    assert [row.model for row in board.tables[0].rows] == ["good"]
    assert {directory.name: reason for directory, reason in board.left_out.items()} == {
        "damaged": "samples.jsonl.zst is changed",
        "running": "not finished",
        "older": "written by another version",
        "earlier": "written by another version",
    }


def test_published_rows_stand_beside_their_own_benchmarks_and_are_never_compared(workspace):
    forty = {("amc", "sampled"): first(1)}
    write_evaluation(workspace, "forty", forty, problems=[f"a{i}" for i in range(40)])
    assert read_board(workspace).tables[0].references == ()
    problems = [f"a{i}" for i in range(30)]
    write_evaluation(workspace, "a", {("aime24", "sampled"): first(1)}, problems=problems, day=2)
    (table,) = read_board(workspace).tables
    (column,) = (column for column in table.columns if column.suite == "aime24")
    found = {reference.row.name: reference.accuracies for reference in table.references}
    assert len(found) == 12
    assert found["LUFFY"] == {column: pytest.approx(0.294)}
    assert table.leads == {}  # 29.4 against 3.3, and yet no lead
    shown = next(row for row in accuracy_table(table).rows if row[0].text == "LUFFY")
    assert [cell.text for cell in shown] == ["LUFFY", "published", "arXiv 2504.14945", "29.4", "–"]


def test_a_published_table_with_a_mistake_names_file_and_row(tmp_path):
    (file,) = (Path("data/published").resolve()).glob("*.yaml")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("gpqa: 39.9", "gpka: 39.9"))
    with pytest.raises(ConfigError, match=r"wrong.yaml.*LUFFY has 'gpka'"):
        read_published([wrong])


def test_the_page_stands_alone_and_trusts_no_name(workspace):
    hostile = "<script>alert(1)</script>"
    write_evaluation(workspace, "a", {(hostile, "greedy"): first(50)})
    write_evaluation(workspace, "b", {(hostile, "greedy"): first(10)})
    text = html(leaderboard_page(read_board(workspace), hostile))
    assert "<script" not in text
    assert re.findall(r"url\((?!#)|@import|<link|<img", text) == []
    assert "★" in text


def test_the_command_prints_the_table_and_writes_page_and_data(workspace, capsys):
    write_evaluation(workspace, "b", {GREEDY: first(10)})
    write_evaluation(workspace, "r", {GREEDY: first(60)}, checkpoint="rl")
    write_run(workspace, "smoke-1", {"evaluate_base": "b", "evaluate_rl": "r"})
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"RL step 6 +luffy +smoke +60\.0 ★", out)
    assert out.splitlines()[-1] == f"leaderboard: {workspace.root / 'leaderboard.html'}"
    assert (workspace.root / "leaderboard.html").read_text().startswith("<!DOCTYPE html>")
    (table,) = json.loads((workspace.root / "leaderboard.json").read_text())["tables"]
    best = table["rows"][0]
    assert (best["method"], best["cells"][0]["accuracy"], best["cells"][0]["evaluation"]) == ("luffy", 0.6, "r")
    lead = best["cells"][0]["lead"]
    assert (lead["over"], lead["difference"], lead["is_clear"]) == ("smoke · base", 0.5, True)


def test_a_workspace_without_evaluations_is_a_mistake_of_one_line(workspace, capsys):
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 2
    (write_evaluation(workspace, "k", {GREEDY: first(1)}) / "manifest.json").unlink()
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("no such folder; give another with --workspace")
    assert "no finished evaluation; k: not finished; run a chain" in lines[1]
    shutil.rmtree(workspace.root)


def test_what_is_clear_on_one_suite_alone_is_not_among_many(workspace):
    """Nine problems won and one lost (p = 0.01 to 0.05): alone that is a lead, among twelve such suites it is none."""

    def verdicts(count: int, gains: bool) -> dict[tuple[str, str], Verdict]:
        won = lambda problem, sample: 50 <= problem < 59 if gains else problem == 59  # noqa: E731
        return {(f"s{i}", "greedy"): lambda problem, sample: problem < 50 or won(problem, sample) for i in range(count)}

    for count, is_clear in ((1, True), (12, False)):
        shutil.rmtree(workspace.root, ignore_errors=True)
        write_evaluation(workspace, "a", verdicts(count, gains=True))
        write_evaluation(workspace, "b", verdicts(count, gains=False))
        (table,) = read_board(workspace).tables
        found = {(lead.comparison.paired.is_clear, lead.is_clear) for lead in table.leads.values()}
        assert found == {(True, is_clear)}


@pytest.mark.parametrize(
    ("path", "experiment", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "smoke", "smoke · Qwen2.5-0.5B"),
        ("/w/stages/rl/0f3a/model", "smoke", "smoke · rl/0f3a"),
        ("/models/Mine", "smoke", "smoke · Mine"),
        ("/models/Mine", "mine", "Mine"),  # without an experiment's file
    ],
)
def test_a_model_that_was_evaluated_by_itself_has_its_own_name(workspace, path, experiment, name):
    write_evaluation(workspace, "k", {GREEDY: first(50)})
    embedded = ["base=null", "data.corpus=null", "model.architecture=null"]
    write_run(workspace, "it-1", {"evaluate_base": "k"}, f"name={experiment}", f"model.path={path}", *embedded)
    assert names(read_board(workspace)) == [name]


def test_models_behind_an_api_are_told_apart_by_how_they_were_asked(workspace):
    """In one table with models that were run here."""
    write_evaluation(workspace, "local", {GREEDY: first(50)})
    write_run(workspace, "smoke-1", {"evaluate_base": "local"})
    served = [
        "base=null", "data.corpus=null", "model.architecture=null", "model.endpoint.name=org/gpt-x",
        "stages=[prepare_data, base, evaluate]", "evaluation.engine=openai", "execution.server.urls=[http://a:1]",
    ]  # fmt: skip
    for number, effort in enumerate(("low", "high")):
        write_evaluation(workspace, effort, {GREEDY: first(60 + number)}, evaluation={"engine": "openai"})
        asked = f"model.endpoint.request.reasoning_effort={effort}"
        write_run(workspace, f"smoke-{number + 2}", {"evaluate_base": effort}, *served, asked)
    (table,) = read_board(workspace).tables
    assert sorted(row.name.text for row in table.rows) == [
        "smoke · base",
        "smoke · org/gpt-x (API) · model.endpoint.request.reasoning_effort=high",
        "smoke · org/gpt-x (API) · model.endpoint.request.reasoning_effort=low",
    ]
