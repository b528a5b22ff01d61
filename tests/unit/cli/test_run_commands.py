"""`show` of runs whose stages were finished by hand."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from synthetic.finished_stages import finish, run_of
from synthetic.result_rows import result_row, sample_record
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from luffy.api import sample_view
from luffy.api.sample_view import ShownSample, read_range, samples_of
from luffy.cli.main import main
from luffy.cli.run_view import show_card
from luffy.config import load_experiment
from luffy.data.parquet import write_prompts
from luffy.errors import ConfigError
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, write_sample_records
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import write_job
from luffy.pipeline.records import RunRecord, StageEntry
from luffy.pipeline.workspace import Workspace
from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Hint, Message, Outcome, Prompt, Source, Trace, Trajectory

SMOKE = "exp_configs/smoke.yaml"
SOURCE = {
    "kind": "file", "inputs": {"rows.jsonl": "abc123"}, "rows_in": 10, "rows_out": 6, "malformed": {"reward_model": 1},
    "rejected": {"wrong": 1, "too_long": 1}, "folded": 1, "rejected_traces": {}, "longest_rejected": {"too_long": 12},
    "traces_out": 7, "prompt_tokens": {"min": 3, "p50": 5, "max": 9}, "trace_tokens": {}, "replays": {},
    "gold_findings": [],
}  # fmt: skip
WORDS = {"[UNK]": 0, "one": 1, "plus": 2, "is": 3, "two": 4, "three": 5}
RECORD = sample_record("arc", "", prompt="what is it", response="so B", answer="B", ground_truth="B")


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path / "workspace"))
    return Workspace(tmp_path / "workspace")


def opened(workspace, *overrides):
    return open_experiment(load_experiment(SMOKE, overrides), workspace, code=lambda rooms: {"module": "1"})


def rows(last_reward):
    return "".join(
        json.dumps({"step": step, "reward/mean": last_reward * step / 4, "actor/loss": -0.5, "perf/step_s": 1.0}) + "\n"
        for step in range(1, 5)
    )


def evaluate(directory, correct, suite="arc", confidential=False):
    """What an evaluation leaves of 40 problems, of which the first `correct` are solved."""
    records = [
        replace(
            RECORD, suite=suite, uid=f"p{i}", correct=i < correct, outcome="correct" if i < correct else "wrong",
            answer="B" if i < correct else "C", confidential=confidential,
        )
        for i in range(40)
    ]  # fmt: skip
    write_sample_records(directory / SAMPLES_FILE, records)
    results = EvaluationResults(checkpoint="rl", confidence=0.95, rows=(result_row(records, 0.95),))
    write_results(directory / "results.json", results)


def whole_run(workspace, *overrides, reward=0.8, correct=30):
    """A run with curves, and with the evaluation of its last checkpoint."""
    experiment = opened(workspace, *overrides)
    for node in experiment.nodes:
        plan = finish(experiment, node.name, metrics=rows(reward) if node.name in ("base", "rl") else "")
        if node.name == "prepare_data":
            (plan.directory / "card.json").write_text(json.dumps({"sources": {"train": SOURCE}}))
        if node.name == "evaluate_rl":
            evaluate(plan.directory, correct)
    return experiment, run_of(experiment)


def shown(capsys, *arguments, code=0):
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out if code in (0, 130) else captured.err


def test_show_goes_from_the_configuration_to_the_accuracies_and_curves(workspace, capsys, tmp_path):
    experiment, _ = whole_run(workspace, "sft.optimizer.lr=2e-3")
    out = shown(capsys, "show", "smoke", "--svg", str(tmp_path / "svg"))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "smoke-1: finished by pid" in out
    assert "sft.optimizer.lr 0.002" in lines
    keys = {name: identity.key for name, identity in experiment.identities.items()}
    assert f"rl finished {keys['rl']} 1m00s reused" in lines
    assert any(re.match(f"rl data prepare_data {keys['prepare_data']} [0-9a-f]{{16}}", line) for line in lines)
    assert any(re.match(f"model sft {keys['sft']} [0-9a-f]{{16}}", line) for line in lines)
    assert "prepare_data data.train file: rows.jsonl abc123" in lines
    assert "reward/mean 0.8 0.8" in lines
    assert any(re.match(r"arc greedy 75\.0 \[\d", line) for line in lines)
    assert "smoke-1-rl.svg" in out and "Reward" in (tmp_path / "svg" / "smoke-1-rl.svg").read_text()


def test_defaults_are_told_from_what_was_chosen(workspace, capsys):
    whole_run(workspace, "rl.max_staleness=0")
    lines = [" ".join(line.split()) for line in shown(capsys, "show", "smoke-1").splitlines()]
    assert {"rl.steps 6", "tracking.samples_every 2 10"} <= {*lines}
    assert "rl.max_staleness 0" not in lines and any(line.endswith("(--all shows them)") for line in lines)
    lines = [" ".join(line.split()) for line in shown(capsys, "show", "smoke-1", "--all").splitlines()]
    assert {"rl.max_staleness 0", "execution.checkpoint.keep 2", "objective.terms.off_policy.loss.kind"} <= {
        *lines, *(line.rpartition(" ")[0] for line in lines),
    }  # fmt: skip


def test_files_are_named_in_the_lineage_with_their_hashes(workspace, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    experiment, _ = whole_run(workspace, f"data.train={{kind: file, path: {tmp_path}/rows.jsonl}}")
    digest = experiment.identities["prepare_data"].files["rows.jsonl (data.train)"]
    assert f"file rows.jsonl (data.train) {digest[:16]}" in " ".join(shown(capsys, "show", "smoke").split())


def test_data_of_a_run_that_sampled_its_policy_are_the_sampled_traces(workspace, capsys, tmp_path):
    experiment, _ = whole_run(workspace, "stages=[prepare_data,base,sample,sft]", "sample={max_response_tokens: 16}")
    for node, name, author in (("prepare_data", "train", "r1"), ("sample_1", "sampled", "policy")):
        trace = Trace("#### 2", author)
        prompt = Prompt("a", "sums", (Message("user", "one plus one"),), "2", traces=(trace,))
        write_prompts(experiment.plan_node(node).directory / f"{name}.parquet", [prompt])
    out = " ".join(shown(capsys, "export", "smoke", str(tmp_path / "traces.parquet")).split())
    assert "1 prompts with 1 traces (1 of policy)" in out


def rl_with_journal(workspace):
    experiment, _ = whole_run(workspace)
    plan = experiment.plan_node("rl")
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(plan.inputs["model"] / "model" / "tokenizer.json"))
    prompts = [Prompt(f"uid{step}", "sums", (Message("user", "one plus one"),), "2") for step in (1, 2)]
    hidden = Prompt("hidden", "my GPQA", (Message("user", "one plus one"),), "2")
    write_prompts(plan.inputs["data"] / "train.parquet", [*prompts, hidden])
    journal = RolloutJournal(plan.directory / "journal")
    for step in (1, 2):
        rows = (trajectory(4, 1.0), trajectory(5, 0.25), demonstration())
        journal.commit(step, [Group(f"uid{step}", rows), Group("hidden", rows)])


def trajectory(answer, reward, source=Source.ON_POLICY):
    outcome = Outcome.CORRECT if reward == 1 else Outcome.WRONG
    return Trajectory(
        (1, 2, 1), (3, answer), (source, source), (-0.5, -0.5), (0, 0), reward, outcome, FinishReason.STOP
    )


def demonstration():
    return trajectory(4, 1.0, Source.OFF_POLICY)


def test_rollouts_come_from_the_journal_by_reward_newest_first(workspace, capsys):
    rl_with_journal(workspace)
    out = shown(capsys, "show", "smoke", "--samples", "9", "--reward", "0..0.5")
    assert re.findall(r"step \d, .*", out) == [
        f"step {step}, rollout, reward 0.25 (wrong), uid{step}" for step in (2, 1)
    ]
    assert "one plus one" in out and "is three" in out and "is two" not in out
    assert "2 samples, there are no more" in out
    assert "demonstration" in shown(capsys, "show", "smoke", "--samples", "2", "--reward", "1..")


def test_the_history_of_a_prompt_tells_its_responses_apart_and_shows_no_text(workspace, capsys):
    experiment, _ = whole_run(workspace)
    journal = RolloutJournal(experiment.plan_node("rl").directory / "journal")
    old = replace(demonstration(), source=(Source.REPLAY,) * 2)
    hinted = replace(trajectory(5, 1.0), source=(Source.OFF_POLICY, Source.ON_POLICY))
    cut = replace(
        trajectory(4, 0.0), response_ids=(3, 4, 4), source=(Source.ON_POLICY,) * 3, finish_reason=FinishReason.LENGTH
    )
    wrong = Group("abc", (trajectory(4, 0.0), cut, demonstration()), replaced=(trajectory(4, 0.0),))
    journal.commit(1, [wrong, Group("xyz", (trajectory(5, 1.0),))])
    journal.commit(2, [Group("xyz", (trajectory(5, 1.0),))])
    journal.commit(3, [Group("abc", (trajectory(5, 1.0), hinted, old))])
    out = shown(capsys, "show", "smoke", "--prompt", "ab")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "Responses to abc"
    assert lines[2:] == [
        "1 2 rollout 0 2.5 1 wrong 2",
        "1 1 demonstration 1 2 0 correct 1",
        "1 1 rollout, replaced by a demonstration 0 2 0 wrong 1",
        "3 1 rollout 1 2 0 correct 1",
        "3 1 rollout after a demonstration's prefix 1 2 0 correct 1",
        "3 1 replayed rollout 1 2 0 correct 1",
    ]
    assert "one" not in out


def test_samples_and_history_tell_the_level_of_a_hint(workspace, capsys):
    rl_with_journal(workspace)
    hinted = replace(trajectory(4, 1.0, Source.HINTED), hint=Hint(2, "two is a hint"))
    spare = replace(trajectory(5, 0.0), hint=Hint(1, "one"))
    journal = RolloutJournal(opened(workspace).plan_node("rl").directory / "journal")
    journal.commit(3, [Group("abc", (hinted,), replaced=(trajectory(5, 0.0), spare))])
    out = shown(capsys, "show", "smoke", "--samples", "1", "--reward", "1")
    assert "rollout with a hint of level 2, learned without the hint" in out and "two is a hint" in out
    out = shown(capsys, "show", "smoke", "--prompt", "abc")
    assert [" ".join(line.split()) for line in out.splitlines()][2:] == [
        "3 1 rollout with a hint of level 2, learned without the hint 1 2 0 correct 1",
        "3 1 rollout, replaced by one with a hint 0 2 0 wrong 1",
        "3 1 rollout with a hint of level 1, learned with the hint, not needed 0 2 0 wrong 1",
    ]


def test_responses_of_an_evaluation_by_verdict_and_never_confidential_ones(workspace, capsys):
    experiment, _ = whole_run(workspace)
    out = shown(capsys, "show", "smoke", "--samples", "1", "--stage", "evaluate_rl", "--reward", "0")
    assert "arc, greedy, p30 #0, wrong: answer 'C'\n" in out and "so B\n  reference:\n    B\n" in out
    for suite, confidential in (("gpqa_diamond", False), ("mine", True)):
        evaluate(experiment.plan_node("evaluate_rl").directory, 30, suite, confidential)
        out = shown(capsys, "show", "smoke", "--samples", "9", "--stage", "evaluate_rl")
        assert out.startswith("0 samples") and "so B" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: no such run"),
        (["smoke", "--samples", "2", "--stage", "nothing"], "no such stage; there are prepare_data"),
        (["smoke", "--reward", "1"], "give --samples N, too"),
        (["smoke", "--samples", "2", "--reward", "high"], "give a number or a range"),
        (["smoke", "--samples", "2", "--reward", "1..0"], "--reward 1..0: the range is empty"),
        (["smoke", "--prompt", "a"], "no stage has a rollout journal"),
        (["smoke", "--prompt", "a", "--samples", "2"], "give one of them"),
        (["smoke", "--svg", __file__], "cannot be made (File exists); give another folder"),
        (["smoke", "--samples", "0"], "Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_of_show_are_lines(workspace, capsys, arguments, message):
    whole_run(workspace)
    err = shown(capsys, "show", *arguments, code=2)
    assert message in err and err.count("\n") == 1


def test_ranges_of_rewards():
    assert (read_range("0..0.5"), read_range("1")) == ((0, 0.5), (1, 1))
    assert (read_range("0.5.."), read_range("..0")) == ((0.5, inf), (-inf, 0))
    for text in ("a", "1..0", "..", "nan", "0..nan"):
        with pytest.raises(ConfigError, match="--reward"):
            read_range(text)


def test_no_command_on_runs_loads_torch_or_prefect(workspace, tmp_path):
    whole_run(workspace)
    code = "import sys; from luffy.cli.main import main\n"
    words = [f"show smoke --svg {tmp_path}", "diff smoke smoke", "show", "gc"]
    code += f"for words in {words}: main(words.split())\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'prefect')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("nodes", "shown"),
    [
        (["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_rl", "report"], "rl"),
        (["base", "sft", "evaluate_base", "evaluate_sft"], "evaluate_sft"),
        (["base", "evaluate_base", "sweep"], "sweep"),
    ],
)
def test_samples_are_those_of_rl_or_of_the_last_evaluation(monkeypatch, tmp_path, nodes, shown):
    for reader in ("_logged", "_responses"):
        monkeypatch.setattr(sample_view, reader, lambda path: iter([ShownSample(str(path), "", "", 1.0)]))
    stages = {node: StageEntry("key", tmp_path / node, "", "") for node in nodes}
    (sample,) = samples_of(RunRecord(tmp_path, "finished", stages=stages), None, (-inf, inf), 1)
    assert shown in Path(sample.heading).parts


def test_the_summary_of_the_data_counts_and_names_no_row(workspace, tmp_path, capsys):
    golds = {"golds": {"meets_itself": 5, "fails": 1}, "gold_findings": [{"uid": "secret", "finding": "fails"}]}
    suite = {**SOURCE, "malformed": {}, "rejected": {}, "folded": 0, "replays": {"same": 2, "different": 1}, **golds}
    benchmarks = {"checked": {"suites.hard": 6}, "not_checked": ["aime24"]}
    card = {"sources": {"train": SOURCE, "suites.hard": suite}, "benchmarks": benchmarks}
    (tmp_path / "card.json").write_text(json.dumps(card))
    show_card(tmp_path)
    out = capsys.readouterr().out
    row = "train file 10 6 7 wrong 1, too long 1 (up to 12 tokens), folded into another 1 – reward model 1 5 (max 9) –"
    assert row in " ".join(out.split()) and "secret" not in out
    assert "Traces of suites.hard played again in the environment: same 2, different 1\n" in out
    assert "Reference answers of suites.hard: meets itself 5, fails 1\n" in out
    assert "Training data was checked against: suites.hard; not available: aime24\n" in out
    assert f"The whole card: {tmp_path / 'card.md'}; malformed rows: {tmp_path / 'quarantine.jsonl'}" in out
    (tmp_path / "card.json").write_text(json.dumps({**card, "sources": {"suites.hard": suite}}))
    show_card(tmp_path)
    assert "malformed row" not in capsys.readouterr().out
