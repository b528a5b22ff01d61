"""A file with its layers and overrides as an experiment, and where its values and its mistakes are."""

import pytest
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.load import resolve_experiment
from luffy.config.yaml_source import read_yaml
from luffy.errors import ConfigError


def write(path, text):
    path.write_text(text)
    return path


def complaint(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_experiment(*arguments)
    return str(caught.value)


@pytest.fixture
def child(tmp_path):
    """An experiment that extends smoke.yaml with the given text."""
    return lambda text, name="child.yaml": write(tmp_path / name, f"extends: {SMOKE}\n{text}")


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "rl.stepz=3": "rl.stepz: unknown key; did you mean 'steps'?",
        "steps=3": "steps: unknown key; did you mean base.steps or rl.steps or sft.steps?",
        "objective.terms.off_policy.loss.gamma=1": "loss.gamma: unknown key; did you mean shaping.gamma?",
        "objective.terms.off_policy.loss.kind=NLL": "unknown kind 'NLL'; did you mean 'nll'?",
        "objective.terms.x={select: response, loss: {}, normalizer: {}}": "normaliser in place of 'normalizer'",
        "rl.steps=1.5": "rl.steps: must be a whole number, found 1.5",
        "rl.steps=0": "rl.steps: must be greater than 0, found 0",
        "seed=yes": "seed: must be a whole number, found true",
        "data.train.kind=csv": "data.train",
        "model.architecture.num_heads=3": "must be a multiple of 2 x num_heads",
        "rl": "'rl' is not of the form key.path=value",
        "rl.steps = x": "rl.steps: must be a whole number, found 'x'",
        "name=a b": "name: may have small letters, digits and _ . - only, a letter or digit first, found 'a b'",
        "grading={kind: mathh}": "grading.kind: unknown kind 'mathh'; did you mean 'math'?",
        "grading={kind: {kind: mathh}}": "grading.kind.kind: unknown kind 'mathh'",
        "grading.kind={kind: custom, function: a.b}": "grading.kind.function: must be package.module:name, found 'a.b'",
        "environment={kind: tools, tools: [calculatr]}": "no built-in tool 'calculatr'; did you mean 'calculator'?",
        "environment={kind: tools, tools: ['a:go', 'b:go']}": "environment: tools: two tools are called go",
        "environment={kind: tools, tools: []}": "environment.tools: needs at least 1, found 0",
        "environment={kind: guess_number, limits: {max_turns: x}}": "limits.max_turns: must be a whole number",
        "stages=[prepare_data,basee]": "or 'sweep', found 'basee'; did you mean 'base'?",
        "objective.advantage.lam=1": "objective.advantage.lam: unknown key of kind group_mean; only kind gae has it",
        "objective.advantage.scale_by_sd=1": "advantage.scale_by_sd: unknown key; did you mean 'scale_by_std'?",
        "extends=smoke": "extends cannot be overridden; give the other file in place of this one",
        "grading={named: {x: 3}}": "grading.named.x: must be a mapping, found 3",
        "execution.ray.address=driver": "execution.ray.address: must be HOST:PORT or auto, found 'driver'",
        "grading.kind={kind: judge, model: m, url: host}": "url: must begin with http:// or https://, found 'host'",
        "model.package=a-b": "model.package: may have small letters, digits and _ only, a letter or _ first",
        "rl.max_staleness=1": "rl.max_staleness 1 has no effect with cluster: local",
        "objective.terms.off_policy.loss.kind=foo": "off_policy.loss.kind: unknown kind 'foo'; allowed here: surrogate",
        "data.replay_traces=on": "must be 'off', 'keep' or 'reject', found true",
        "method=lufy": "no preset 'lufy' in exp_configs/methods/; did you mean 'luffy'? there are aipo",
        "data.suites.longr=null": "data.suites.longr: must be a mapping, found null",
        "data.train={kind: fil}": "data.train.kind: unknown kind 'fil'; did you mean 'file'? allowed here: arithmetic",
        "data.suites.x.path=a": "data.suites.x.kind: is missing; add it",
        "evaluation.suites={aime: {num_samples: 4}}": "evaluation.suites",
        "objective.terms.off_polcy.coefficient=1": "no element 'off_polcy' in this list; did you mean 'off_policy'? ",
        "objective.terms.3.coefficient=1": "no element '3' in this list; there are on_policy, off_policy, entropy",
        "data.train.num_operations.9=1": "no element '9' in this list; there are 0, 1",
        "data.train.num_operations.0.x=1": "data.train.num_operations.0 is 2, which has no keys",
        "objective.terms.entropy.coefficent=1": "terms.entropy.coefficent: unknown key; did you mean 'coefficient'?",
        "rl.steps=[1": "rl.steps: '[1' is not valid YAML",
    }.items(),
)
def test_a_mistake_on_the_command_line_is_one_line_that_says_what_and_where(override, message):
    found = complaint(SMOKE, [override])
    assert found.startswith("command line: ") and message in found and "\n" not in found


