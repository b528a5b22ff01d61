"""`show` and `export` of runs whose stages were finished by hand: the numbers and texts of their files are there."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import yaml
from support.refusals import refused
from synthetic.finished_chain import write_chain
from synthetic.finished_stages import finish, run_of
from synthetic.result_rows import result_row, sample_record
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from luffy.api.sample_view import read_range
from luffy.cli.commands.export import write_card
from luffy.cli.main import main
from luffy.cli.run_view import show_card
from luffy.config import load_experiment
from luffy.data.parquet import write_prompts
from luffy.errors import DataError
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, write_sample_records
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.job import write_job
from luffy.pipeline.records import RecordedStage, RunRecord
from luffy.pipeline.workspace import Workspace
from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Message, Outcome, Prompt, Source, Start, Trace, Trajectory

SOURCE = {
    "kind": "file", "inputs": {"rows.jsonl": "abc123"}, "rows_in": 10, "rows_out": 6, "malformed": {"reward_model": 1},
    "rejected": {"wrong": 1, "too_long": 1}, "folded": 1, "rejected_traces": {}, "longest_rejected": {"too_long": 12},
    "traces_out": 7, "prompt_tokens": {"min": 3, "p50": 5, "max": 9}, "trace_tokens": {},
    "gold_findings": [],
}  # fmt: skip
WORDS = {"[UNK]": 0, "one": 1, "plus": 2, "is": 3, "two": 4, "three": 5}
RECORD = sample_record("arc", "", prompt="what is it", response="so B", answer="B", ground_truth="B")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def evaluate(directory, correct, suite="arc", confidential=False):
    """What an evaluation leaves of 40 problems, of which the first `correct` are solved."""
    wrong = replace(RECORD, correct=False, outcome="wrong", answer="C")
    rows = [RECORD] * correct + [wrong] * (40 - correct)
    records = [replace(row, suite=suite, uid=f"p{i}", confidential=confidential) for i, row in enumerate(rows)]
    write_sample_records(directory / SAMPLES_FILE, records)
    results = EvaluationResults(checkpoint="rl", confidence=0.95, rows=(result_row(records, 0.95),))
    write_results(directory / "results.json", results)


def whole_run(folder: Path, *overrides: str) -> Experiment:
    """A run with curves, and with the evaluation of its last checkpoint."""
    workspace = Workspace(folder)
    experiment = open_experiment(load_experiment("smoke", overrides), workspace, code=lambda *_: {"module": "1"})
    rows = [{"step": step, "reward/mean": step / 5, "actor/loss": -0.5, "perf/step_s": 1.0} for step in range(1, 5)]
    for node in experiment.nodes:
        metrics = "".join(f"{json.dumps(row)}\n" for row in rows) if node.name in ("base", "rl") else ""
        plan = finish(experiment, node.name, metrics=metrics)
        if node.name == "prepare_data":
            (plan.directory / "card.json").write_text(json.dumps({"sources": {"train": SOURCE}}))
        if node.name == "evaluate_rl":
            evaluate(plan.directory, 30)
    run_of(experiment)
    return experiment


def trajectory(answer, reward, source=Source.ON_POLICY, **fields):
    outcome = Outcome.CORRECT if reward == 1 else Outcome.WRONG
    row = Trajectory((1, 2, 1), (3, answer), (source, source), (-0.5, -0.5), (0, 0), reward, outcome, FinishReason.STOP)
    return replace(row, **fields)


def write_journal(experiment: Experiment) -> None:
    """Steps 1 and 2 with a prompt each, and one of a confidential benchmark; then the histories of three prompts."""
    plan = experiment.plan_node("rl")
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(plan.inputs["model"] / "model" / "tokenizer.json"))
    prompts = [Prompt(f"uid{step}", "sums", (Message("user", "one plus one"),), "2") for step in (1, 2)]
    hidden = Prompt("hidden", "my GPQA", (Message("user", "one plus one"),), "2")
    write_prompts(plan.inputs["data"] / "train.parquet", [*prompts, hidden])
    journal = RolloutJournal(plan.directory / "journal")
    demonstration = trajectory(4, 1.0, Source.OFF_POLICY)
    for step in (1, 2):
        rows = (trajectory(4, 1.0), trajectory(5, 0.25), demonstration)
        journal.commit(step, [Group(f"uid{step}", rows), Group("hidden", rows)])
    right, wrong = trajectory(5, 1.0), trajectory(4, 0.0)
    old = replace(demonstration, source=(Source.REPLAY,) * 2)
    prefixed = replace(right, source=(Source.OFF_POLICY, Source.ON_POLICY))
    cut = replace(wrong, response_ids=(3, 4, 4), source=(Source.ON_POLICY,) * 3, finish_reason=FinishReason.LENGTH)
    journal.commit(3, [Group("abc", (wrong, cut, demonstration), replaced=(wrong,)), Group("xyz", (right,))])
    journal.commit(4, [Group("xyz", (right,))])
    journal.commit(5, [Group("abc", (right, prefixed, old))])
    hinted = trajectory(4, 1.0, Source.HINTED, start=Start("hint", 0.5, "two is a hint"))
    spare = trajectory(5, 0.0, start=Start("hint", 0.25, "one"))
    journal.commit(6, [Group("hint", (hinted,), replaced=(trajectory(5, 0.0), spare))])


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    """One run for all tests that only read."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "rows.jsonl").write_text("{}\n")
    overrides = ["sft.optimizer.lr=2e-3", "rl.max_staleness=0"]
    made = whole_run(folder / "workspace", *overrides, f"data.train={{kind: file, path: {folder}/rows.jsonl}}")
    write_journal(made)
    return made


