"""The leaderboard: which rows there are, what they are called, who is compared with whom, and who is the best."""

import re
import shutil

import pytest
from synthetic.evaluated_workspace import first, write_evaluation, write_run
from synthetic.pages import stands_alone

from luffy.cli.main import main
from luffy.evaluation.across_runs.all_results import read_leaderboard
from luffy.pipeline.manifest import collect_outputs, finished_manifest, write_manifest
from luffy.pipeline.workspace import Workspace
from luffy.report.evaluation_page import leaderboard_page, leaderboard_table
from luffy.report.page import html

GREEDY, SAMPLED, OTHER = ("math", "greedy"), ("math", "sampled"), ("other", "greedy")


@pytest.fixture
def workspace(tmp_path, request, monkeypatch) -> Workspace:
    monkeypatch.chdir(request.config.rootpath)
    return Workspace(tmp_path / "w")


OWN_MODEL = ("base=null", "data.corpus=null", "model.architecture=null")
SERVED = (
    *OWN_MODEL, "model.endpoint.name=org/gpt-x", "stages=[prepare_data, base, evaluate]", "evaluation.engine=openai",
    "execution.server.urls=[http://a:1]",
)  # fmt: skip


def alone(name: str, path: str):
    return {"k": "base"}, [({"evaluate_base": "k"}, (f"name={name}", f"model.path={path}", *OWN_MODEL))]


# fmt: off
NAMES = {  # checkpoints by the key of their evaluation; runs, by what they evaluated and their overrides; names
    "several runs reused it": (
        {"b": "base", "r": "rl"}, [({"evaluate_base": "b", "evaluate_rl": "r"}, ())] * 3,
        ["smoke-3 · base", "smoke-3 · luffy · RL step 6"],
    ),
    "each is named by the run that made it": (
        {"x": "rl", "y": "rl", "z": "rl"},
        [({"evaluate_rl": "x"}, ("seed=1",)), ({"evaluate_rl": "y"}, ("seed=2", "rl.optimizer.lr=2e-3")),
         ({"evaluate_rl": "z"}, ("method=dapo",))],
        ["smoke-1 · luffy · RL step 6", "smoke-2 · luffy · RL step 6", "smoke-3 · dapo · RL step 6"],
    ),
    "runs that are gone": (
        {"aaaaaaaaaa": "base", "bbbbbbbbbb": "base"}, [],
        [f"{weights * 8}, transformers, float32 · base" for weights in "ab"],
    ),
    "a model of a hub": (*alone("smoke", "Qwen/Qwen2.5-0.5B"), ["smoke-1 · Qwen2.5-0.5B"]),
    "a model of a workspace": (*alone("smoke", "/w/stages/rl/0f3a/model"), ["smoke-1 · rl/0f3a"]),
    "a model folder": (*alone("smoke", "/models/Mine"), ["smoke-1 · Mine"]),
    # In one table with models that were run here.
    "models behind an API": (
        {"local": "base", "low": "openai", "high": "openai"},
        [({"evaluate_base": "local"}, ()),
         *(({"evaluate_base": effort}, (*SERVED, f"model.endpoint.request.reasoning_effort={effort}"))
           for effort in ("low", "high"))],
        ["smoke-1 · base", "smoke-2 · org/gpt-x (API)", "smoke-3 · org/gpt-x (API)"],
    ),
}
# fmt: on


@pytest.mark.parametrize(("evaluations", "runs", "names"), NAMES.values(), ids=NAMES)
def test_rows_are_called_by_their_newest_run(workspace, evaluations, runs, names):
    for number, (key, made) in enumerate(evaluations.items()):
        served = {"checkpoint": "base", "evaluation": {"engine": "openai"}}
        own = served if made == "openai" else {"checkpoint": made}
        write_evaluation(workspace, key, {GREEDY: first(50 + number)}, **own)
    for number, (evaluated, overrides) in enumerate(runs, 1):
        write_run(workspace, f"smoke-{number}", evaluated, *overrides)
    (table,) = read_leaderboard(workspace).tables
    assert sorted(row.model.text for row in table.rows) == names
    if len(runs) > len(evaluations):
        assert table.rows[0].model.runs == ("smoke-1", "smoke-2", "smoke-3")
        assert leaderboard_table(table).rows[0][2].plain == "smoke-3 and 2 more"