@pytest.mark.parametrize("overrides", [["chain=sft"], ["stages=[prepare_data, base, sft]"]])
def test_a_method_of_rl_is_refused_on_the_command_line_where_the_chain_has_no_rl(child, overrides):
    message = "command line: method: luffy has no effect without the stage rl, and the stages are prepare_data, base, "
    assert complaint(SMOKE, [*overrides, "method=luffy"]).startswith(message)
    inherited = child("method: luffy\n")
    assert load_experiment(inherited, overrides).stages[2] == "sft"
    assert complaint(child("chain: sft\n"), ["method=luffy"]).startswith(message)


def test_a_method_of_rl_is_refused_in_a_file_whose_chain_has_no_rl(child):
    file = child("chain: sft\nmethod: on_policy\n")
    assert complaint(file).startswith(f"{file}:3: method: on_policy has no effect without the stage rl")
    assert "rl" in load_experiment(file, ["chain=sft_then_rl"]).stages


def test_a_method_without_an_objective_is_refused_where_it_is_given():
    found = complaint(SMOKE, ["chain=rl", "method=sft"])
    assert found.startswith("command line: method: sft has no objective, and stage rl needs one; choose another method")


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "rl:\n  prompts_per_stop: 4\n": "3: rl.prompts_per_stop: unknown key; did you mean 'prompts_per_step'?",
        "data:\n  train:\n    kind: arithmetik\n": "4: data.train.kind: unknown kind 'arithmetik'; did you mean",
        "data:\n  train: {kind: recipe, path: r.yaml}\n": "3: data.train.path: r.yaml: no such file; relative paths",
        "seed: 1\nseed: 2\n": "3: seed is given twice (first at {path}:2); keep one",
        "data:\n\ttrain: 1\n": "3: not valid YAML",
        "extend: smoke\n": "2: extend: unknown key; did you mean 'extends'?",
        "method: own.yaml\n": "2: method: own.yaml: no such file; give a path from {path.parent}, or a",
    }.items(),
)
def test_a_mistake_in_a_file_names_the_file_and_the_line(child, text, message):
    path = child(text)
    found = complaint(path)
    assert found.startswith(f"{path}:{message.format(path=path)}") and "\n" not in found
    assert found.endswith("; indent with spaces") == ("\t" in text)


def test_what_a_file_leaves_to_presets_is_named(tmp_path):
    lines = complaint(write(tmp_path / "own.yaml", "name: own\n")).splitlines()
    assert lines[0].endswith("stages: is missing; add it, or chain: NAME, which takes those of a preset")


def test_off_without_quotes_is_a_setting_and_not_false(child):
    assert load_experiment(child("data: {replay_traces: off}\n")).data.replay_traces == "off"


