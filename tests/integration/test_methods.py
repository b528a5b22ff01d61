"""Every method as its user runs it: real RL steps, interrupted and resumed to the same bits."""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from filecmp import cmp
from pathlib import Path

import pytest
import torch
from forked_program import ForkedProgram
from reference.taught_presets import SELF_TAUGHT, SUPERVISED, teacher_overrides
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from luffy.config import available_presets, load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.group import DynamicSampling
from luffy.errors import DataError
from luffy.pipeline.events import EventWriter
from luffy.pipeline.graph import StageNode, build_graph
from luffy.stages import base, evaluate, prepare_data, rl, sft
from luffy.stages.program import StageContext, StageResult
from luffy.tracking.metrics import read_metrics, without_times

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"prepare_data": prepare_data, "base": base, "sft": sft, "rl": rl, "evaluate": evaluate}
METHODS = [name for name in available_presets("methods") if name not in SUPERVISED]
STEPS = 3
KILLED = ("exgrpo", "guide", "bread", "sdpo", "ampo")
"""Methods that really are killed, between the two updates of a step."""
# A quarter of this base's rollouts are right: gates open and shut, groups are mixed, replay has something to replay.
EASY = (
    "data.train={kind: arithmetic, num_prompts: 32, num_operations: [1, 2], operations: {reverse: 1}}",
    "data.corpus={kind: arithmetic, num_prompts: 4000, num_operations: [1, 1, 2], operations: {reverse: 1}, "
    "stepwise_share: 0.7, unique: false}",
    "base={steps: 120, batch_size: 32, optimizer: {lr: 6e-3, betas: [0.9, 0.98], "
    "schedule: {kind: cosine, warmup_share: 0.05}}}",
    f"rl.steps={STEPS}",
    "execution.micro_batch_tokens=4096",
    "execution.checkpoint={rl_every: 1, keep: 3}",
)
IN_FRONT = 'objective.group.hint.template="{hint}\\n{prompt}"'
RETRIES = ('objective.group.retry.template="{feedback}\\n{prompt}"', "objective.group.retry.max_prompt_tokens=64")
# What a run of three small steps must be told to reach the part that makes the method.
SMALL = {
    "relift": ("objective.interleaved_sft.buffer_size=2",),
    "exgrpo": ("objective.replay.start_accuracy=0.05",),
    # English words take many of the tokens that this base's tokenizer has, and it has few positions.
    **dict.fromkeys(SELF_TAUGHT, ('rl.teacher.prompt="{trace} {problem}"',)),
    "ppo": ("rl.critic.optimizer.lr=1e-3",),
    "critique_grpo": (*RETRIES, *(f'objective.group.retry.{text}="{{reference}}"' for text in ("right", "wrong"))),
    # Also where some rollouts are right, so that a retry is, too.
    "lte": (
        *RETRIES,
        'objective.group.retry.wrong="{answers}"',
        "objective.group.retry.truncated=null",
        "objective.group.retry.accuracy_at_most=0.9",
    ),
    # The hint in front: this base knows what follows the question, and so solves some prompts with it.
    "guide": (IN_FRONT, "objective.group.size=4", "objective.group.hint.rows_per_level=4"),
    "questa": (IN_FRONT,),
    "pope": (IN_FRONT,),
}
TWO_UPDATES = ("rl.steps=5", "rl.prompts_per_step=4", "rl.prompts_per_update=2", "execution.checkpoint.rl_every=2")


Finished = Callable[..., tuple[ExperimentConfig, Path]]
"""The fixture `finished`."""


class CopyingEvents(EventWriter):
    """Copies what lies in the stage's folder after step 2 to `copy_to`.

    That step was journalled, learned from and logged, but no later checkpoint is complete.
    """

    def __init__(self, path: Path, copy_to: Path | None) -> None:
        super().__init__(path)
        self._out, self._copy_to = path.parent, copy_to

    def progress(self, step: int, total: int, **metrics: float) -> None:
        super().progress(step, total, **metrics)
        if step == 2 and self._copy_to is not None:
            shutil.copytree(self._out, self._copy_to)