def test_equal_weights_evaluated_again_are_one_row_and_the_newer_result_counts(workspace):
    write_evaluation(workspace, "old", {GREEDY: first(90), OTHER: first(5)}, model="m", day=1)
    write_evaluation(workspace, "new", {GREEDY: first(40)}, model="m", day=2)
    (table,) = read_leaderboard(workspace).tables
    (row,) = table.rows
    found = {column.suite: (cell.row.accuracy, cell.evaluation) for column, cell in row.cells.items()}
    assert found == {"math": (0.4, "new"), "other": (0.05, "old")}


@pytest.mark.parametrize(("keep_best", "num_rows"), [(None, 1), ({"metric": "accuracy"}, 2)])
def test_the_last_step_of_a_sweep_is_the_runs_model_unless_that_has_the_best_weights(workspace, keep_best, num_rows):
    evaluated = write_evaluation(workspace, "e", {GREEDY: first(60)}, checkpoint="rl", model="m")
    found, sweep = finished_manifest(evaluated), workspace.stage_directory("sweep", "s")
    shutil.copytree(evaluated, sweep / "step_000006")
    settings = {"rl": {"steps": 6}, "validation": {"schedule": {"every": 2, "keep_best": keep_best}}}
    outputs, own = collect_outputs(sweep, ["step_000006/results.json"]), {"protocol": found.settings}
    for stage, key, fields in (
        ("rl", "r", {"settings": settings, "outputs": ()}),
        ("sweep", "s", {"settings": own, "outputs": outputs, "upstream": {"model": "r"}}),
    ):
        workspace.stage_directory(stage, key).mkdir(parents=True, exist_ok=True)
        changed = found.model_copy(update={"stage": stage, "key": key, **fields})
        write_manifest(workspace.stage_directory(stage, key), changed)
    (table,) = read_leaderboard(workspace).tables
    assert len(table.rows) == num_rows


LONG, VLLM = {"evaluation": {"max_response_tokens": 2048}}, {"evaluation": {"engine": "vllm"}}
EIGHT = {"evaluation": {"decodings": {"sampled": {"temperature": 0.6, "num_samples": 8}}}}


PROTOCOLS = [
    (
        [((GREEDY, SAMPLED), {}), ((GREEDY,), LONG), ((GREEDY,), VLLM)],
        {
            "greedy: temperature 0.0, max_response_tokens 1024": ["e0", "e2"],
            "sampled: temperature 0.6, max_response_tokens 1024": ["e0"],
            "greedy: temperature 0.0, max_response_tokens 2048": ["e1"],
        },
    ),
    # Tables with the same title say what differs.
    ([((SAMPLED,), {}), ((SAMPLED,), EIGHT)], {"num_samples: 4": ["e0"], "num_samples: 8": ["e1"]}),
]


@pytest.mark.parametrize(("evaluations", "tables"), PROTOCOLS)
def test_protocols_are_never_in_one_table(workspace, evaluations, tables):
    for number, (cells, fields) in enumerate(evaluations):
        write_evaluation(workspace, f"e{number}", dict.fromkeys(cells, first(50 + number)), **fields)
    found = {
        table.note or table.title: sorted(c.evaluation for row in table.rows for c in row.cells.values())
        for table in read_leaderboard(workspace).tables
    }
    assert found == tables


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
    tables = read_leaderboard(workspace).tables
    assert len(tables) == num_tables and sum(len(table.rows) for table in tables) == len(evaluations)
    for table in tables:
        assert len(table.columns) == num_columns
        assert len(table.leads) == (num_columns == 1 and len(table.rows) > 1)
        assert len(set(leaderboard_table(table).header)) == 3 + num_columns


def scattered(count: int, step: int):
    return lambda problem, sample: (problem * step) % 100 < count


ONE_AND_LATER = first(59), lambda problem, sample: problem < 50 or problem == 59
CERTAINTIES = [  # best, following, number of suites and of problems, won and lost, whether a lead is clear
    (scattered(70, 37), scattered(40, 53), 1, 100, None, True),
    (scattered(52, 37), scattered(50, 53), 1, 100, None, False),
    (scattered(50, 37), scattered(50, 53), 1, 100, None, False),
    # Thirty problems won and none lost is a clear lead, though the two intervals overlap; whatever their order.
    (first(165), lambda problem, sample: problem >= 165, 1, 300, (30, 0), True),
    # Nine won and one lost (p = 0.01 to 0.05): alone that is a lead, among twelve such suites it is none.
    (*ONE_AND_LATER, 1, 100, (9, 1), True),
    (*ONE_AND_LATER, 12, 100, (9, 1), False),
]


