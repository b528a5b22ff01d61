"""Seconds of an RL step's learning with a divergence from a teacher, against the sampled token alone, on a CPU.

Run: python tests/benchmarks/divergence_step.py [threads]

The step scores the same 16 responses of 120 tokens by the teacher and takes one optimizer step, five rounds in turn, in
one process. The output head has 30 % of the decoder's weights and its own, about as in Qwen2.5-0.5B.
"""

from functools import partial

import torch
from measuring import fastest, numbers, show
from reference.gradient_case import OPTIMIZER
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.config.load import load_experiment
from luffy.config.terms import DistillationLoss, DivergenceLoss
from luffy.training.batching import one_shard
from luffy.training.learner import Learner
from luffy.training.policy import DistillationTeacher, FrozenPolicy, Policy
from luffy.training.ranks import init_process_group
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

WAYS = {
    "sampled token": DistillationLoss(kind="distillation"),
    "top 64, JSD": DivergenceLoss(kind="divergence", measure="jsd", top_k=64),
    "top 64, reverse KL": DivergenceLoss(kind="divergence", measure="reverse_kl", top_k=64),
    "top 1024, JSD": DivergenceLoss(kind="divergence", measure="jsd", top_k=1024),
}
VOCABULARY = 16384


def model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    ))  # fmt: skip


def rows() -> tuple[Trajectory, ...]:
    drawn = torch.randint(1, VOCABULARY, (16, 150), generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(
        Trajectory(
            tuple(ids[:30]), tuple(ids[30:]), (Source.ON_POLICY,) * 120, (-9.0,) * 120, (0,) * 120, 0.0, Outcome.WRONG,
            FinishReason.STOP,
        )
        for ids in drawn
    )  # fmt: skip


def main() -> None:
    """Print one line a way."""
    torch.set_num_threads(*numbers(1))
    init_process_group()
    where, group, ways = ExecutionConfig(micro_batch_tokens=2400), Group("", rows()), {}
    config = load_experiment("smoke", ["method=opd", "chain=rl", "rl.teacher={kind: model, path: teacher}"])
    assert config.objective is not None and config.rl is not None
    (term,) = config.objective.terms
    for name, loss in WAYS.items():
        objective = config.objective.model_copy(update={"terms": (term.model_copy(update={"loss": loss}),)})
        teacher = DistillationTeacher(FrozenPolicy(model(1), where, 1.0), None, 0, objective.teacher_choices)
        policy = Policy(model(0), OPTIMIZER, where, "float32")
        learner = Learner(policy, objective, config.rl, pad_id=0, teacher=teacher)
        ways[name] = partial(learner.learn, one_shard([group], objective.advantage), 1)
    took = fastest(ways, rounds=5)
    first = next(iter(took.values()))
    lines = [(name, f"{seconds:.2f}", f"{seconds / first:.2f}") for name, seconds in took.items()]
    show(("compares", "seconds a step", "against the first"), lines)


if __name__ == "__main__":
    main()