def test_every_mistake_gets_a_line(child):
    assert len(complaint(child("seeed: 1\nrl: {steps: x}\n")).splitlines()) == 2
    both = complaint(SMOKE, ["data.train.stepwise_share=2.5"]).splitlines()
    assert len(both) == 2 and "data.train.stepwise_share: must be less than or equal to 1, found 2.5" in both[1]
    found = complaint(SMOKE, ["data.train.stepwise_share={a: 1}"])
    assert "data.train.stepwise_share.a: must be a whole number, found 'a'" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"name: \xff\n", "not UTF-8"), (b"a: [1\n", "not valid YAML"), (b"- 1\n", "a mapping"), (b"", "a mapping")],
)
def test_a_file_that_is_no_mapping_of_text_is_refused(tmp_path, content, message):
    (tmp_path / "bad.yaml").write_bytes(content)
    assert message in complaint(tmp_path / "bad.yaml")


def test_a_missing_file_or_experiment_is_named(tmp_path):
    assert f"{tmp_path / 'none.yaml'}: no such file" in complaint(tmp_path / "none.yaml")
    assert "smok: no such file; did you mean 'smoke'?" in complaint("smok")


def test_a_circle_of_extends_is_refused(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    assert "extends itself" in complaint(tmp_path / "a.yaml")


def test_later_layers_win_mappings_merge_and_lists_and_kinds_replace(child, tmp_path):
    luffy = SMOKE.parent / "methods" / "luffy.yaml"
    write(tmp_path / "method.yaml", f"extends: {luffy}\nseed: 2\nrl: {{temperature: 0.5}}\n")
    path = child("method: method.yaml\nrl: {steps: 9}\ndata: {train: {num_operations: [5]}}\n")
    config = load_experiment(path, ["rl.steps=11", "rl.optimizer.lr=1e-3", "rl.optimizer.lr=1e-4"])
    assert (config.rl.steps, config.rl.temperature, config.rl.prompts_per_step) == (11, 0.5, 4)
    assert (config.seed, config.rl.optimizer.lr) == (7, 1e-4)
    assert (config.data.train.num_operations, config.data.train.num_prompts) == ((5,), 24)
    config = load_experiment(child("data: {train: {kind: file, path: x.jsonl}}\n"))
    assert config.data.train.path == "x.jsonl"


OWN_METHOD = "extends: ../exp_configs/methods/luffy.yaml\nobjective: {group: {size: 4}}\n"


@pytest.fixture
def own_method(tmp_path):
    """The folder of a preset `own.yaml` of one's own, which has groups of four."""
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "own.yaml", OWN_METHOD.replace("..", str(SMOKE.parents[1])))
    return tmp_path / "mine"


def test_a_method_of_ones_own_is_found_from_the_working_directory(own_method, monkeypatch):
    monkeypatch.chdir(own_method)
    assert load_experiment("smoke", ["method=own.yaml"]).objective.group.size == 4
    monkeypatch.chdir(own_method.parent)
    assert load_experiment("smoke", ["method=mine/own.yaml"]).objective.group.size == 4
    assert "no preset 'mine/own' in exp_configs/methods/; did you mean 'mine/own.yaml'?" in complaint(
        "smoke", ["method=mine/own"]
    )
    found = complaint("smoke", ["method=own.yaml"])
    assert f"command line: method: own.yaml: no such file; give a path from {own_method.parent}, or a" in found


def test_a_method_that_a_file_names_is_found_from_its_folder(own_method, child):
    path = write(own_method / "child.yaml", child("method: own.yaml\n").read_text())
    assert load_experiment(path).objective.group.size == 4


def test_a_shipped_experiment_is_extended_by_its_name_and_one_that_does_not_exist_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "own.yaml", "name: own\nextends: smoke\n")
    assert load_experiment(path) == load_experiment(SMOKE, ["name=own"])
    path = write(tmp_path / "own.yaml", "name: own\nextends: luffy\n")
    assert f"{path}:2: extends: luffy is a method, not an experiment; to run a method of your own: luffy" in complaint(
        path
    )
    path = write(tmp_path / "own.yaml", "name: own\nextends: smok.yaml\n")
    expected = f"{path}:2: extends: smok.yaml: no such file; did you mean 'smoke'? give a path from {tmp_path}"
    assert expected in complaint(path)


