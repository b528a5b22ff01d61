"""Every file that ships loads and holds what its paper says; so does every file that the documentation shows."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from reference.taught_presets import SUPERVISED, teacher_overrides
from support.installed import needs_smollm2
from support.refusals import refused

from luffy.cli.main import main
from luffy.config import available_presets, load_experiment
from luffy.config.execution import VLLMConfig
from luffy.config.fields import all_fields
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.config.shipped import expand_pattern, experiment_names, template_file
from luffy.config.strict import StrictModel, field_docs
from luffy.config.yaml_source import parse_scalar
from luffy.data.templates import prompt_opener
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import EXIT_OK, ConfigError
from luffy.pipeline.graph import build_graph

ROOT = Path(__file__).parents[3]
CONFIGS, DOCS = ROOT / "exp_configs", ROOT / "docs"
COMPARISONS = sorted(CONFIGS.glob("compare_*.yaml"))
GRIDS = sorted(CONFIGS.glob("grid_*.yaml"))
AS_IN_THE_PAPER = sorted({*CONFIGS.glob("luffy_qwen2.5_math_*.yaml")} - {*CONFIGS.glob("*_1gpu.yaml")})
STEM = {"ids": lambda path: path.stem}


@pytest.mark.parametrize("path", [*COMPARISONS, *GRIDS], **STEM)
def test_every_comparison_and_grid_loads_with_all_its_runs(path):
    sweep = load_sweep(path)
    tuning, reported = sweep.tuning_runs(), sweep.reported_runs()
    assert len(reported) == len(sweep.design.seeds) * len(sweep.design.arms or sweep.candidates())
    assert len(tuning) + len(reported) == len({run.config.name for run in (*tuning, *reported)})
    assert sweep.design.name == path.stem


@pytest.mark.parametrize("name", available_presets("chains"))
def test_every_chain_loads_over_smoke(name):
    overrides = [f"chain={name}"] if name != "rl" else ["chain=rl", "method=luffy"]
    assert load_experiment("smoke", overrides).chain == name


@pytest.mark.parametrize("name", available_presets("methods"))
def test_every_method_loads_over_smoke_with_groups_of_eight_and_names_its_paper_and_denominator(name):
    chain = "sft" if name in SUPERVISED else "rl"
    config = load_experiment("smoke", [f"method={name}", f"chain={chain}", *teacher_overrides(name)])
    assert (config.method, config.objective is not None) == (name, chain == "rl")
    assert config.objective is None or config.objective.group.size == {"seele": 32, "tgopd": 4}.get(name, 8)
    for node in build_graph(config):  # a stage reads its settings from a file, defaults included
        assert type(node.settings).read(json.loads(node.settings.model_dump_json())) == node.settings
    text = (CONFIGS / "methods" / f"{name}.yaml").read_text()
    comment = re.split(r"\n(?:extends|objective|chain|difficulty):", text)[0]
    assert "arXiv" in comment or "LUFFY paper" in comment
    assert "# Normaliser:" in comment or "Normaliser, " in comment or "normaliser" in comment
    if name in ("hdpo", "mopd", "rlrt", "srpo", "tgopd", "vold"):
        assert all(f"\n# {part}:" in comment for part in ("Read", "Unknown", "Departures"))
    methods = (CONFIGS / "README.md").read_text().partition("### Weight of a token")[0]
    assert f"\n| `{name}` | " in methods


# What the papers' values are.


def test_the_tuned_comparison_gives_each_of_six_arms_three_learning_rates_and_three_fresh_seeds():
    tuned, untuned = (load_sweep(f"compare_{name}") for name in ("tuned", "arithmetic"))
    assert tuned.design.arms.keys() == untuned.design.arms.keys()
    assert tuned.design.budget == untuned.design.budget
    assert {len(tuned.candidates_of(arm)) for arm in tuned.design.arms} == {3}
    assert {run.seed for run in tuned.tuning_runs()} == {100}
    assert set(tuned.design.seeds).isdisjoint(untuned.design.seeds) and len(tuned.design.seeds) == 3
    assert {run.config.evaluation.only for run in tuned.tuning_runs()} == {("validation",)}
    assert tuned.common().evaluation.only is None


def test_expert_iteration_has_three_rounds_over_all_traces():
    config = load_experiment("expert_iteration")
    assert config.sft.num_traces is None
    assert config.kinds == ("prepare_data", "base", *(["sample", "sft"] * 3), "evaluate", "report")


@pytest.mark.parametrize("path", AS_IN_THE_PAPER, **STEM)
def test_the_real_size_experiments_have_the_papers_values_and_benchmarks(path):
    config = load_experiment(path)
    rl, objective, evaluation = config.rl, config.objective, config.evaluation
    assert (config.method, config.cluster, config.model.dtype) == ("luffy", "ray", "bfloat16")
    assert (config.model.rope_theta, config.model.max_position_embeddings) == (40000, 16384)
    assert (rl.steps, rl.prompts_per_step, rl.prompts_per_update, objective.group.size) == (500, 128, 64, 8)
    assert (rl.temperature, rl.max_response_tokens, config.data.max_prompt_tokens) == (1.0, 8192, 1024)
    assert (rl.max_staleness, rl.critic, objective.needs_reference) == (0, None, False)
    optimizer = rl.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
    assert (optimizer.max_grad_norm, optimizer.schedule.kind, optimizer.schedule.warmup_share) == (1.0, "constant", 0.0)
    assert config.execution.gradient_checkpointing and config.execution.zero_stage == 2
    assert (evaluation.engine, evaluation.max_response_tokens, evaluation.template) == ("vllm", 8192, "own")
    asked = {name: evaluation.protocol(name, "sampled") for name in config.data.suites}
    assert {(how.temperature, how.top_p) for how in asked.values()} == {(0.6, 1.0)}
    assert {name: how.num_samples for name, how in asked.items()} == {
        "aime24": 32, "aime25": 32, "amc": 32, "math500": 1, "minerva": 1, "olympiad": 1,
        "arc_challenge": 1, "gpqa_diamond": 1, "mmlu_pro": 1,
    }  # fmt: skip


def test_their_chat_template_opens_the_reasoning():
    template = load_experiment("luffy_qwen2.5_math_7b").model.chat_template
    tokenizer = build_tokenizer(["text"])
    tokenizer.chat_template = template_file(template).read_text(encoding="utf-8")
    assert prompt_opener(tokenizer) == "<think>\n"
    turns = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


# Found by name, from any folder.


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_ships_is_found_by_its_name_and_a_file_wins_over_it(elsewhere):
    assert load_experiment("arithmetic", ["seed=5"]).seed == 5
    assert load_sweep("compare_arithmetic").design.name == "compare_arithmetic"
    kinds = [kind_of_file(name) for name in ("compare_arithmetic", "smoke", "grid_sft_size")]
    assert kinds == ["comparison", "experiment", "grid"]
    (elsewhere / "smoke").write_text("name: [")
    with refused("smoke:1: not valid YAML"):
        load_experiment("smoke")
    name = "data/samples/shop_train.jsonl"
    assert expand_pattern(name)[0].is_file()
    (elsewhere / "data/samples").mkdir(parents=True)
    (elsewhere / name).touch()
    assert (elsewhere / expand_pattern(name)[0]).samefile(elsewhere / name)


@pytest.mark.parametrize("name", ["arithmetics", "exp_configs/arithmetic", "exp_configs/smoke.yaml"])
def test_an_unknown_name_is_refused_with_the_shipped_ones(elsewhere, name):
    with refused(f"{name}: no such file", *experiment_names(), error=ConfigError):
        load_experiment(name)


# The documentation tells nothing that does not load.

TUTORIAL, GUIDE = ((DOCS / f"{name}.md").read_text() for name in ("tutorial", "evaluation"))
KNOWN = re.findall(r"`luffy ((?:run|grid|compare) [^`]+)`", (DOCS / "known_experiments.md").read_text())


def test_the_tutorial_shows_the_experiment_and_the_first_rows_that_ship():
    _, _, shipped = (CONFIGS / "own_data.yaml").read_text().partition("\n")
    assert f"```yaml\n{shipped}```" in TUTORIAL
    rows = (ROOT / "data/samples/shop_train.jsonl").read_text()
    assert rows.startswith(re.findall(r"```json\n(.*?)```", TUTORIAL, re.DOTALL)[0]) and len(rows.splitlines()) == 60


def test_the_tutorials_experiment_has_its_own_data_and_its_comparison_the_run_of_the_experiment(tmp_path, monkeypatch):
    """So that its stages are reused."""
    monkeypatch.chdir(ROOT)
    for name, text in re.findall(r"cat > (\w+\.yaml) <<'END'\n(.*?)END\n", TUTORIAL, re.DOTALL):
        (tmp_path / name).write_text(text)
    config = load_experiment(tmp_path / "mine.yaml")
    paths = [config.data.train.path, *(source.path for source in config.data.suites.values())]
    assert paths == ["mine/train.jsonl", "mine/test.jsonl"]
    luffy, other = (run.config for run in load_sweep(tmp_path / "compare_mine.yaml").reported_runs())
    alone = load_experiment("own_data", ["sft.seed=0", "rl.seed=0"])
    assert (luffy.sft, luffy.rl) == (alone.sft, alone.rl) and other.rl.steps == luffy.rl.steps


@pytest.mark.parametrize(("wanted", "num_runs"), [("compare_mine", 6), ("my_grid", 9)])
def test_the_comparison_and_the_grid_of_the_guide_load(tmp_path, wanted, num_runs):
    (text,) = re.findall(rf"```yaml\n(name: {wanted}\n.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "it.yaml").write_text(text)
    assert len(load_sweep(tmp_path / "it.yaml").reported_runs()) == num_runs


def test_the_tuning_of_the_guide_is_that_of_a_shipped_comparison():
    shown = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    values = parse_scalar(next(text for text in shown if "select:" in text))
    overrides = [f"grid={json.dumps(values['grid'])}", f"arms.sft.grid={json.dumps(values['arms']['sft']['grid'])}"]
    shipped, guide = (load_sweep("compare_tuned", more) for more in ([], overrides))
    assert guide.candidates() == shipped.candidates()


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=needs_smollm2 if "smollm2" in each else ()) for each in KNOWN]
)
def test_a_command_of_the_known_experiments_can_be_planned(command, tmp_path, capsys):
    assert len(KNOWN) >= 20, "all are found"
    assert main([*shlex.split(command), "--dry-run", "--workspace", str(tmp_path)]) == EXIT_OK, capsys.readouterr().err
    assert "prepare_data" in capsys.readouterr().out


def test_the_chain_and_the_experiment_of_the_readme_are_ones_and_the_number_of_presets_that_of_the_files(tmp_path):
    text = (ROOT / "README.md").read_text()
    (chain,) = re.findall(r"```yaml\n(# On-policy.*?)```", text, re.DOTALL)
    (tmp_path / "chain.yaml").write_text(f"extends: {CONFIGS}/smoke.yaml\n{chain}")
    config = load_experiment(tmp_path / "chain.yaml")
    assert [config.seen_by(name).method for name in ("opd", "guided", "grpo")] == ["opd", "luffy", "on_policy"]
    assert f"luffy runs {len(available_presets('methods'))} of them as presets" in text
    own = text.partition("## Your data, your model")[2]
    (tmp_path / "mine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", own, re.DOTALL)[0])
    config = load_experiment(tmp_path / "mine.yaml")
    assert (config.data.train.kind, config.method, set(config.kinds) >= {"rl", "evaluate"}) == ("file", "luffy", True)


# Docstrings of fields, in the list of fields and on the reference page.


class Base(StrictModel):
    plain: int = 0
    said: int = 0
    """What the base
    says."""


class Changed(Base):
    plain: int = 1
    """Said now."""
    said: int = 1

    def method(self) -> None:
        """Belongs to no field."""


def test_docstrings_of_fields_are_those_below_them_also_of_base_classes_and_in_lists_on_one_line():
    assert field_docs(Base) == {"said": "What the base\nsays."}
    assert field_docs(Changed) == {"plain": "Said now.", "said": "What the base\nsays."}

    class Inner(StrictModel):
        field: int = 0
        """Not read: a class within a function has no source of its own."""

    assert field_docs(Inner) == {}
    described = " ".join(field_docs(VLLMConfig)["max_num_seqs"].split())
    fields = {field.path: field.description for field in all_fields()}
    assert fields["execution.vllm.max_num_seqs"] == described and len([*filter(None, fields.values())]) > 100
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert described in hooks.configuration_page()
    notebook = DOCS / "notebooks" / "two_methods.ipynb"
    page = hooks.notebook_page(notebook.read_text(), notebook.name)
    shown = ("# Two methods on one task", "```python\nimport luffy", "base64,", "<table>")
    assert all(part in page for part in shown) and "<style" not in page