@pytest.fixture
def show(experiment, capsys, monkeypatch):
    """What `luffy show` prints, by lines of single blanks; of a mistake, its one line."""

    def shown(*arguments: str, code: int = 0) -> list[str]:
        monkeypatch.setenv("LUFFY_WORKSPACE", str(experiment.workspace.root))
        assert main(["show", *arguments]) == code
        captured = capsys.readouterr()
        return [" ".join(line.split()) for line in (captured.err if code else captured.out).splitlines()]

    return shown


def test_show_goes_from_the_configuration_to_the_accuracies(experiment, show):
    lines = show("smoke")
    keys = {name: identity.key for name, identity in experiment.identities.items()}
    digest = experiment.identities["prepare_data"].files["rows.jsonl (data.train)"]
    assert {
        "sft.optimizer.lr 0.002", "rl.steps 6", "tracking.samples_every 2 10",  # the last one is the default
        f"rl finished {keys['rl']} 1m00s reused", "data.train file: rows.jsonl abc123",
        "reward/mean 0.8 0.8",
    } <= {*lines}  # fmt: skip
    for pattern in (
        "smoke-1: finished by pid",
        rf"rl data prepare_data {keys['prepare_data']} [0-9a-f]{{16}}",
        rf"model sft {keys['sft']} [0-9a-f]{{16}}",
        rf".*file rows\.jsonl \(data\.train\) {digest[:16]}",
        r"arc greedy 75\.0 \[\d",
        r".*\(--all shows them\)$",
    ):
        assert any(re.match(pattern, line) for line in lines), pattern
    everything = show("smoke-1", "--all")
    assert "rl.max_staleness 0" in everything and "rl.max_staleness 0" not in lines  # given, and yet the default
    assert "execution.checkpoint.keep 2" in everything
    assert any(line.startswith("objective.terms.off_policy.loss.kind ") for line in everything)


