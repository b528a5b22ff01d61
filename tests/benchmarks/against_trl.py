"""Seconds per RL step of TRL's GRPOTrainer and of luffy's RL stage, on the same model, prompts and lengths.

Run: python tests/benchmarks/against_trl.py [14m|arithmetic|small] [steps] [threads] [TRL's batch sizes: 8,16]

Needs `pip install trl`. Both train a randomly initialised Qwen2 in float32 with Dr.GRPO: 8 rows a prompt, one optimizer
step per batch of rollouts, no gradient checkpointing. Each variant runs in a process of its own, one after the other;
its first step is not counted. `14m` (16 prompts, up to 600 tokens) takes 40 minutes for a counted step, the others
minutes. With a batch of 128 rows TRL needs more than 24 GB of memory for it; a variant that is killed is left out.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from luffy.cluster.local import LocalCluster
from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.rl.collector import GroupCollector
from luffy.rl.step_runner import StepRunner
from luffy.rl.tasks import RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.tracking.journal import RolloutJournal
from luffy.training.trainer import TrainerSpec

ROOT = Path(__file__).parents[2]
ROWS = 8
LR = 1e-6
END = 1
"""Token id of the end of sequence; 0 is padding."""


@dataclass(frozen=True)
class Size:
    """A model and its rollouts. The vocabulary decides how early a random model ends its responses."""

    vocabulary: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    prompts: int
    prompt_tokens: int
    response_tokens: int
    trl_batches: tuple[int, ...]
    """Values of TRL's `per_device_train_batch_size` to try; the fastest counts."""


SIZES = {
    "14m": Size(512, 384, 1024, 8, 6, 16, 48, 600, (8, 16, 32, 128)),
    "arithmetic": Size(79, 96, 256, 3, 4, 16, 24, 80, (16, 32, 64, 128)),
    "small": Size(79, 96, 256, 3, 4, 2, 24, 40, (8, 16)),
}
OURS: dict[str, dict[str, object]] = {"padded": {}, "packed": {"packing": True}}


def tokenizer_of(size: Size) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": END} | {f"w{i}": i for i in range(2, size.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def prompts_of(size: Size, steps: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    shape = (size.prompts * steps, size.prompt_tokens)
    return [tuple(row) for row in torch.randint(2, size.vocabulary, shape, generator=generator).tolist()]


def save_model(size: Size, folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
        max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)


Step = tuple[float, float, int]
"""Seconds of generation, seconds of the update, and response tokens."""


def luffy_steps(size: Size, folder: Path, steps: int, variant: str) -> Iterator[Step]:
    """Steps of the RL stage's own loop, with the embedded engine and real grading."""
    config = load_experiment(
        ROOT / "exp_configs" / "arithmetic.yaml",
        ["chain=rl", "method=dr_grpo", f"rl.steps={steps}", f"rl.prompts_per_step={size.prompts}",
         f"rl.max_response_tokens={size.response_tokens}", "data.max_trace_tokens=8", f"rl.optimizer.lr={LR}"],
    )  # fmt: skip
    settings = STAGE_KINDS["rl"].configure(config)
    longest = size.prompt_tokens + size.response_tokens
    spec = TrainerSpec(settings, ExecutionConfig(**OURS[variant]), folder, folder / "out", longest, pad_id=0)
    tasks = [RolloutTask(str(i), ids, "0", ()) for i, ids in enumerate(prompts_of(size, steps))]
    decode = tokenizer_of(size).decode
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(spec))
        grader = stack.enter_context(GraderPool.configured(2, settings.grading, folder / JUDGE_CACHE))
        params = SamplingParams(1.0, size.response_tokens, (END,))
        collector = GroupCollector(grader, decode, params, settings.objective.group, steps, settings.seed)
        runner = stack.enter_context(StepRunner(settings, cluster, tasks, collector, RolloutJournal(folder / "j")))
        for step in range(1, steps + 1):
            outcome = runner.run(step)
            waited = outcome.metrics["perf/trainer_idle_s"]
            tokens = sum(len(row.response_ids) for group in outcome.groups for row in group.trajectories)
            yield waited, outcome.metrics["perf/step_s"] - waited, tokens