def test_null_removes_a_suite_of_the_file_that_is_extended_and_it_can_be_another(child):
    path = child("data: {suites: {longer: null}}\n")
    assert "longer" not in load_experiment(path).data.suites
    assert "longer" not in load_experiment(SMOKE, ["data.suites.longer=null"]).data.suites
    # Also where two layers below have it: an override, and the file.
    twice = load_experiment(SMOKE, ["data.suites.longer.num_prompts=5", "data.suites.longer=null"])
    assert "longer" not in twice.data.suites
    suite = load_experiment(path, ["data.suites.longer={kind: file, path: x.jsonl}"]).data.suites["longer"]
    assert (suite.kind, suite.path) == ("file", "x.jsonl")


@pytest.mark.parametrize("named", ["", ", named: {mine: null}"])
def test_what_is_removed_or_replaced_in_a_file_is_so_in_its_preset(tmp_path, named):
    named_grader = "grading: {kind: math, named: {mine: {kind: exact}}}\n"
    write(tmp_path / "method.yaml", f"extends: {SMOKE.parent / 'methods' / 'luffy.yaml'}\n{named_grader}")
    write(tmp_path / "parent.yaml", f"name: parent\nextends: smoke\n{named_grader}")
    own = f"name: own\nextends: parent.yaml\nmethod: method.yaml\ngrading: {{kind: exact{named}}}\n"
    assert load_experiment(write(tmp_path / "own.yaml", own)).grading.named == {}


def test_what_an_extended_file_sets_itself_holds_under_another_preset(tmp_path):
    write(tmp_path / "parent.yaml", "name: parent\nextends: smoke\nobjective: {group: {size: 3}}\n")
    child = write(tmp_path / "child.yaml", "name: child\nextends: parent.yaml\nmethod: on_policy\n")
    assert load_experiment(child).objective.group.size == 3


def test_a_key_is_a_name_even_if_yaml_knows_a_truth_value_of_that_spelling(tmp_path):
    values, origins = read_yaml(write(tmp_path / "a.yaml", "select: {on: validation, off: true}\n"))
    assert values == {"select": {"on": "validation", "off": True}}
    assert ("select", "on") in origins


def test_sft_is_as_long_as_epochs_or_steps_say_and_not_both():
    by_steps = load_experiment(SMOKE, ["sft.epochs=null", "sft.steps=9"]).sft
    assert (by_steps.num_steps(8), load_experiment(SMOKE).sft.num_steps(9)) == (9, 5)  # 2 x 9 / 4, up


def terms(*overrides, file=SMOKE):
    return {term.name: term for term in load_experiment(file, overrides).objective.terms}


def test_an_element_of_a_list_is_overridden_by_its_name():
    before, after = terms(), terms("objective.terms.off_policy.loss.shaping.gamma=0.3")
    assert (before["off_policy"].loss.shaping.gamma, after["off_policy"].loss.shaping.gamma) == (0.1, 0.3)
    assert list(after) == list(before)
    assert {**after, "off_policy": None} == {**before, "off_policy": None}


KL = "{select: on_policy, loss: {kind: kl, estimator: k3}, normaliser: {mode: token, population: own}}"


def test_a_method_extends_a_shipped_one_by_its_name_and_its_terms_merge_by_theirs(child, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"extends: luffy\nobjective:\n  terms:\n    off_policy: {{loss: {{shaping: {{gamma: 0.2}}}}}}\n    kl: {KL}\n"
    )
    mine = terms(file=child("chain: rl\nmethod: mine.yaml\n"))
    assert list(mine) == ["on_policy", "off_policy", "entropy", "kl"]
    assert mine["off_policy"].loss.shaping.gamma == 0.2 and mine["off_policy"].loss.behavior == "one"
    again = terms(file=child(f"chain: rl\nmethod: luffy\nobjective: {{terms: {{kl: {KL}}}}}\n"))
    assert again["kl"] == mine["kl"] and mine["kl"].loss.estimator == "k3"
    assert terms(f"objective.terms.kl={KL}", "objective.terms.kl.coefficient=0.5")["kl"].coefficient.value == 0.5


