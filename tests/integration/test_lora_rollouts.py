"""RL of a LoRA adapter as a real stage: rollouts see the adapted policy in every engine, and a stop costs no bit.

`test_colocated_weights` publishes merged weights under Ray.
"""

import shutil
from filecmp import cmp
from pathlib import Path

import pytest
from reference.ray_case import movement
from support.installed import needs_no_gpu, needs_vllm
from test_methods import after_step_2, assert_resumes_from_step_1, experiment, run_rl, upstream_of

from luffy.api.runs import export_stage
from luffy.config.experiment import ExperimentConfig
from luffy.pipeline.graph import build_graph
from luffy.pipeline.job import JOB_FILE, StageJob, write_job
from luffy.tracking.metrics import read_metrics

pytestmark = [pytest.mark.slow, needs_no_gpu]
LORA = "model.lora={rank: 8, alpha: 16}"
FAST = "rl.optimizer={lr: 0.01}"
MAX_GAP = 1e-5
ADAPTER = "model/adapter/adapter_model.safetensors"
# Of vLLM's CPU attention 32 is the smallest head.
SHAPE = (
    "model.architecture={hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}"
)


def config(method: str, *overrides: str) -> ExperimentConfig:
    return experiment(method, SHAPE, LORA, FAST, *overrides)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, Path]:
    """Data and a base policy that is right now and then."""
    return upstream_of(config("luffy"), tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def undisturbed(upstream, tmp_path_factory) -> Path:
    """The stage of `luffy` after three steps with the cluster's own engine. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("rl") / "undisturbed"
    run_rl(config("luffy"), out, upstream, copy_to=after_step_2(out))
    return out


def assert_samples_with_the_adapter_that_it_trains(stage: Path, base: Path) -> None:
    rows = read_metrics(stage / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    moved = movement(stage / "model", base)
    assert moved["model.layers.0.self_attn.q_proj.weight"].abs().max() > 1e-3  # or the gap would prove nothing
    assert not moved["model.embed_tokens.weight"].any() and not moved["lm_head.weight"].any()


def test_every_step_samples_with_the_adapter_that_it_trains(upstream, undisturbed):
    assert_samples_with_the_adapter_that_it_trains(undisturbed, upstream["model"] / "model")


@needs_vllm
def test_every_step_samples_with_the_adapter_that_it_trains_in_vllm(upstream, tmp_path):
    run_rl(config("luffy", "rl.engine=vllm", "execution.vllm.max_num_seqs=16"), tmp_path, upstream)
    assert_samples_with_the_adapter_that_it_trains(tmp_path, upstream["model"] / "model")


def test_a_stop_resumes_to_the_same_bits(upstream, undisturbed):
    assert_resumes_from_step_1(config("luffy"), undisturbed, upstream, ADAPTER)


def test_a_stop_resumes_to_the_same_bits_with_a_kl_term_against_the_policy_without_its_adapter(upstream, tmp_path):
    out = tmp_path / "undisturbed"
    run_rl(config("reinforce_pp"), out, upstream, copy_to=after_step_2(out))
    assert_resumes_from_step_1(config("reinforce_pp"), out, upstream, ADAPTER)
    kl = [row["actor/kl_loss"] for row in read_metrics(out / "metrics.jsonl")]
    assert 0 <= kl[0] < kl[2]


def test_a_checkpoint_is_exported_like_the_final_model(upstream, undisturbed, tmp_path):
    stage, experiment_ = tmp_path / "rl", config("luffy")
    shutil.copytree(undisturbed, stage)
    (node,) = (node for node in build_graph(experiment_) if node.stage == "rl")
    inputs = {name: str(path) for name, path in upstream.items()}
    job = StageJob(
        node="rl", stage="rl", key="key", settings=node.settings, inputs=inputs, upstream={},
        execution=experiment_.execution, tracking=experiment_.tracking,
    )  # fmt: skip
    write_job(stage / JOB_FILE, job)
    assert export_stage(stage, tmp_path / "exported", step=3) == "the checkpoint of step 3"
    for file in ("model/model.safetensors", ADAPTER):
        assert cmp(stage / file, tmp_path / "exported" / Path(file).relative_to("model"), shallow=False)
