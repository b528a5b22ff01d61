"""Engines that stop and go on, to compare them before and after, on whatever ranks they were."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from luffy.config.model import DType
from luffy.config.training import CriticConfig, OptimizerConfig, SFTConfig
from luffy.objectives.schedules import objective_at
from luffy.training.batching import collate, take_rows
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group
from reference.gradient_case import execution, loaded_model, make_batch, step_of, whole
from reference.lora_case import adapted_policy, factors, start
from reference.value_case import at_tokens, rows, targets

# The gradient of a key's bias is rounding alone; under a smaller eps Adam would make a full step of it.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
Trained = dict[str, Policy | Critic]
Kind = Literal["models", "adapter"]


def trained(seed: int, dtype: DType = "float32", kind: Kind = "models", **settings: object) -> Trained:
    """A policy and a critic, loaded as a stage loads them, or a policy with an adapter; those of seed 0 start training.

    `settings` are of the execution.
    """
    if kind == "adapter":
        return {"policy": adapted_policy(None if seed else factors(), dtype, seed=seed, **settings)}
    where = execution(**settings)
    policy, critic = (loaded_model(where, seed, dtype) for _ in range(2))
    return {
        "policy": Policy(policy, OPTIMIZER, where, dtype),
        "critic": Critic(critic, CriticConfig(optimizer=OPTIMIZER, value_clip=0.2), where, dtype),
    }


def engines(parts: Trained) -> dict[str, deepspeed.DeepSpeedEngine]:
    return {name: part.engine for name, part in parts.items()}


def take_step(parts: Trained) -> None:
    """One update of each on this rank's share of the rows."""
    init_process_group()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    if "critic" not in parts:
        policy = parts["policy"]
        assert isinstance(policy, Policy)
        policy.update(take_rows(make_batch("luffy", start()), list(range(20))[mine]), step_of("luffy"), OPTIMIZER.lr)
        return
    share = collate(rows()[mine], torch.zeros(len(rows()[mine])), pad_id=0)
    critic, policy = parts["critic"], parts["policy"]
    assert isinstance(critic, Critic) and isinstance(policy, Policy)
    returns_BT = at_tokens(targets().returns[mine], share)
    critic.update(replace(share, value_old_BT=critic.values(share), return_BT=returns_BT), 1e-2)
    share.is_off_policy_BT = share.response_mask_BT
    terms = SFTConfig(epochs=1, batch_size=1, optimizer=OPTIMIZER).objective.terms
    policy.update(share, objective_at(terms, 1, 1, share.input_ids_BT.shape[1]), 1e-2)


def write_and_go_on(stage: Path, zero_stage: int, dtype: DType = "float32", kind: Kind = "models") -> None:
    """Two steps, a checkpoint in `stage`, a third step.

    `saved.safetensors` and `expected.safetensors` have the weights before and after that.
    """
    parts = trained(0, dtype, kind, zero_stage=zero_stage)
    for _ in range(2):
        take_step(parts)
    CheckpointStore(stage, keep=2).save(engines(parts), 1, {"seen": [0.1]})
    _note(stage / "saved.safetensors", full_weights(parts))
    take_step(parts)
    _note(stage / "expected.safetensors", full_weights(parts))


def resume_and_go_on(stage: Path, zero_stage: int, dtype: DType = "float32", kind: Kind = "models") -> None:
    """From the checkpoint of `write_and_go_on`: write it again, take the third step.

    `resumed.safetensors` and `found.safetensors` have the weights before and after that.
    """
    store, parts = CheckpointStore(stage, keep=2), trained(9, dtype, kind, zero_stage=zero_stage)
    assert store.load(engines(parts), 1) == {"seen": [0.1]}
    _note(stage / "resumed.safetensors", full_weights(parts))
    store.save(engines(parts), 2)
    take_step(parts)
    _note(stage / "found.safetensors", full_weights(parts))


def _note(path: Path, weights: Mapping[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        save_file(dict(weights), path)


def assert_resumed_as_if_undisturbed(stage: Path, dtype: DType = "float32") -> None:
    """What `resume_and_go_on` left in `stage` is what `write_and_go_on` would have gone on with.

    Not the step in bfloat16: its gradient depends on how the rows were split.
    """
    written, again = (stage / "checkpoints" / step for step in ("step_000001", "step_000002"))
    for engine in (path.name for path in written.iterdir() if path.is_dir()):
        assert_same_contents(again / engine, written / engine)
    saved, resumed, found, expected = (
        load_file(stage / f"{name}.safetensors") for name in ("saved", "resumed", "found", "expected")
    )
    assert saved.keys() == resumed.keys() and all(torch.equal(resumed[name], saved[name]) for name in saved)
    if dtype == "float32":
        assert_same_step(saved, found, expected)


def full_weights(parts: Trained) -> dict[str, Tensor]:
    """The weights of both as the model has them, whole on every rank."""
    named = {
        f"{part}.{name}": parameter
        for part, trainee in parts.items()
        for name, parameter in trainee.engine.module.named_parameters()
    }
    return {name: tensor.float() for name, tensor in whole(named).items()}


def contents(folder: Path) -> dict[tuple[str, str], Tensor]:
    """What an engine's folder in a checkpoint holds, put together: (kind, parameter) -> all its elements."""
    pieces: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for entry in file.keys():  # noqa: SIM118 - not a dictionary
                kind, start, name = entry.split("/", 2)
                assert int(start) not in pieces[kind, name]
                pieces[kind, name][int(start)] = file.get_tensor(entry)
    return {key: torch.cat([of[start] for start in sorted(of)]) for key, of in pieces.items()}


def assert_same_contents(found: Path, expected: Path) -> None:
    """The same weights, moments and step counts, bit for bit, in whatever pieces."""
    ours, theirs = contents(found), contents(expected)
    assert ours.keys() == theirs.keys()
    assert {kind for kind, _ in ours} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key


def assert_same_step(before: Mapping[str, Tensor], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The weights after a step, and how far that step went in each part, but for float32's rounding."""
    assert before.keys() == found.keys() == expected.keys()
    is_adapter = any(".lora_" in name for name in before)  # small beside what it is added to
    for part in {name.partition(".")[0] for name in before}:
        names = [name for name in before if name.startswith(f"{part}.")]

        def flat(of: Mapping[str, Tensor], names: list[str] = names) -> Tensor:
            return torch.cat([of[name].flatten() for name in names]).double()

        error = (flat(found) - flat(expected)).norm()
        of_weights = float(error / flat(expected).norm())
        of_movement = float(error / (flat(expected) - flat(before)).norm())
        assert of_weights < 1e-6, f"{part} weights differ by {of_weights}"
        assert of_movement < (1e-4 if is_adapter else 1e-5), f"{part} movement differs by {of_movement}"