def trl_steps(size: Size, folder: Path, steps: int, variant: str) -> Iterator[Step]:
    """Steps of GRPOTrainer, which generates with transformers' `generate`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    batch = int(variant)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=LR, max_steps=steps,
        num_generations=ROWS, per_device_train_batch_size=batch,
        gradient_accumulation_steps=size.prompts * ROWS // batch, max_completion_length=size.response_tokens,
        loss_type="dr_grpo", scale_rewards="none", beta=0.0, temperature=1.0,
    )  # fmt: skip
    texts = [" ".join(f"w{token}" for token in ids) for ids in prompts_of(size, steps)]
    generation: list[float] = []
    tokens: list[int] = []
    walls: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            walls.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            walls[-1] = time.perf_counter() - walls[-1]

    def length_reward(completions: list[str], **_: object) -> list[float]:
        return [len(text) / 1000 for text in completions]

    def timed(generate: Callable[..., tuple]) -> Callable[..., tuple]:
        def call(*given: object) -> tuple:
            began = time.perf_counter()
            found = generate(*given)
            generation.append(time.perf_counter() - began)
            tokens.append(sum(map(len, found[1])))
            return found

        return call

    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32),
        reward_funcs=length_reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder), callbacks=[Clock()],
    )  # fmt: skip
    trainer._generate = timed(trainer._generate)
    trainer.train()
    assert len(walls) == len(generation) == steps, "one generation a step"
    yield from ((drawn, wall - drawn, count) for drawn, wall, count in zip(generation, walls, tokens, strict=True))


def measure(system: str, size: str, steps: int, variant: str) -> Step:
    """The mean of all steps but the first."""
    with tempfile.TemporaryDirectory() as name:
        save_model(SIZES[size], Path(name))
        found = list((trl_steps if system == "trl" else luffy_steps)(SIZES[size], Path(name), steps + 1, variant))[1:]
    generation, update, tokens = (sum(column) / len(found) for column in zip(*found, strict=True))
    return generation, update, int(tokens)


def in_a_process(system: str, size: str, steps: int, variant: str, threads: int) -> Step:
    arguments = [sys.executable, __file__, "--one", system, size, str(steps), variant]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print one line for each variant of both."""
    if sys.argv[1:2] == ["--one"]:
        system, size, steps, variant = sys.argv[2:]
        print("\n" + json.dumps(measure(system, size, int(steps), variant)), flush=True)
        os._exit(0)  # DeepSpeed's group and the graders need no farewell
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed: pip install trl")
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else torch.get_num_threads()
    batches = sys.argv[4].split(",") if len(sys.argv) > 4 else map(str, SIZES[size].trl_batches)
    variants = [("trl", batch) for batch in batches] + [("luffy", name) for name in OURS]
    names = ", ".join(f"{name} {version(name)}" for name in ("trl", "luffy-rl", "transformers", "torch"))
    table = Table("system", "batch", "generation s", "update s", "step s", "response tokens", "tokens/s", title=names)
    for system, variant in variants:
        try:
            generation, update, tokens = in_a_process(system, size, steps, variant, threads)
        except subprocess.CalledProcessError as error:
            print(
                f"{system} {variant}: ended with {error.returncode} (-9: killed, for lack of memory, say)", flush=True
            )
            continue
        step = generation + update
        print(f"{system} {variant}: {step:.1f} s a step", flush=True)
        table.add_row(
            system, variant, f"{generation:.2f}", f"{update:.2f}", f"{step:.2f}", f"{tokens:,}", f"{tokens / step:,.0f}"
        )
    Console().print(table)
    print(f"{size}: {SIZES[size]}, mean of {steps} steps after the first, {threads} threads")


if __name__ == "__main__":
    main()
