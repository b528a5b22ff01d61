"""Methods on a base policy that is right now and then: gates open and shut, and replay has something to replay."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from reference.taught_presets import SELF_TAUGHT, SUPERVISED, teacher_overrides
from safetensors.torch import load_file, save_file

from luffy.config import load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.stages.program import StageResult
from support.stages import CONFIGS, run_stage, upstream_of

# A quarter of this base's rollouts are right.
EASY = (
    "data.train={kind: arithmetic, num_prompts: 32, num_operations: [1, 2], operations: {reverse: 1}}",
    "data.corpus={kind: arithmetic, num_prompts: 4000, num_operations: [1, 1, 2], operations: {reverse: 1}, "
    "stepwise_share: 0.7, unique: false}",
    "base={steps: 120, batch_size: 32, optimizer: {lr: 6e-3, betas: [0.9, 0.98], "
    "schedule: {kind: cosine, warmup_share: 0.05}}}",
    "rl.steps=3",
    "execution.micro_batch_tokens=4096",
    "execution.checkpoint={rl_every: 1, keep: 3}",
)
TWO_UPDATES = ("rl.steps=5", "rl.prompts_per_step=4", "rl.prompts_per_update=2", "execution.checkpoint.rl_every=2")
"""Update 8 is the second of step 4, whose journal is two steps ahead of the last checkpoint."""
_STARTS, _SHOW = "objective.group.starts", "objective.group.starts.critique.show"
_IN_FRONT = f'{_STARTS}.hint.show.template="{{hint}}\\n{{prompt}}"'
_RETRIES = (f'{_SHOW}.template="{{feedback}}\\n{{prompt}}"', f"{_SHOW}.max_prompt_tokens=64")
# What a run of three small steps must be told to reach the part that makes the method.
_SMALL = {
    "relift": ("objective.interleaved_sft.buffer_size=2",),
    "exgrpo": ("objective.replay.start_accuracy=0.05",),
    # English words take many of the tokens that this base's tokenizer has, and it has few positions.
    **dict.fromkeys(SELF_TAUGHT, ('rl.teachers.self.prompt="{trace} {problem}"',)),
    "ppo": ("rl.critic.optimizer.lr=1e-3",),
    "critique_grpo": (*_RETRIES, *(f'{_SHOW}.{text}="{{reference}}"' for text in ("right", "wrong"))),
    # Also where some rollouts are right, so that a retry is, too.
    "lte": (
        *_RETRIES,
        f'{_SHOW}.wrong="{{answers}}"',
        f"{_SHOW}.truncated=null",
        f"{_STARTS}.critique.when.accuracy_at_most=0.9",
    ),
    # Also where some rollouts are right, so that some group has right rows that saw the answer.
    "hdpo": (
        'objective.group.starts.answer.show.template="{feedback}\\n{prompt}"',
        'objective.group.starts.answer.show.wrong="{reference}"',
        f"{_STARTS}.answer.when.accuracy_at_most=0.9",
    ),
    # The teacher is as weak as the policy.
    "tgopd": ("rl.teachers.teacher.rows.pass_rate_at_least=0.3",),
    # The hint in front: this base knows what follows the question, and so solves some prompts with it.
    "guide": (_IN_FRONT, "objective.group.size=4", f"{_STARTS}.hint.rows=4"),
    "questa": (_IN_FRONT,),
    "pope": (_IN_FRONT,),
    # Begins anew from the policy after each step, so that each checkpoint has to carry it.
    "uft": ("rl.reference={refresh_every: 1, mixup: 0.5}",),
}


def experiment(method: str, *overrides: str) -> ExperimentConfig:
    """Three small steps of a method; its teacher, if it needs one that it does not name, is `teacher_of`."""
    chain = "sft" if method in SUPERVISED else "rl"
    changes = [f"chain={chain}", f"method={method}", *EASY, *_SMALL.get(method, ()), *overrides]
    return load_experiment(CONFIGS / "smoke.yaml", changes)


def taught(method: str, upstream: Mapping[str, Path]) -> list[str]:
    """The teacher of a method that needs one, as overrides."""
    return teacher_overrides(method, str(upstream["model"].parent / "teacher"))


def run_rl(config: ExperimentConfig, out: Path, upstream: Mapping[str, Path]) -> StageResult:
    if own := {"ampo": "several", "tgopd": "probed"}.get(config.method or ""):
        upstream = {**upstream, "data": upstream["data"].with_name(own)}
    return run_stage(config, "rl", out, upstream)


def make_easy(folder: Path) -> None:
    """Data, also with several traces a prompt, a base policy, two teachers that differ from it a little, and the pass
    rates of the first."""
    upstream_of(experiment("luffy"), folder)
    run_stage(
        experiment("luffy", "data.train.styles=[labelled,equations,checked]"), "prepare_data", folder / "several", {}
    )
    for seed, teacher in ((1, "teacher"), (2, "teacher-2")):
        shutil.copytree(folder / "model/model", folder / teacher)
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(folder / teacher / "model.safetensors")
        noisy = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        save_file(noisy, folder / teacher / "model.safetensors", metadata={"format": "pt"})
    probing = experiment("tgopd", *taught("tgopd", {"model": folder / "model"}))
    run_stage(probing, "difficulty", folder / "probed", {"data": folder / "data"})


Made = Callable[[str, Callable[[Path], object]], Path]
"""The fixture `made`."""


def easy(made: Made) -> dict[str, Path]:
    """The inputs of RL and SFT, from `make_easy`. Not to be changed."""
    folder = made("easy", make_easy)
    return {"data": folder / "data", "model": folder / "model", "held_out": folder / "data"}