def test_rollouts_come_from_the_journal_by_reward_newest_first(show):
    lines = show("smoke", "--samples", "9", "--reward", "0.2..0.3")
    headings = [f"step {step}, rollout, reward 0.25 (wrong), uid{step}" for step in (2, 1)]
    out = " ".join(lines)
    assert re.findall(r"step \d, .*?uid\d", out) == headings
    assert "one plus one" in out and "is three" in out and "is two" not in out
    assert "2 samples, there are no more" in out
    assert "demonstration" in " ".join(show("smoke", "--samples", "9", "--reward", "1.."))
    newest = " ".join(show("smoke", "--samples", "1", "--reward", "1"))
    assert "rollout with a hint, learned without it, hint 0.5, reward 1" in newest and "two is a hint" in newest


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("ab", [
            "3 2 rollout 0 2.5 1 wrong 2",
            "3 1 demonstration 1 2 0 correct 1",
            "3 1 rollout, replaced by a demonstration 0 2 0 wrong 1",
            "5 1 rollout 1 2 0 correct 1",
            "5 1 rollout after a demonstration's prefix 1 2 0 correct 1",
            "5 1 replayed rollout 1 2 0 correct 1",
        ]),
        ("hint", [
            "6 1 rollout with a hint, learned without it 1 2 0 correct 1",
            "6 1 rollout, replaced by one with a hint 0 2 0 wrong 1",
            "6 1 rollout with a hint, learned with it, not needed 0 2 0 wrong 1",
        ]),
    ],
)  # fmt: skip
def test_the_history_of_a_prompt_tells_its_responses_apart_and_shows_no_text(show, prefix, expected):
    title, _, *rows = show("smoke", "--prompt", prefix)
    assert (title, rows) == (f"Responses to {'abc' if prefix == 'ab' else prefix}", expected)


@pytest.mark.parametrize(
    ("suite", "confidential", "text"),
    [("arc", False, "arc, greedy, p30 #0, wrong: answer 'C'"), ("gpqa_diamond", False, None), ("mine", True, None)],
)
def test_responses_of_an_evaluation_by_verdict_and_never_confidential_ones(tmp_path, capsys, suite, confidential, text):
    experiment = whole_run(tmp_path)
    evaluate(experiment.plan_node("evaluate_rl").directory, 30, suite, confidential)
    asked = ["show", "smoke", "--samples", "1", "--stage", "evaluate_rl", "--reward", "0"]
    assert main([*asked, "--workspace", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    if text:
        assert f"{text}\n" in out and "so B\n  reference:\n    B\n" in out
    else:
        assert out.startswith("0 samples") and "so B" not in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("none", "none: no such run"),
        ("smoke --samples 2 --stage nothing", "nothing: no such stage; there are prepare_data"),
        ("smoke --reward 1", "--samples N"),
        ("smoke --samples 2 --reward high", "give a number or a range"),
        ("smoke --samples 2 --reward 1..0", "--reward 1..0"),
        ("smoke --samples 0", "greater than or equal to 1"),
        ("smoke --prompt a --samples 2", "give one of them"),
    ],
)
def test_mistakes_of_show_are_lines(show, arguments, named):
    (line,) = show(*arguments.split(), code=2)
    assert named in line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0..0.5", (0, 0.5)), ("1", (1, 1)), ("0.5..", (0.5, inf)), ("..0", (-inf, 0)),
        *((text, None) for text in ("a", "1..0", "..", "nan", "0..nan")),
    ],
)  # fmt: skip
def test_ranges_of_rewards(text, found):
    with nullcontext() if found else refused("--reward"):
        assert read_range(text) == found