def test_null_removes_a_term_and_the_lines_of_the_others_stay_theirs(child, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "extends: luffy\nobjective:\n  terms:\n    on_policy: null\n    entropy: {coefficient: no}\n"
    )
    with pytest.raises(ConfigError, match=r"mine.yaml:5: objective.terms.entropy.coefficient"):
        load_experiment(child("chain: rl\nmethod: mine.yaml\n"))
    assert list(terms("objective.terms.entropy=null")) == ["on_policy", "off_policy"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "objective.terms.of_policy={coefficient: 2}",
            "no element 'of_policy' .*did you mean 'off_policy'.*also needs",
        ),
        ("objective.terms.kl.coefficient=2", "no element 'kl' in this list; there are on_policy, off_policy, entropy"),
        ("objective.terms.kl=2", "no element 'kl' in this list"),
        ("objective.terms.kl=null", "no element 'kl' in this list"),
    ],
)
def test_an_element_that_is_not_there_is_named_with_those_that_are(override, message):
    with pytest.raises(ConfigError, match=f"^command line: objective.terms.*{message}"):
        terms(override)


def test_an_element_is_overridden_by_its_index_and_by_another_kind_too():
    assert terms("objective.terms.2.coefficient=0.5")["entropy"].coefficient.value == 0.5
    assert load_experiment(SMOKE, ["data.train.num_operations.0=1"]).data.train.num_operations == (1, 3)
    shaping = terms("objective.terms.off_policy.loss.shaping={kind: power, exponent: 0.5}")["off_policy"].loss.shaping
    assert (shaping.kind, shaping.exponent) == ("power", 0.5)


def test_an_element_of_a_list_from_the_command_line_can_be_named():
    policy = "{name: policy, select: on_policy, loss: {kind: surrogate}, normaliser: {mode: token, population: own}}"
    bonus = "{name: bonus, select: response, loss: {kind: entropy}, normaliser: {mode: token, population: own}}"
    changes = [f"objective.terms=[{policy}, {bonus}]", "objective.terms.bonus.coefficient=0.5"]
    found = terms("method=on_policy", *changes)
    assert found["bonus"].coefficient.value == 0.5


def test_every_value_knows_where_it_was_given():
    changes = ["seed=3", "objective.terms.off_policy.loss.shaping.gamma=0.3", "rl.optimizer={lr: 1e-4}"]
    resolved = resolve_experiment(SMOKE, changes)
    for path in ("seed", "objective.terms.1.loss.shaping.gamma", "rl.optimizer.lr"):
        assert resolved.origin_of(tuple(path.split("."))) == "command line"
    for path, file in {"objective.terms.1.loss.kind": "methods/luffy.yaml:", "rl.steps": "smoke.yaml:"}.items():
        assert resolved.origin_of(tuple(path.split("."))).startswith(f"{SMOKE.parent}/{file}")
    assert resolved.origin_of(("stages",)) == f"{SMOKE.parent}/chains/sft_then_luffy.yaml:2"
    assert resolved.origin_of(("rl", "temperature")) is resolved.origin_of(("rl", "optimizer", "eps")) is None


