"""A file with its layers and overrides as an experiment, and where its values and its mistakes are."""

from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.load import resolve_experiment
from luffy.errors import ConfigError

ABSENT = "absent"
KL = "{select: on_policy, loss: {kind: kl, estimator: k3}, normaliser: {mode: token, population: own}}"
POLICY = "{name: policy, select: on_policy, loss: {kind: surrogate}, normaliser: {mode: token, population: own}}"
BONUS = "{name: bonus, select: response, loss: {kind: entropy}, normaliser: {mode: token, population: own}}"
NAMED_GRADER = "grading: {kind: math, named: {mine: {kind: exact}}}\n"
GROUPS_OF_4 = "extends: luffy\nobjective: {group: {size: 4}}\n"
MY_TERMS = f"objective:\n  terms:\n    off_policy: {{loss: {{shaping: {{gamma: 0.2}}}}}}\n    kl: {KL}\n"
WITHOUT_LONGER = "data: {suites: {longer: null}}\n"
TERMS = "objective.terms"
LUFFY_TERMS = ["on_policy", "off_policy", "entropy"]


def value(config: ExperimentConfig, path: str) -> object:
    """The value at a dotted path, with elements of lists by name; a list of terms is their names."""
    found: object = config
    for part in path.split("."):
        if isinstance(found, tuple):
            found = {each.name: each for each in found}
        found = found.get(part, ABSENT) if isinstance(found, dict) else getattr(found, part)
    return [each.name for each in found] if path == TERMS and isinstance(found, tuple) else found