def experiment(method: str, *overrides: str) -> ExperimentConfig:
    chain = "sft" if method in SUPERVISED else "rl"
    return load_experiment(
        ROOT / "exp_configs/smoke.yaml",
        [f"chain={chain}", f"method={method}", *EASY, *SMALL.get(method, ()), *overrides],
    )


def run_stage(
    node: StageNode,
    config: ExperimentConfig,
    out: Path,
    inputs: Mapping[str, Path],
    copy_to: Path | None = None,
    extends: Path | None = None,
) -> StageResult:
    """Run one stage of an experiment in this process."""
    out.mkdir(parents=True, exist_ok=True)
    events = CopyingEvents(out / "events.jsonl", copy_to)
    context = StageContext(out, inputs, "key", node.name, config.execution, config.tracking, events, extends)
    return STAGES[node.stage].run(node.settings, context)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, Path]:
    """Data and a base policy that is right now and then."""
    folder = tmp_path_factory.mktemp("upstream")
    made = upstream_of(experiment("luffy"), folder)
    _disturb(folder / "model/model", folder / "teacher")
    config = experiment("luffy", "data.train.styles=[labelled,equations,checked]")
    run_stage(build_graph(config)[0], config, folder / "several", {})
    return made


def upstream_of(config: ExperimentConfig, folder: Path) -> dict[str, Path]:
    """What the RL stage of an experiment needs, made in the folder."""
    data, model = build_graph(config)[:2]
    run_stage(data, config, folder / "data", {})
    run_stage(model, config, folder / "model", {"data": folder / "data"})
    return {"data": folder / "data", "model": folder / "model", "held_out": folder / "data"}


def _disturb(model: Path, out: Path) -> None:
    """A model that differs from another a little: a teacher without a training of its own."""
    shutil.copytree(model, out)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    noisy = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(noisy, out / "model.safetensors", metadata={"format": "pt"})


def taught(method: str, upstream: Mapping[str, Path]) -> list[str]:
    """The teacher of a method that needs one, as overrides."""
    return teacher_overrides(method, str(upstream["model"].parent / "teacher"))


def run_rl(
    config: ExperimentConfig, out: Path, upstream: Mapping[str, Path], copy_to: Path | None = None
) -> StageResult:
    (node,) = (node for node in build_graph(config) if node.stage == "rl")
    if config.method == "ampo":
        upstream = {**upstream, "data": upstream["data"].with_name("several")}
    return run_stage(node, config, out, upstream, copy_to)


@pytest.fixture(scope="module")
def finished(upstream, tmp_path_factory) -> Finished:
    """Runs a method undisturbed, once for each of its settings; returns them and the folder, not to be changed."""
    made: dict[tuple[str, ...], tuple[ExperimentConfig, Path]] = {}

    def run(method: str, *overrides: str) -> tuple[ExperimentConfig, Path]:
        key = (method, *overrides)
        if key not in made:
            config, out = experiment(method, *overrides), tmp_path_factory.mktemp(method) / "undisturbed"
            run_rl(config, out, upstream, copy_to=after_step_2(out))
            made[key] = (config, out)
        return made[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method not in KILLED])
def test_a_method_runs_three_steps_and_resumes_to_the_same_bits(method, upstream, finished):
    config, out = finished(method, *taught(method, upstream))
    assert_resumes_from_step_1(config, out, upstream)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    _assert_reports_what_it_does(config, rows)


def run_killed(out: Path, method: str, upstream: Mapping[str, Path], *overrides: str, update: int = 8) -> None:
    """Killed before an optimizer step, here the second of step 4: the last checkpoint is step 2's."""
    arguments = [method, str(update), str(out), str(upstream["data"]), str(upstream["model"]), *overrides]
    killed = ForkedProgram([sys.executable, "-m", "killed_run", *arguments], out.with_name("killed.log"))
    assert killed.ended() == -signal.SIGKILL, out.with_name("killed.log").read_text()


