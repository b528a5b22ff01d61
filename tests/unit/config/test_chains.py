"""Chains of named stages: what each sees of the experiment, what it reads, and which chains cannot be meant."""

import json

import pytest
from pydantic import ValidationError
from support.refusals import refused
from support.stages import CONFIGS

from luffy.cli.commands.config import explain_experiment, resolved_lines
from luffy.config import ExperimentConfig, load_experiment
from luffy.config.load import resolve_experiment
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph, select_nodes

HEAD = f"extends: {CONFIGS}/smoke.yaml\nname: own\n"
DISTILLED = """\
stages:
  - prepare_data
  - base
  - opd: {kind: rl, method: opd, rl: {steps: 3, teachers: {qwen: {kind: model, path: org/8B}}}}
  - grpo: {kind: rl, method: on_policy}
  - evaluate
  - report
"""
POLISHED = """\
method: on_policy
sample: {num_samples: 8}
stages: [prepare_data, base, sft, rl, sample, {polish: {kind: sft, sft: {epochs: 1}}}, evaluate, report]
"""
IN_TWO_STAGES = """\
method: questa
difficulty: {num_samples: 8, max_pass_rate: 0.125}
stages:
  - prepare_data
  - base
  - difficulty
  - half: {kind: rl, rl: {steps: 100}, objective: {group: {starts: {hint: {dose: 0.5}}}}}
  - quarter:
      kind: rl
      rl: {steps: 1900}
      objective: {group: {starts: {hint: {dose: 0.25}}, filter: null}}
  - evaluate
  - report
"""
LONGER = """\
method: on_policy
stages:
  - prepare_data
  - base
  - short: {kind: rl, rl: {max_response_tokens: 8192}}
  - long: {kind: rl, rl: {max_response_tokens: 24576}, execution: {gradient_checkpointing: true}}
  - evaluate: {inputs: {model: [base, long]}}
  - report
"""
ITERATED = """\
method: on_policy
sample: {num_samples: 8, keep: {max_per_prompt: 4}}
stages:
  - prepare_data
  - base
  - rounds: {repeat: 3, stages: [sample, {sft: {inputs: {model: base}}}]}
  - rl
  - evaluate
  - report
"""


@pytest.fixture
def loaded(tmp_path):
    """Loads an experiment over smoke with these further lines."""

    def load(text: str, *overrides: str) -> ExperimentConfig:
        (tmp_path / "own.yaml").write_text(HEAD + text)
        return load_experiment(tmp_path / "own.yaml", overrides)

    return load


@pytest.fixture
def chain(loaded):
    """The nodes of such an experiment by name."""
    return lambda text, *overrides: {node.name: node for node in build_graph(loaded(text, *overrides))}


@pytest.mark.parametrize(
    ("text", "stages", "evaluated"),
    [
        (DISTILLED, "opd<base grpo<opd", "base opd grpo"),
        (POLISHED, "sft<base rl<sft sample<rl polish<rl", "base sft rl polish"),
        (IN_TWO_STAGES, "difficulty<base half<base quarter<half", "base half quarter"),
        (LONGER, "short<base long<short", "base long"),
        (ITERATED, "sample_1<base sft_1<base sample_2<sft_1 sft_2<base sample_3<sft_2 sft_3<base rl<sft_3",
         "base sft_1 sft_2 sft_3 rl"),
    ],
)  # fmt: skip
def test_each_stage_starts_from_the_newest_policy_unless_it_names_another(chain, text, stages, evaluated):
    nodes, wanted = chain(text), dict(pair.split("<") for pair in stages.split())
    ends = {f"evaluate_{name}": name for name in evaluated.split()}
    assert list(nodes) == ["prepare_data", "base", *wanted, *ends, "report"]
    assert {name: nodes[name].inputs["model"] for name in (*wanted, *ends)} == wanted | ends