def write(folder: Path, files: dict[str, str]) -> Path:
    """The first of the files, all of which are written."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    return folder / next(iter(files))


def child(text: str) -> dict[str, str]:
    return {"child.yaml": f"extends: smoke\n{text}"}


GAMMA, BEHAVIOR = f"{TERMS}.off_policy.loss.shaping.gamma", f"{TERMS}.off_policy.loss.behavior"
EXPONENT = f"{TERMS}.off_policy.loss.shaping.exponent"
WITH_KL = {TERMS: [*LUFFY_TERMS, "kl"], f"{TERMS}.kl.loss.estimator": "k3"}
OVERRIDDEN = [  # overrides of smoke.yaml, and what they come to
    (["data.suites.longer=null"], {"data.suites.longer": ABSENT}),
    (["data.suites.longer.num_prompts=5", "data.suites.longer=null"], {"data.suites.longer": ABSENT}),
    ([f"{GAMMA}=0.3"], {TERMS: LUFFY_TERMS, GAMMA: 0.3, BEHAVIOR: "one"}),
    ([f"{TERMS}.off_policy.loss.shaping={{kind: power, exponent: 0.5}}"], {EXPONENT: 0.5}),
    ([f"{TERMS}.2.coefficient=0.5"], {f"{TERMS}.entropy.coefficient.value": 0.5}),
    ([f"{TERMS}.entropy=null"], {TERMS: ["on_policy", "off_policy"]}),
    (["data.train.num_operations.0=1"], {"data.train.num_operations": (1, 3)}),
    (["method=on_policy", f"{TERMS}=[{POLICY}, {BONUS}]", f"{TERMS}.bonus.coefficient=0.5"],
     {TERMS: ["policy", "bonus"], f"{TERMS}.bonus.coefficient.value": 0.5}),
    ([f"{TERMS}.kl={KL}", f"{TERMS}.kl.coefficient=0.5"], {**WITH_KL, f"{TERMS}.kl.coefficient.value": 0.5}),
]  # fmt: skip
LAYERS = {
    "child.yaml": "extends: smoke\nmethod: own.yaml\nrl: {steps: 9}\ndata: {train: {num_operations: [5]}}\n",
    "own.yaml": "extends: luffy\nseed: 2\nrl: {temperature: 0.5}\n",
}
FURTHER = {
    "mine.yaml": "extends: smoke\nname: mine\nseed: 1\n",
    "gpu.yaml": "seed: 2\nrl: {steps: 5}\nexecution: {packing: true}\n",
    "long.yaml": "extends: gpu.yaml\nrl: {steps: 7}\n",
}
PARENT = {
    "child.yaml": "name: child\nextends: parent.yaml\nmethod: on_policy\n",
    "parent.yaml": "name: parent\nextends: smoke\nobjective: {group: {size: 3}}\n",
}


def replacing(named: str) -> dict[str, str]:
    """A named grader in the preset and in the parent, and a child with another grading."""
    return {
        "own.yaml": f"name: own\nextends: parent.yaml\nmethod: method.yaml\ngrading: {{kind: exact{named}}}\n",
        "method.yaml": f"extends: luffy\n{NAMED_GRADER}",
        "parent.yaml": f"name: parent\nextends: smoke\n{NAMED_GRADER}",
    }


LOADED = {  # files, of which the first is loaded; overrides; and what they come to
    "later layers win and mappings merge": (
        LAYERS, ["rl.steps=11", "rl.optimizer.lr=1e-3", "rl.optimizer.lr=1e-4"],
        {"rl.steps": 11, "rl.temperature": 0.5, "rl.prompts_per_step": 4, "seed": 7, "rl.optimizer.lr": 1e-4},
    ),
    "lists replace": (LAYERS, [], {"data.train.num_operations": (5,), "data.train.num_prompts": 24}),
    "a mapping replaces where it says so, in files and overrides": (
        {**child("data: {suites: {_replace_: true, mine: {kind: file, path: x}}}\n")},
        ["rl.optimizer={_replace_: true, lr: 1e-3}"],
        {"data.suites.longer": ABSENT, "data.suites.mine.path": "x", "rl.optimizer.betas": (0.9, 0.999)},
    ),
    "kinds replace": (child("data: {train: {kind: file, path: x.jsonl}}\n"), [], {"data.train.path": "x.jsonl"}),
    "a method from the folder of the file that names it": (
        {"mine/child.yaml": "extends: smoke\nmethod: own.yaml\n", "mine/own.yaml": GROUPS_OF_4}, [],
        {"objective.group.size": 4},
    ),
    "what a parent sets holds under another preset": (PARENT, [], {"objective.group.size": 3, "name": "child"}),
    "a method of RL that a parent names is left out without RL": (
        child("method: luffy\n"), ["chain=sft"], {"kinds": ("prepare_data", "base", "sft", "evaluate", "report")},
    ),
    "null removes a suite": (child(WITHOUT_LONGER), [], {"data.suites.longer": ABSENT}),
    "what null has removed can be another": (
        child(WITHOUT_LONGER), ["data.suites.longer={kind: file, path: x}"], {"data.suites.longer.path": "x"},
    ),
    "what is replaced in a file is so in its preset": (replacing(""), [], {"grading.named": {}}),
    "what is removed in a file is so in its preset": (replacing(", named: {mine: null}"), [], {"grading.named": {}}),
    "further files go over the first, below the command line": (
        FURTHER, ["gpu.yaml", "long.yaml", "seed=3"],
        {"name": "mine", "seed": 3, "rl.steps": 7, "execution.packing": True},
    ),
    "terms of a method merge with those of the one that it extends": (
        {**child("chain: rl\nmethod: mine.yaml\n"), "mine.yaml": f"extends: luffy\n{MY_TERMS}"}, [],
        {**WITH_KL, GAMMA: 0.2, BEHAVIOR: "one"},
    ),
    "and those of an experiment with its method's": (
        child(f"chain: rl\nmethod: luffy\nobjective: {{terms: {{kl: {KL}}}}}\n"), [], WITH_KL,
    ),
    **{" ".join(overrides): (child(""), overrides, expected) for overrides, expected in OVERRIDDEN},
}  # fmt: skip


@pytest.mark.parametrize(("files", "overrides", "expected"), LOADED.values(), ids=LOADED)
def test_files_and_overrides_come_to_these_values(tmp_path, files, overrides, expected):
    given = [str(tmp_path / each) if each in files else each for each in overrides]
    config = load_experiment(write(tmp_path, files), given)
    assert {path: value(config, path) for path in expected} == expected


def test_sft_is_as_long_as_epochs_or_steps_say():
    by_steps = load_experiment(SMOKE, ["sft.epochs=null", "sft.steps=9"]).sft
    assert (by_steps.num_steps(8), load_experiment(SMOKE).sft.num_steps(9)) == (9, 5)  # 2 x 9 / 4, up


def test_a_method_of_ones_own_is_found_from_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, {"mine/own.yaml": GROUPS_OF_4})
    for folder, method in ((tmp_path / "mine", "own.yaml"), (tmp_path, "mine/own.yaml")):
        monkeypatch.chdir(folder)
        assert load_experiment("smoke", [f"method={method}"]).objective.group.size == 4
    with refused("no preset 'mine/own'", "did you mean 'mine/own.yaml'?"):
        load_experiment("smoke", ["method=mine/own"])
    with refused(f"command line: method: own.yaml: no such file; give a path from {tmp_path}"):
        load_experiment("smoke", ["method=own.yaml"])


def test_every_value_knows_where_it_was_given(tmp_path):
    changes = ["seed=3", "objective.terms.off_policy.loss.shaping.gamma=0.3", "rl.optimizer={lr: 1e-4}"]
    files = {"long.yaml": "extends: gpu.yaml\n", "gpu.yaml": "\nsft: {batch_size: 5}\n"}
    resolved = resolve_experiment(SMOKE, [str(write(tmp_path, files)), *changes])
    origins = {
        "seed": "command line",
        "objective.terms.1.loss.shaping.gamma": "command line",
        "rl.optimizer.lr": "command line",
        "sft.batch_size": f"{tmp_path}/gpu.yaml:2",
        "objective.terms.1.loss.kind": f"{SMOKE.parent}/methods/luffy.yaml:",
        "rl.steps": f"{SMOKE.parent}/smoke.yaml:",
        "stages": f"{SMOKE.parent}/chains/sft_then_luffy.yaml:2",
    }
    for path, origin in origins.items():
        assert resolved.origin_of(tuple(path.split("."))).startswith(origin)
    assert resolved.origin_of(("rl", "temperature")) is resolved.origin_of(("rl", "optimizer", "eps")) is None


def test_data_lies_beside_the_file_that_names_it_or_in_the_working_directory(tmp_path, monkeypatch):
    """The file that names it may be an extended one, or a recipe's user."""
    sources = (
        "{kind: file, path: a.jsonl}\n  suites: {b: {kind: file, path: '*b.jsonl'}, c: {kind: file, path: c.jsonl}}\n"
    )
    recipe = "{kind: recipe, name: gsm8k, file: a.jsonl}"
    file = write(tmp_path, {
        "child.yaml": f"extends: here/parent.yaml\ndata: {{suites: {{d: {recipe}}}}}\n",
        "here/parent.yaml": f"extends: {SMOKE}\ndata:\n  train: {sources}",
        **dict.fromkeys(("a.jsonl", "c.jsonl", "here/a.jsonl", "here/b.jsonl"), ""),
    })  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = load_experiment(file, ["data.corpus={kind: file, path: a.jsonl}"]).data
    assert data.train.path == str(tmp_path / "here" / "a.jsonl")
    suites = {name: source.path for name, source in data.suites.items() if source.kind == "file"}
    assert suites == {"b": str(tmp_path / "here" / "*b.jsonl"), "c": "c.jsonl", "d": "a.jsonl"}
    assert data.corpus.path == "a.jsonl"
    monkeypatch.chdir("/")
    assert load_experiment(file).data.suites["d"].path == str(tmp_path / "a.jsonl")