@pytest.mark.parametrize(("best", "following", "suites", "problems", "counts", "is_clear"), CERTAINTIES)
def test_the_best_is_marked_only_where_it_is_certainly_better(
    workspace, best, following, suites, problems, counts, is_clear
):
    uids, cells = [f"p{i}" for i in range(problems)], [(f"s{i}", "greedy") for i in range(suites)]
    for key, verdict in {"a": best, "b": following, "c": first(1)}.items():
        ordered = uids[::-1] if key == "b" and problems == 300 else uids
        write_evaluation(workspace, key, dict.fromkeys(cells, verdict), problems=ordered)
    (table,) = read_leaderboard(workspace).tables
    found = [each.comparison.paired for each in table.leads.values()]
    assert [each.comparison.is_significant for each in table.leads.values()] == [is_clear] * suites
    if counts is not None:
        assert {(paired.wins, paired.losses) for paired in found} == {counts}
        assert all(paired.is_clear for paired in found)
    assert sum("★" in cell.text for row in leaderboard_table(table).rows for cell in row) == (suites if is_clear else 0)
    if problems == 300:
        (column,) = table.columns
        assert table.rows[0].cells[column].row.interval[0] < table.rows[1].cells[column].row.interval[1]


def test_the_mean_is_over_all_suites_with_an_interval_narrower_than_theirs(workspace):
    write_evaluation(workspace, "a", {GREEDY: first(50), OTHER: first(30)})
    write_evaluation(workspace, "b", {GREEDY: first(90)})
    (table,) = read_leaderboard(workspace).tables
    whole = next(row for row in table.rows if len(row.cells) == 2)
    mean = table.mean(whole)
    assert mean is not None and mean.value == pytest.approx(0.4)
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
    board = read_leaderboard(workspace)
    assert [row.model.identity[0] for row in board.tables[0].rows] == ["good"]
    assert {directory.name: reason for directory, reason in board.left_out.items()} == {
        "damaged": "samples.jsonl.zst is changed",
        "running": "not finished",
        "older": "written by another version",
        "earlier": "written by another version",
    }


def test_the_command_prints_the_table_and_writes_the_page_which_trusts_no_name(workspace, capsys):
    hostile = "<script>alert(1)</script>"
    write_evaluation(workspace, "b", {(hostile, "greedy"): first(10)})
    write_evaluation(workspace, "r", {(hostile, "greedy"): first(60)}, checkpoint="rl")
    write_run(workspace, "smoke-1", {"evaluate_base": "b", "evaluate_rl": "r"})
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 0
    out, page = capsys.readouterr().out, workspace.root / "leaderboard.html"
    assert re.search(r"RL step 6 +luffy +smoke-1 +60\.0 ★", out)
    assert out.splitlines()[-1] == f"leaderboard: {page}"
    board = read_leaderboard(workspace)
    for text in (page.read_text(), html(leaderboard_page(board, hostile))):
        stands_alone(text)
        assert "★" in text and "&lt;script" in text
    (table,) = board.tables
    best, ((column, lead),) = table.rows[0].model, table.leads.items()
    assert (best.experiment, best.method, best.checkpoint) == ("smoke", "luffy", "RL step 6")
    assert (lead.next.model.text, lead.comparison.paired.difference.value) == ("smoke-1 · base", 0.5)
    assert lead.comparison.is_significant and table.rows[0].cells[column].evaluation == "r"


def test_a_workspace_without_evaluations_is_a_mistake_of_one_line(workspace, capsys):
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 2
    (write_evaluation(workspace, "k", {GREEDY: first(1)}) / "manifest.json").unlink()
    assert main(["show", "--leaderboard", "--workspace", str(workspace.root)]) == 2
    missing, unfinished = capsys.readouterr().err.splitlines()
    assert "--workspace" in missing and "k: not finished" in unfinished