def test_variables_override_the_file_and_the_command_line_overrides_them(child, monkeypatch):
    """Those of the program itself, and of others, are none."""
    for name in ("WORKSPACE", "SECRETS", "SERVER_NAMES", "STAGE_RUN", "SUPERVISOR_PID", "DATASETS", "TEST_TASK_SETS"):
        monkeypatch.setenv(f"LUFFY_{name}", "x")
    monkeypatch.setenv("LUFFY_RL__STEPS", "3")
    monkeypatch.setenv("LUFFY_OBJECTIVE__TERMS__ENTROPY__COEFFICIENT", "0.5")
    monkeypatch.setenv("LUFFY_DATA__SUITES", "{mine: {kind: word_problems, num_prompts: 3, num_events: [2]}}")
    monkeypatch.setenv("LUFFY_SEED", "4")
    resolved = resolve_experiment(child("seed: 2\nrl: {steps: 2}\n"), ["seed=5"])
    config = resolved.config
    assert (config.rl.steps, config.seed, config.objective.terms[2].coefficient.value) == (3, 5, 0.5)
    assert "mine" in config.data.suites
    assert resolved.origin_of(("rl", "steps")) == "LUFFY_RL__STEPS"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LUFFY_RL__STEPZ", "3", "LUFFY_RL__STEPZ: rl.stepz: unknown key; did you mean 'steps'?"),
        ("LUFFY_RL__STEPS", "many", "LUFFY_RL__STEPS: rl.steps: must be a whole number, found 'many'"),
        ("LUFFY_MODLE__PATH", "3", "LUFFY_MODLE__PATH: modle: unknown key; did you mean 'model'?"),
        ("LUFFY_SEEED", "3", "LUFFY_SEEED: an experiment has no field seeed; did you mean seed?"),
        ("LUFFY_RL__STEPS", "[1", "LUFFY_RL__STEPS: rl.steps: '[1' is not valid YAML"),
    ],
)
def test_a_misspelt_variable_is_one_line(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    found = complaint(SMOKE)
    assert found.startswith(message) and "\n" not in found


def test_a_file_in_toml_is_refused_with_its_yaml(tmp_path):
    file = write(tmp_path / "it.toml", 'name = "it"\n[rl]\nsteps = 3\n')
    found = complaint(file)
    assert found == f"{file}: is TOML, and configurations are YAML; this is its YAML: {{name: it, rl: {{steps: 3}}}}"
    assert complaint(write(file, "[[")) == f"{file}: is TOML, and configurations are YAML"


def test_data_lies_beside_the_file_that_names_it_or_in_the_working_directory(tmp_path, monkeypatch):
    """The file that names it may be an extended one, or a recipe's user."""
    (tmp_path / "here").mkdir()
    for name in ("a.jsonl", "c.jsonl", "here/a.jsonl", "here/b.jsonl"):
        write(tmp_path / name, "")
    sources = (
        "{kind: file, path: a.jsonl}\n  suites: {b: {kind: file, path: '*b.jsonl'}, c: {kind: file, path: c.jsonl}}\n"
    )
    write(tmp_path / "here" / "parent.yaml", f"extends: {SMOKE}\ndata:\n  train: {sources}")
    recipe = "{kind: recipe, name: gsm8k, file: a.jsonl}"
    file = write(tmp_path / "child.yaml", f"extends: here/parent.yaml\ndata: {{suites: {{d: {recipe}}}}}\n")
    monkeypatch.chdir(tmp_path)
    data = load_experiment(file, ["data.corpus={kind: file, path: a.jsonl}"]).data
    assert data.train.path == str(tmp_path / "here" / "a.jsonl")
    suites = {name: source.path for name, source in data.suites.items() if source.kind == "file"}
    assert suites == {"b": str(tmp_path / "here" / "*b.jsonl"), "c": "c.jsonl", "d": "a.jsonl"}
    assert data.corpus.path == "a.jsonl"
    monkeypatch.chdir("/")
    assert load_experiment(file).data.suites["d"].path == str(tmp_path / "a.jsonl")


def test_further_files_go_over_the_first_in_their_order_and_below_the_command_line(tmp_path):
    for name, text in (
        ("mine", "extends: smoke\nname: mine\nseed: 1\n"),
        ("gpu", "seed: 2\nrl: {steps: 5}\nexecution: {packing: true}\n"),
        ("long", "extends: gpu.yaml\nrl: {steps: 7}\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    mine, *further = (str(tmp_path / f"{name}.yaml") for name in ("mine", "gpu", "long"))
    resolved = resolve_experiment(mine, [*further, "seed=3"])
    config = resolved.config
    assert (config.name, config.seed, config.rl.steps, config.execution.packing) == ("mine", 3, 7, True)
    assert resolved.origin_of(("rl", "steps")) == f"{further[1]}:2"
    (tmp_path / "gpu.yaml").write_text("rl: {stops: 5}\n")
    with pytest.raises(ConfigError, match=r"gpu\.yaml:1: rl\.stops: unknown key"):
        load_experiment(mine, further[:1])
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_experiment(mine, ["nowhere.yaml"])