# Mistakes: one line each, which begins with where the mistake is.

# Overrides, and what the line names.
ON_THE_COMMAND_LINE = {
    "rl.stepz=3": "rl.stepz: unknown key .. 'steps'",
    "steps=3": "steps: unknown key .. base.steps or rl.steps or sft.steps",
    "objective.terms.off_policy.loss.gamma=1": "loss.gamma: unknown key .. shaping.gamma",
    "objective.terms.off_policy.loss.kind=foo": "off_policy.loss.kind: unknown kind 'foo' .. surrogate",
    "objective.terms.x={select: response, loss: {}, normalizer: {}}": "normaliser in place of 'normalizer'",
    "rl.steps=0": "rl.steps: must be greater than 0, found 0",
    "rl.steps = x": "rl.steps: must be a whole number, found 'x'",
    "rl.steps=[1": "rl.steps: '[1' is not valid YAML",
    "seed=yes": "seed: must be a whole number, found true",
    "rl": "'rl' .. key.path=value",
    "name=a b": "name: .. found 'a b'",
    "data.train={kind: fil}": "data.train.kind: unknown kind 'fil' .. 'file' .. arithmetic",
    "data.suites.x.path=a": "data.suites.x.kind: is missing",
    "data.suites.longr=null": "data.suites.longr: must be a mapping, found null",
    "data.train.num_operations.9=1": "no element '9' .. 0, 1",
    "data.train.num_operations.0.x=1": "data.train.num_operations.0 is 2",
    "model.architecture.num_heads=3": "multiple of 2 x num_heads",
    "model.package=a-b": "model.package: may have small letters, digits and _",
    "grading={named: {x: 3}}": "grading.named.x: must be a mapping, found 3",
    "grading.kind={kind: custom, function: a.b}": "grading.kind.function: .. package.module:name, found 'a.b'",
    "grading.kind={kind: judge, model: m, url: host}": "url: .. http:// or https://, found 'host'",
    "environment={kind: tools, tools: [calculatr]}": "'calculatr' .. 'calculator'",
    "environment={kind: tools, tools: ['a:go', 'b:go']}": "environment: tools: two tools are called go",
    "stages=[prepare_data,basee]": "found 'basee' .. 'base'",
    "objective.advantage.lam=1": "objective.advantage.lam: unknown key of kind group_mean .. gae",
    "objective.advantage.scale_by_sd=1": "advantage.scale_by_sd: unknown key .. 'scale_by_std'",
    "rl.optimizer={_replace_: no}": "rl.optimizer._replace_: must be true",
    "model.path=x": "model: give exactly one of path .. there are path and architecture: model.architecture=null",
    "extends=smoke": "extends cannot be overridden",
    "method=lufy": "no preset 'lufy' in exp_configs/methods/ .. 'luffy' .. aipo",
    "objective.terms.off_polcy.coefficient=1": "no element 'off_polcy' .. 'off_policy'",
    "objective.terms.of_policy={coefficient: 2}": "no element 'of_policy' .. 'off_policy' .. also needs",
    "objective.terms.3.coefficient=1": "no element '3' .. on_policy, off_policy, entropy",
    "objective.terms.kl.coefficient=2": "no element 'kl' .. on_policy, off_policy, entropy",
    "objective.terms.kl=null": "no element 'kl'; there are on_policy",
    "objective.terms.entropy.coefficent=1": "terms.entropy.coefficent: unknown key .. 'coefficient'",
    "chain=sft method=luffy": "method: luffy has no effect without the stage rl",
    "chain=rl method=sft": "method: sft has no objective .. stage rl",
    "method=sft": "method: sft would drop the stage rl of the chain sft_then_luffy .. chain=sft",
}