def test_no_command_on_runs_loads_torch_or_prefect_or_reads_source(experiment):
    """Docstrings of fields are read from their source, where they are asked for."""
    words = ["show smoke", "diff smoke smoke", "show", "gc"]
    code = f"""
import sys
from luffy.cli.main import main
from luffy.config import strict
for words in {words}:
    main([*words.split(), "--workspace", {str(experiment.workspace.root)!r}])
print({{"torch", "prefect"}} & {{*sys.modules}}, strict._docs_in.cache_info().misses, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "set() 0"


def test_the_summary_of_the_data_counts_and_names_no_row(tmp_path, capsys):
    golds = {"golds": {"meets_itself": 5, "fails": 1}, "gold_findings": [{"uid": "secret", "finding": "fails"}]}
    suite = {**SOURCE, "malformed": {}, "rejected": {}, "folded": 0, **golds}
    benchmarks = {"checked": {"suites.hard": 6}, "not_checked": ["aime24"]}
    card = {"sources": {"train": SOURCE, "suites.hard": suite}, "benchmarks": benchmarks}
    (tmp_path / "card.json").write_text(json.dumps(card))
    show_card(tmp_path)
    out = capsys.readouterr().out
    row = "train file 10 6 7 wrong 1, too long 1 (up to 12 tokens), folded into another 1 – reward model 1 5 (max 9) –"
    assert row in " ".join(out.split()) and "secret" not in out
    for line in (
        "Reference answers of suites.hard: meets itself 5, fails 1",
        "Training data was checked against: suites.hard; not available: aime24",
    ):
        assert f"{line}\n" in out
    assert f"{tmp_path / 'card.md'}" in out and f"{tmp_path / 'quarantine.jsonl'}" in out
    (tmp_path / "card.json").write_text(json.dumps({**card, "sources": {"suites.hard": suite}}))
    show_card(tmp_path)
    assert "malformed row" not in capsys.readouterr().out


def record(workspace: Path, name: str, **content: object) -> Path:
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"state": "finished", **content}))
    return folder / "run.json"


def test_show_without_a_run_lists_runs_and_results(capsys, tmp_path):
    size = record(tmp_path, "exp-1", stages={"base": {"key": "abc"}}).stat().st_size
    checkpoint = tmp_path / "stages" / "base" / "abc" / "checkpoints" / "step_000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    assert main(["show", "--workspace", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {f"exp-1 finished 0s {size} B base", "base abc interrupted (step 40) 0s 0 B exp-1"} <= {*lines}


def test_show_lists_the_runs_with_a_tag_and_their_notes(capsys, tmp_path):
    for number, tags in enumerate((["paper", "v2"], ["paper"], [])):
        record(tmp_path, f"exp-{number}", config={"tracking": {"tags": tags, "note": "a longer warm-up"}})
    asked = ["--workspace", str(tmp_path), "--tag", "paper"]
    assert main(["show", *asked, "--tag", "v2"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exp-")]
    assert line.startswith("exp-0") and line.rstrip().endswith("#paper #v2 a longer warm-up")
    assert main(["show", "exp-0", *asked]) == 2


def test_data_of_a_run_that_sampled_its_policy_are_the_sampled_traces(capsys, tmp_path):
    experiment = whole_run(tmp_path, "stages=[prepare_data,base,sample,sft]", "sample={max_response_tokens: 16}")
    for node, name, author in (("prepare_data", "train", "r1"), ("sample", "sampled", "policy")):
        trace = Trace("#### 2", author)
        prompt = Prompt("a", "sums", (Message("user", "one plus one"),), "2", traces=(trace,))
        write_prompts(experiment.plan_node(node).directory / f"{name}.parquet", [prompt])
    assert main(["export", "smoke", str(tmp_path / "traces.parquet"), "--workspace", str(tmp_path)]) == 0
    assert "1 prompts with 1 traces (1 of policy)" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "smoke", "--prompt", "a", "--workspace", str(tmp_path)]) == 2
    assert "no stage has a rollout journal" in capsys.readouterr().err


def test_a_card_has_data_method_accuracies_and_the_command_and_needs_an_evaluation(tmp_path: Path) -> None:
    config, inputs = write_chain(tmp_path / "chain", num_problems=20, num_steps=4)
    inputs["prepare_data"] = inputs.pop("data")
    stages = {name: RecordedStage(name, directory, "run", "") for name, directory in inputs.items()}
    run = RunRecord(tmp_path, "finished", stages=stages, config=config.model_dump(mode="json"))
    write_card(run, "rl", tmp_path)
    text = (tmp_path / "README.md").read_text()
    known = yaml.safe_load(text.split("---\n")[1])
    assert (known["library_name"], known["tags"]) == ("transformers", ["luffy"])
    assert "The policy after the stage rl of arithmetic, which starts from a policy trained from scratch." in text
    assert "| suite | base | SFT | RL |" in text and "| longer, sampled 20 problems |" in text
    assert "### rl" in text and "-A rho / (rho + 0.1)" in text
    assert "| train | arithmetic |" in text and "luffy run experiment.yaml" in text
    assert load_experiment(tmp_path / "experiment.yaml") == run.configuration
    alone = replace(run, config={**run.config, "stages": ["prepare_data", "base", "sft", "rl"]})
    with refused("no stage evaluate", error=DataError):
        write_card(alone, "rl", tmp_path)