def assert_steps_3_and_4_lie_in_the_journal(out: Path) -> None:
    assert (out / "journal/step_000004.parquet").exists()
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("method", KILLED)
def test_a_kill_between_the_two_updates_of_a_step_resumes_to_the_same_bits(method, upstream, finished, tmp_path):
    out, teacher = tmp_path / "killed", taught(method, upstream)
    run_killed(out, method, upstream, *teacher)
    assert_steps_3_and_4_lie_in_the_journal(out)
    config, undisturbed = finished(method, *TWO_UPDATES, *teacher)
    assert run_rl(config, out, upstream).resumed_from == 2
    assert_same_result(undisturbed, out)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    _assert_reports_what_it_does(config, rows)
    if method == "guide":
        assert any(row["batch/hint_solved_share"] > 0 for row in read_metrics(out / "metrics.jsonl"))
    if method == "exgrpo":
        *before, third, fourth, fifth = (row["batch/replayed_share"] for row in read_metrics(out / "metrics.jsonl"))
        # How many successes the first two steps have to replay depends on how the machine rounds.
        assert before == [0, 0] and 0 < third <= fourth <= fifth == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_kill_while_groups_are_open_resumes_to_the_same_bits(upstream, finished, tmp_path):
    """Killed before the update of step 4, whose open groups have tokens of steps before the checkpoint of step 2."""
    partial, out = ("rl.partial_rollout_tokens=8", "rl.prompts_per_update=null"), tmp_path / "killed"
    run_killed(out, "luffy", upstream, *partial, update=4)
    assert_steps_3_and_4_lie_in_the_journal(out)
    config, undisturbed = finished("luffy", *TWO_UPDATES, *partial)
    assert run_rl(config, out, upstream).resumed_from == 2
    assert_same_result(undisturbed, out, "journal/step_000005.parquet", "journal/open_000005.parquet")
    rows = read_metrics(out / "metrics.jsonl")
    assert all(row["rollout/interrupted_rows"] > 0 for row in rows)
    assert rows[0]["rollout/staleness_max"] == 0 < max(row["rollout/staleness_max"] for row in rows)


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_is_refused_before_the_first_step(upstream, tmp_path):
    """As many tokens, and a model that would score them all: only their texts differ."""
    teacher = tmp_path / "teacher"
    shutil.copytree(upstream["model"].parent / "teacher", teacher)
    vocabulary = json.loads((teacher / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = sorted(words, key=words.get)[-2:]
    words[first], words[second] = words[second], words[first]
    (teacher / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = experiment("opd", f"rl.teacher={{kind: model, path: {teacher}}}")
    with pytest.raises(DataError, match=r"rl\.teacher\.path: the tokenizer of .* is not the policy's"):
        run_rl(config, tmp_path / "out", upstream)
    assert not (tmp_path / "out/journal").exists() or not any((tmp_path / "out/journal").iterdir())


@pytest.mark.slow
def test_a_teacher_with_too_few_embeddings_is_refused_before_the_first_step(upstream, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(upstream["model"].parent / "teacher", teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows - 1)
    model.save_pretrained(teacher)
    config = experiment("opd", f"rl.teacher={{kind: model, path: {teacher}}}")
    with pytest.raises(DataError, match=rf"embeddings for {rows - 1} tokens .* has {rows};"):
        run_rl(config, tmp_path / "out", upstream)


@pytest.mark.slow
def test_an_adapter_has_the_frozen_model_as_its_own_teacher(upstream, finished):
    """The policy's first step, whose adapter changes nothing yet, has the teacher's scores of full training."""
    config, out = finished("opsd", "model.lora={rank: 4, alpha: 8}")
    assert_resumes_from_step_1(config, out, upstream)
    adapted, full = (read_metrics(folder / "metrics.jsonl") for folder in (out, finished("opsd")[1]))
    name = "actor/distillation_reverse_kl"
    assert adapted[0][name] == pytest.approx(full[0][name], rel=1e-4)
    assert adapted[2][name] != pytest.approx(full[2][name], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_reference_that_follows_the_policy_survives_a_kill(upstream, finished, tmp_path):
    """Refreshed after steps 2 and 4, killed within step 4; a reference that stays gives another result."""
    moving = "rl.reference={refresh_every: 2, mixup: 0.5}"
    run_killed(tmp_path / "killed", "uft", upstream, moving)
    assert_steps_3_and_4_lie_in_the_journal(tmp_path / "killed")
    config, moved = finished("uft", *TWO_UPDATES, moving)
    assert run_rl(config, tmp_path / "killed", upstream).resumed_from == 2
    assert_same_result(moved, tmp_path / "killed")
    _, stays = finished("uft", *TWO_UPDATES)
    found, other = (read_metrics(folder / "metrics.jsonl") for folder in (moved, stays))
    differs = [one["actor/kl_loss"] != two["actor/kl_loss"] for one, two in zip(found, other, strict=True)]
    assert differs[:3] == [False, False, True]


def after_step_2(out: Path) -> Path:
    """Where a run in `out` puts a copy of what lies there after step 2."""
    return out.with_name(f"{out.name}-after-step-2")


def assert_resumes_from_step_1(config: ExperimentConfig, out: Path, upstream: Mapping[str, Path], *files: str) -> None:
    """What lay in `out` after step 2, without that step's checkpoint as after a kill in the middle of writing it."""
    left = after_step_2(out)
    (left / "checkpoints/step_000002/COMPLETE").unlink()
    assert run_rl(config, left, upstream).resumed_from == 1
    assert_same_result(out, left, *files)


def assert_same_result(one: Path, other: Path, *files: str) -> None:
    """The same bits in the model, in these files and in the metrics."""
    for file in ("model/model.safetensors", *files):
        assert cmp(one / file, other / file, shallow=False)
    lines = [[without_times(row) for row in read_metrics(folder / "metrics.jsonl")] for folder in (one, other)]
    assert json.dumps(lines[0]) == json.dumps(lines[1])


def _assert_reports_what_it_does(config: ExperimentConfig, rows: list[dict[str, float]]) -> None:
    assert config.objective is not None
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert 0 <= row["batch/zero_variance_share"] <= 1
    learned = [row for row in rows if "actor/loss" in row]
    assert learned
    for term in config.objective.terms:
        assert any(f"actor/{term.name}_loss" in row for row in learned)
        if term.gate is not None:
            assert any(f"actor/{term.name}_gated_fraction" in row for row in learned)
        if term.is_policy_gradient:
            assert any(f"actor/{term.name}_clip_fraction" in row for row in learned), term.name
            assert any(f"actor/{term.name}_weight_p50" in row for row in learned), term.name
    if config.objective.has_off_policy_rows:
        assert any(0 < row.get("actor/off_policy_gradient_share", 0) <= 1 for row in learned)
    if config.objective.needs_critic:
        assert all("critic/loss" in row for row in rows)
    if config.objective.needs_teacher:
        names = [f"actor/{term.name}_reverse_kl" for term in config.objective.terms if term.needs_teacher]
        assert all("perf/teacher_s" in row for row in learned)
        # A group without two right rows has no peer to show.
        assert all(any(row.get(name) for row in learned) for name in names)
    if config.objective.interleaved_sft is not None:
        assert any("actor/interleaved_loss" in row for row in rows)
    if config.objective.replay is not None:
        assert rows[-1]["batch/replayed_share"] > 0
    if config.objective.group.hint is not None or config.objective.group.retry is not None:
        assert any(row["batch/hinted_share"] > 0 for row in rows)
    if config.objective.group.anchor is not None:
        assert any(row["batch/anchor_solved_share"] > 0 and row["batch/prefix_share_mean"] > 0 for row in rows)
    if config.objective.group.choose != "in_turn":
        chosen, others = (
            [row[f"batch/{name}_answer_probability"] for row in rows if row["batch/choice_share"]]
            for name in ("chosen", "other")
        )
        assert chosen and all(0 < low < high <= 1 for low, high in zip(others, chosen, strict=True))
    if isinstance(config.objective.group.filter, DynamicSampling):
        assert any(row["batch/kept_share"] < 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("method", SUPERVISED)
def test_a_supervised_method_learns_from_traces(method, upstream, tmp_path):
    config = experiment(method, "sft.epochs=6", "sft.optimizer.lr=1e-3")
    (node,) = (node for node in build_graph(config) if node.stage == "sft")
    run_stage(node, config, tmp_path, upstream)
    # DFT's own loss, p log p, is small at both ends; what both methods raise is p.
    probabilities = [row["actor/off_policy_prob"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(probabilities[-6:]) > sum(probabilities[:6])