@pytest.mark.parametrize(("override", "named"), ON_THE_COMMAND_LINE.items())
def test_a_mistake_on_the_command_line_is_one_line_that_says_what_and_where(override, named):
    overrides = override.split() if override.startswith("chain=") else [override]
    with refused("command line: ", *named.split(" .. "), error=ConfigError):
        load_experiment(SMOKE, overrides)


# Files, of which the first is loaded, and what follows its path in the line.
IN_FILES = {
    "unknown key": (child("rl:\n  prompts_per_stop: 4\n"), ":3: rl.prompts_per_stop .. 'prompts_per_step'"),
    "unknown kind": (child("data:\n  train:\n    kind: arithmetik\n"), ":4: data.train.kind .. 'arithmetik'"),
    "no recipe": (child("data:\n  train: {kind: recipe, path: r.yaml}\n"), ":3: data.train.path: r.yaml: no such file"),
    "a key twice": (child("seed: 1\nseed: 2\n"), ":3: seed is given twice .. child.yaml:2"),
    "a tab": (child("data:\n\ttrain: 1\n"), ":3: not valid YAML .. ; indent with spaces"),
    "extend": (child("extend: smoke\n"), ":2: extend: unknown key .. 'extends'"),
    "no method": (child("method: own.yaml\n"), ":2: method: own.yaml: no such file .. give a path from {folder}"),
    "a method without RL": (child("chain: sft\nmethod: on_policy\n"), ":3: method: on_policy .. stage rl"),
    "extends a method": ({"own.yaml": "name: own\nextends: luffy\n"}, ":2: extends: luffy is a method"),
    "extends nothing": (
        {"own.yaml": "name: own\nextends: smok.yaml\n"}, ":2: extends: smok.yaml .. 'smoke' .. {folder}",
    ),
    "a circle": ({"a.yaml": "extends: b.yaml\n", "b.yaml": "extends: a.yaml\n"}, " .. extends itself"),
    "TOML": ({"it.toml": 'name = "it"\n[rl]\nsteps = 3\n'}, ": must hold a mapping"),
    "a sequence": ({"bad.yaml": "- 1\n"}, " .. a mapping"),
    "nothing": ({"bad.yaml": ""}, " .. a mapping"),
    "a bracket": ({"bad.yaml": "a: [1\n"}, " .. not valid YAML"),
    "Latin": ({"bad.yaml": "name: \xff\n"}, ": not UTF-8 at byte 6"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "named"), IN_FILES.values(), ids=IN_FILES)