def test_a_stage_sees_the_experiment_with_its_own_method_and_sections(chain):
    nodes = chain(DISTILLED)
    opd, grpo = nodes["opd"], nodes["grpo"]
    assert (opd.settings.rl.steps, grpo.settings.rl.steps) == (3, 6)
    assert (opd.settings.rl.prompts_per_step, opd.settings.rl.teachers["qwen"].path) == (4, "org/8B")
    assert (opd.config.method, grpo.config.method, grpo.settings.rl.teachers) == ("opd", "on_policy", {})
    assert {term.loss.kind for term in grpo.settings.objective.terms} == {"clipped_surrogate", "entropy"}
    assert opd.settings.objective.needs_teacher and not grpo.settings.objective.needs_teacher
    longer = chain(LONGER)
    assert [longer[name].settings.rl.max_response_tokens for name in ("short", "long")] == [8192, 24576]
    assert [longer[name].config.execution.gradient_checkpointing for name in ("short", "long")] == [False, True]
    two = chain(IN_TWO_STAGES)
    doses = [two[name].settings.objective.group.starts["hint"].dose.value for name in ("half", "quarter")]
    assert doses == [0.5, 0.25] and two["quarter"].settings.objective.group.filter is None


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [3, 6]),
        (["rl.steps=5"], [5, 5]),  # the command line beats a file, also what that says of one stage
        (["stages.opd.rl.steps=4"], [4, 6]),
        (["rl.steps=5", "stages.grpo.rl.steps=2"], [5, 2]),
        (["stages.opd.method=on_policy", "stages.opd.rl.teachers.qwen=null"], [3, 6]),
        (["stages=[prepare_data, base, {opd: {kind: rl, method: luffy}}, {grpo: {kind: rl, method: dapo}}]"], [6, 6]),
    ],
)
def test_the_command_line_beats_files_and_a_stage_the_experiment(chain, overrides, steps):
    nodes = chain(DISTILLED, *overrides)
    assert [nodes[name].settings.rl.steps for name in ("opd", "grpo")] == steps


def test_a_section_that_each_stage_has_for_itself_need_not_be_whole_but_its_mistakes_are_told(loaded):
    text = "rl: {temperature: 0.7, optimizer: {lr: 1e-3}, prompts_per_step: 2, max_response_tokens: 9, steps: null}\n"
    text += "data: {max_trace_tokens: 8}\n"
    text += "stages: [prepare_data, base, {a: {kind: rl, method: on_policy, rl: {steps: 2}}}]"
    config = loaded(text)
    assert config.rl is None and config.seen_by("a").rl.temperature == 0.7
    with refused("own.yaml:3: stages.a.rl.temperature: must be a number", error=ConfigError):
        loaded(text.replace("0.7", "warm"))


def test_a_chain_is_recorded_and_written_so_that_it_is_read_as_the_same(loaded, tmp_path):
    for text in (DISTILLED, POLISHED, LONGER, ITERATED):
        config = loaded(text)
        again = ExperimentConfig.read(json.loads(config.model_dump_json()))
        assert build_graph(again) == build_graph(config)
        (tmp_path / "written.yaml").write_text("\n".join(resolved_lines(resolve_experiment(tmp_path / "own.yaml"))))
        assert build_graph(load_experiment(tmp_path / "written.yaml")) == build_graph(config)
    lines = "\n".join(resolved_lines(resolve_experiment(tmp_path / "own.yaml", ["stages.rounds.repeat=1"])))
    assert "own.yaml:" in lines and "command line" not in lines.partition("stages:")[0]


def test_rounds_go_by_the_name_of_their_group_and_a_change_behind_leaves_the_keys_before(chain):
    nodes = chain(DISTILLED)
    assert nodes["opd"].settings == chain(DISTILLED, "stages.grpo.rl.steps=9")["opd"].settings
    rounds = chain(ITERATED)
    assert [rounds[f"sample_{number}"].settings.round for number in (1, 2, 3)] == [1, 2, 3]
    of_group = {f"{name}_{number}" for name in ("sample", "sft") for number in (1, 2, 3)}
    assert select_nodes(tuple(rounds.values()), ["rounds"], "--only") == of_group
    assert chain("seed: 3\n" + POLISHED, "stages.polish.seed=5")["polish"].settings.seed == 5


