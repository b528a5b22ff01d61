import subprocess
import sys
from pathlib import Path

import pytest
from reference.taught_presets import SUPERVISED, teacher_overrides

from luffy.config import available_presets, load_experiment
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.config.shipped import template_file
from luffy.data.templates import prompt_opener
from luffy.data.tokenizer import build_tokenizer
from luffy.pipeline.graph import build_graph

ROOT = Path(__file__).parents[3] / "exp_configs"
COMPARISONS = sorted(ROOT.glob("compare_*.yaml"))
GRIDS = sorted(ROOT.glob("grid_*.yaml"))
STUDIES = sorted(ROOT.glob("study_*.yaml"))
EXPERIMENTS = sorted(set(ROOT.glob("*.yaml")) - {*COMPARISONS, *GRIDS, *STUDIES})
AS_IN_THE_PAPER = sorted(set(ROOT.glob("luffy_qwen2.5_math_*.yaml")) - set(ROOT.glob("*_1gpu.yaml")))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_loads(path):
    assert load_experiment(path).name


@pytest.mark.parametrize("path", [*COMPARISONS, *GRIDS], ids=lambda path: path.stem)
def test_every_comparison_and_grid_loads_with_all_its_runs(path):
    sweep = load_sweep(path, wanted="grid" if path in GRIDS else "comparison")
    tuning, reported = sweep.tuning_runs(), sweep.reported_runs()
    assert len(reported) == len(sweep.design.seeds) * len(sweep.design.arms or sweep.candidates())
    assert len(tuning) + len(reported) == len({run.config.name for run in (*tuning, *reported)})
    assert sweep.design.name == path.stem


def test_the_tuned_comparison_gives_each_of_six_arms_three_learning_rates_and_three_fresh_seeds():
    tuned, untuned = (load_sweep(ROOT / f"compare_{name}.yaml") for name in ("tuned", "arithmetic"))
    assert tuned.design.arms.keys() == untuned.design.arms.keys()
    assert tuned.design.budget == untuned.design.budget
    assert {len(tuned.candidates_of(arm)) for arm in tuned.design.arms} == {3}
    assert {run.seed for run in tuned.tuning_runs()} == {100}
    assert set(tuned.design.seeds).isdisjoint(untuned.design.seeds) and len(tuned.design.seeds) == 3
    assert {run.config.evaluation.only for run in tuned.tuning_runs()} == {("validation",)}
    assert tuned.common().evaluation.only is None


@pytest.mark.parametrize("path", AS_IN_THE_PAPER, ids=lambda path: path.stem)
def test_the_real_size_experiments_have_the_papers_values(path):
    config = load_experiment(path)
    rl, objective = config.rl, config.objective
    assert (config.method, config.cluster, config.model.dtype) == ("luffy", "ray", "bfloat16")
    assert (config.model.rope_theta, config.model.max_position_embeddings) == (40000, 16384)
    assert rl is not None and objective is not None and config.evaluation is not None
    assert (rl.steps, rl.prompts_per_step, rl.prompts_per_update, objective.group.size) == (500, 128, 64, 8)
    assert (rl.temperature, rl.max_response_tokens, config.data.max_prompt_tokens) == (1.0, 8192, 1024)
    assert (rl.max_staleness, rl.critic, objective.needs_reference) == (0, None, False)
    optimizer = rl.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
    assert (optimizer.max_grad_norm, optimizer.schedule.kind, optimizer.schedule.warmup_share) == (1.0, "constant", 0.0)
    assert config.execution.gradient_checkpointing and config.execution.zero_stage == 2


@pytest.mark.parametrize("path", AS_IN_THE_PAPER, ids=lambda path: path.stem)
def test_the_real_size_experiments_evaluate_the_papers_nine_benchmarks_by_its_protocol(path):
    config = load_experiment(path)
    evaluation = config.evaluation
    assert evaluation is not None
    assert (evaluation.engine, evaluation.max_response_tokens, evaluation.template) == ("vllm", 8192, "own")
    asked = {name: evaluation.protocol(name, "sampled") for name in config.data.suites}
    assert {(how.temperature, how.top_p) for how in asked.values()} == {(0.6, 1.0)}
    assert {name: how.num_samples for name, how in asked.items()} == {
        "aime24": 32, "aime25": 32, "amc": 32, "math500": 1, "minerva": 1, "olympiad": 1,
        "arc_challenge": 1, "gpqa_diamond": 1, "mmlu_pro": 1,
    }  # fmt: skip


def test_their_chat_template_opens_the_reasoning():
    template = load_experiment(ROOT / "luffy_qwen2.5_math_7b.yaml").model.chat_template
    assert template is not None
    tokenizer = build_tokenizer(["text"])
    tokenizer.chat_template = template_file(template).read_text(encoding="utf-8")
    assert prompt_opener(tokenizer) == "<think>\n"
    turns = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("name", available_presets("methods"))
def test_every_method_loads_over_smoke_with_groups_of_eight_and_names_its_paper_and_denominator(name):
    chain = "sft" if name in SUPERVISED else "rl"
    config = load_experiment(ROOT / "smoke.yaml", [f"method={name}", f"chain={chain}", *teacher_overrides(name)])
    assert (config.method, config.objective is not None) == (name, chain == "rl")
    assert config.objective is None or config.objective.group.size == 8
    for node in build_graph(config):  # a stage reads its settings from a file, defaults included
        assert type(node.settings).model_validate_json(node.settings.model_dump_json()) == node.settings
    comment = (
        (ROOT / "methods" / f"{name}.yaml")
        .read_text()
        .split("\nextends:")[0]
        .split("\nobjective:")[0]
        .split("\nchain:")[0]
    )
    assert "arXiv" in comment or "LUFFY paper" in comment
    assert "# Normaliser:" in comment or "Normaliser, " in comment or "normaliser" in comment


@pytest.mark.parametrize("name", available_presets("chains"))
def test_every_chain_loads_over_smoke(name):
    overrides = [f"chain={name}"] if name != "rl" else ["chain=rl", "method=luffy"]
    assert load_experiment(ROOT / "smoke.yaml", overrides).chain == name


def test_the_configuration_is_read_without_torch():
    code = "import sys, luffy.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
