"""What an update costs where each turn is learned in a context of its own (`history: branching`).

Run: python tests/benchmarks/branching_cost.py [reasoning tokens a turn]

The same four conversations under a chat template that drops earlier reasoning, as Qwen3's does. `as_sampled` is one
sequence per conversation, with all of its reasoning; `branching` one sequence for each turn, without that of earlier
turns. Both learn the same tokens. A token before a turn goes through the model once for each later turn, so the cost of
`branching` grows with the number of turns, and less so where reasoning makes up most of a turn. Times are CPU seconds
of an update, the faster of two, by the same process in turn; the model is a Qwen2 of 3 million parameters, float32.
"""

import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from measuring import numbers, show
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from luffy.config.environment import History
from luffy.config.execution import ExecutionConfig
from luffy.config.training import OptimizerConfig
from luffy.data.tokenizer import build_tokenizer
from luffy.stages.base import LANGUAGE_MODELLING
from luffy.stages.supervised_run import trace_examples
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedPlan, SupervisedRank, SupervisedTrainer
from luffy.types import Message, Prompt, Trace, Trajectory

NUM_TURNS = (1, 2, 4, 8)
NUM_CONVERSATIONS = 4
ANSWER_TOKENS, REPLY_TOKENS = 8, 32
WAYS: tuple[History, ...] = ("as_sampled", "branching")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def conversation(number: int, turns: int, reasoning: int) -> Prompt:
    """Digits, each of them a token."""
    said = [
        message
        for turn in range(turns)
        for message in (
            Message("assistant", f"<think>{str(turn) * reasoning}</think>{str(number) * ANSWER_TOKENS}"),
            Message("user", str(turn) * REPLY_TOKENS),
        )
    ][:-1]
    text = "\n".join(message.content for message in said)
    trace = Trace(text, author="benchmark", verified=True, turns=tuple(said))
    question = (Message("user", f"question {str(number) * REPLY_TOKENS}"),)
    return Prompt(uid=str(number), messages=question, data_source="benchmark", ground_truth="0", traces=(trace,))


def update_seconds(examples: Sequence[Trajectory], pad_id: int) -> float:
    """CPU seconds of an update on all examples, the faster of two."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(
        Qwen2Config(
            vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True,
        ),
        attn_implementation="sdpa",
    )  # fmt: skip
    optimizer = OptimizerConfig(lr=1e-4)
    steps = 3
    plan = SupervisedPlan(steps, len(examples), optimizer, (LANGUAGE_MODELLING,), checkpoint_every=steps + 1, seed=0)
    policy = Policy(model, optimizer, ExecutionConfig(packing=True, micro_batch_tokens=4096), "float32")
    moments: list[float] = []

    def on_step(step: int, metrics: dict[str, float]) -> bool:
        moments.append(time.process_time())
        return step == steps

    with tempfile.TemporaryDirectory() as folder:
        rank = SupervisedRank(policy, plan, CheckpointStore(Path(folder), 1), pad_id)
        SupervisedTrainer(plan, LocalRanks(rank)).train(examples, 0, on_step)
    return min(after - before for before, after in pairwise(moments))


def examples_of(tokenizer: PreTrainedTokenizerBase, turns: int, reasoning: int, way: History) -> list[Trajectory]:
    return trace_examples(
        tokenizer, [conversation(number, turns, reasoning) for number in range(NUM_CONVERSATIONS)], way
    )


def main() -> None:
    """Print one line a number of turns."""
    (reasoning,) = numbers(128)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["user: assistant: question <think></think> 0123456789"])
    tokenizer.chat_template = TEMPLATE
    rows = []
    for turns in NUM_TURNS:
        examples = {way: examples_of(tokenizer, turns, reasoning, way) for way in WAYS}
        learned = {way: sum(row.num_learnable for row in rows) for way, rows in examples.items()}
        through = [
            sum(len(branch.prompt_ids) + len(branch.response_ids) for row in examples[way] for branch in row.branches())
            for way in WAYS
        ]
        seconds = [update_seconds(examples[way], tokenizer.pad_token_id) for way in WAYS]
        assert len(set(learned.values())) == 1, learned
        tokens = f"{through[0]:,} → {through[1]:,}", f"{through[1] / through[0]:.2f}"
        cpu = f"{seconds[0]:.2f} → {seconds[1]:.2f}", f"{seconds[1] / seconds[0]:.2f}"
        rows.append((turns, f"{learned['branching']:,}", *tokens, *cpu))
    show(("turns", "learned tokens", "tokens through the model", "ratio", "CPU seconds", "ratio"), rows)


if __name__ == "__main__":
    main()