def test_a_mistake_in_a_file_names_the_file_and_the_line(tmp_path, files, named):
    path = write(tmp_path, files)
    place, *others = named.format(folder=tmp_path).split(" .. ")
    with refused(f"{path if place else ''}{place}", *others, error=ConfigError):
        load_experiment(path)


def test_the_line_of_a_mistake_in_a_merged_term_is_its_own(tmp_path):
    mine = "extends: luffy\nobjective:\n  terms:\n    on_policy: null\n    entropy: {coefficient: no}\n"
    with refused("mine.yaml:5: objective.terms.entropy.coefficient"):
        load_experiment(write(tmp_path, {**child("chain: rl\nmethod: mine.yaml\n"), "mine.yaml": mine}))
    files = {**child(""), "gpu.yaml": "rl: {stops: 5}\n"}
    with refused("gpu.yaml:1: rl.stops: unknown key"):
        load_experiment(write(tmp_path, files), [str(tmp_path / "gpu.yaml")])
    with refused("nowhere.yaml: no such file", error=ConfigError):
        load_experiment("smoke", ["nowhere.yaml"])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("extends: smoke\nseeed: 1\nrl: {steps: x}\n", ["rl.steps: ", "seeed: "]),
        ("extends: smoke\ndata: {train: {stepwise_share: 2.5}}", ["must be a mapping or less than or equal to 1"]),
        ("extends: smoke\ndata: {train: {stepwise_share: {a: 1}}}", ["stepwise_share.a: ", "stepwise_share: "]),
        ("name: own\nsft: null\n", ["stages: is missing; add it, or chain: NAME"]),
    ],
)
def test_every_mistake_gets_a_line(tmp_path, text, lines):
    with pytest.raises(ConfigError) as caught:
        load_experiment(write(tmp_path, {"own.yaml": text}))
    found = str(caught.value).splitlines()
    assert all(named in line for named, line in zip(lines, found, strict=False)), found
    assert len(found) == len(lines) or len(lines) == 1