def test_each_stage_that_learns_is_explained(tmp_path):
    (tmp_path / "own.yaml").write_text(HEAD + DISTILLED)
    titles = explain_experiment(tmp_path / "own.yaml")
    assert list(titles) == ["opd", "grpo"]
    assert "Teacher" in titles["opd"] and "Teacher" not in titles["grpo"]


@pytest.mark.parametrize("stages", [5, [5], [{"rl": 5}], [["rl"]], {"rl": None}, ["nothing"]])
def test_a_record_that_is_none_is_refused_as_such(stages):
    with pytest.raises(ValidationError):
        ExperimentConfig.read({**load_experiment("smoke").model_dump(mode="json"), "stages": stages})


def test_a_record_names_a_module_which_is_not_imported_when_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code has run')")
    monkeypatch.chdir(tmp_path)
    recorded = load_experiment("smoke").model_dump(mode="json")
    recorded["stages"].insert(2, {"x": {"kind": "theirs:KIND"}})
    with pytest.raises(ValidationError, match="imported only where its experiment is run"):
        ExperimentConfig.read(recorded)
    with refused("ends Python on import", error=ConfigError):
        load_experiment("smoke", ["stages=[prepare_data, base, {x: {kind: 'theirs:KIND'}}]"])


def test_a_section_that_one_stage_has_for_itself_stays_that_of_the_experiment_where_others_need_it(chain, loaded):
    """The base's, what added stages read, the protocol of the report, and what a null takes back."""
    assert chain("method: on_policy\n", "stages.base.base.steps=40")["base"].settings.base.steps == 40
    measured = "method: on_policy\ndifficulty: {num_samples: 4, max_pass_rate: 0.5}\n"
    own = "stages: [prepare_data, {start: {kind: base}}, {a: {kind: rl, rl: {steps: 3}}}, evaluate, report]\n"
    nodes = chain(measured + own)
    assert (nodes["difficulty"].inputs["model"], nodes["a"].inputs["data"]) == ("start", "difficulty")
    assert loaded("stages: [prepare_data, base, {evaluate: {evaluation: {max_response_tokens: 16}}}]").evaluation
    within = "{r: {repeat: 2, stages: [sft, {evaluate: {inputs: {model: [base, sft]}}}]}}"
    assert "evaluate_evaluate_2_sft_2" in chain(f"stages: [prepare_data, base, {within}]")
    nothing = "{method: null, execution: null, seed: null, inputs: {model: null}, options: null, sft: null}"
    plain = chain("stages: [prepare_data, base, sft]")["sft"]
    assert chain(f"stages: [prepare_data, base, {{sft: {nothing}}}]")["sft"].settings == plain.settings


# What the line names, and the list of stages behind the base, or the override.
LISTED = {
    "stages.evalute.kind: .. did you mean 'evaluate'": "evalute",
    "sft is there twice .. sft_2: {kind: sft}": "sft, sft",
    "stages.sft.inputs.model: no earlier stage .. policy as 'rl'; there are base": "{sft: {inputs: {model: rl}}}",
    "stages.sft.inputs.modle: no such input .. did you mean 'model'": "{sft: {inputs: {modle: base}}}",
    "stages.rl.inputs.model: must be the name of one": "{rl: {method: luffy, inputs: {model: [base]}}}",
    "stages.opd.sft: a stage of kind rl does not read it": "{opd: {kind: rl, sft: {steps: 3}}}",
    "stages.evaluate.method: luffy has nothing for a stage": "{evaluate: {method: luffy}}",
    "stages.sft.method: on_policy has nothing for a stage of kind sft": "{sft: {method: on_policy}}",
    "stages.sft.options: are for kinds of your own": "{sft: {options: {a: 1}}}",
    "stages.sft.rll: unknown key .. rl": "{sft: {rll: 1}}",
    "stages.2: must be a kind of stage, or NAME: {kind: KIND, ...}": "3",
    "stages.../x: may have small letters, digits and _ only": "{../x: {kind: sft}}",
    "stages.data: data is the name of an input": "{data: {kind: sft}}",
    "stages: evaluate_base is there twice": "{evaluate_base: {kind: sft}}, evaluate",
    "stages.r.repeat: must be a whole number from 1 to 1000, found 0": "{r: {repeat: 0, stages: [sft]}}",
    "stages.r.steps: a group of stages has repeat": "{r: {repeat: 2, steps: 1, stages: [sft]}}",
    "stages.r.stages: must be a list": "{r: {repeat: 2, stages: sft}}",
    "stages.r.stages: must be a list of the stages": "{r: {repeat: 2, stages: []}}",
    "stages.r.s: a group within a group": "{r: {repeat: 2, stages: [{s: {stages: [sft]}}]}}",
    "stages.x.kind: must be the name of a kind": "{x: {kind: [rl]}}",
    "sweep is no stage of a chain": "sweep",
    "stages.evaluate.inputs.model: names no stage": "{evaluate: {inputs: {model: []}}}",
    "stages.report.seed: has no effect": "evaluate, {report: {seed: 5}}",
    "difficulty has no effect without rl after it": "{rl: {method: luffy}}, {difficulty: {difficulty: {}}}, evaluate",
    "stages: early sorts by what difficulty measures; put difficulty before it": "{early: {kind: rl, method: luffy, "
    "rl: {sampling: {kind: curriculum, by: difficulty}}}}, {difficulty: {difficulty: {}}}, {rl: {method: luffy}}",
    "nowhere:KIND cannot be imported .. PYTHONPATH": "{x: {kind: 'nowhere:KIND'}}",
    "json:dumps is no StageKind": "{x: {kind: 'json:dumps'}}",
}
REFUSED = {named: f"stages=[prepare_data, base, {stages}]" for named, stages in LISTED.items()} | {
    "rl needs base before it": "stages=[prepare_data, rl, base]",
    "opd: unknown key; did you mean stages.opd.rl.steps?": "opd.rl.steps=5",
    "stages: no element 'odp' .. did you mean 'opd'": "stages.odp.rl.steps=5",
    "stages.opd.rl.stepz: unknown key .. steps": "stages.opd.rl.stepz=5",
    "stages.opd.rl.max_staleness 1 has no effect": "stages.opd.rl.max_staleness=1",
    "stages: must be a list": "stages=all",
    "stages.opd: must be a mapping of what is the stage's own, found foo": "stages.opd=foo",
    "method: luffy has no effect .. stages.NAME.method": "method=luffy",
    "stages.grpo.seed: has no effect beside rl.seed": "stages.grpo={seed: 5, rl: {seed: 3}}",
    "stages.grpo.model.architecture: has no effect": "stages.grpo.model.architecture.num_layers=4",
    "stages.grpo.data.max_prompt_tokens: has no effect": "stages.grpo.data.max_prompt_tokens=40",
}


def test_a_list_of_stages_takes_the_place_of_a_chain_but_not_in_the_same_file(loaded):
    with refused("own.yaml:", "stages: a list takes the place of the chain (", error=ConfigError):
        loaded("chain: rl\nstages: [prepare_data, base, sft, evaluate]\n")
    assert loaded("chain: rl\nmethod: luffy\n", "stages=[prepare_data, base, sft, evaluate]").chain is None


@pytest.mark.parametrize(("named", "override"), REFUSED.items(), ids=REFUSED)
def test_a_chain_that_cannot_be_meant_is_one_line_with_its_place(loaded, named, override):
    with refused("command line: ", *named.split(" .. "), error=ConfigError):
        loaded(DISTILLED, override)
