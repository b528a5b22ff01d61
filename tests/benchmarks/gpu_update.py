"""One GPU: time, MFU and peak memory of a policy update in bfloat16, by layout, and what `luffy plan` says.

Run: python tests/benchmarks/gpu_update.py [SHAPE or SHAPE/LAYOUT ...]     (0.5B, 1.5B; `tiny` runs on a CPU)
     python tests/benchmarks/gpu_update.py "0.5B/packed" "0.5B/packed, compiled"

Random weights of a real shape. All layouts of a shape update on the same rows: prompts of 256 tokens, responses of
uneven lengths up to 1,792, in two micro-batches or more. Tokens are those of the rows, without padding. MFU counts what
the model has to compute (`luffy.training.update_metrics`), so padding and recomputation lower it. The time is that of
the fastest of three updates, after two that are not timed. The estimate is that of the trainer's GPU, without its
allowance for the CUDA context, which torch's peak does not include.
"""

import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.model_shape import from_model_config
from luffy.objectives.schedules import objective_at
from luffy.pipeline.memory import GIB, estimate_memory
from luffy.training.batching import collate
from luffy.training.policy import Policy
from luffy.training.ranks import device, init_process_group
from luffy.training.update_metrics import peak_flops
from luffy.types import FinishReason, Outcome, Source, TrainBatch, Trajectory

EXPERIMENT = Path(__file__).resolve().parents[2] / "exp_configs" / "luffy_qwen2.5_math_1.5b.yaml"
HAS_GPU = torch.cuda.is_available()
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 1792
SIZES = ("vocab_size", "hidden_size", "intermediate_size")
SIZES += ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def qwen2(*sizes: int, **more: object) -> Qwen2Config:
    """A Qwen2 of these sizes, in the order of `SIZES`, whose embedding of tokens also predicts them."""
    return Qwen2Config(**dict(zip(SIZES, sizes, strict=True)), tie_word_embeddings=True, **more)


SHAPES = {
    "tiny": qwen2(1000, 64, 128, 2, 2, 1),
    "0.5B": qwen2(151_936, 896, 4864, 24, 14, 2),
    "1.5B": qwen2(151_936, 1536, 8960, 28, 12, 2),
}
ROWS = {"tiny": 8, "0.5B": 64, "1.5B": 32}
MICRO_BATCHES = {"tiny": 4096, "0.5B": 16_384, "1.5B": 8192}
"""In tokens."""
TOKENS = "execution.micro_batch_tokens={}".format
PACKED, CHECKPOINTING = "execution.packing=true", "execution.gradient_checkpointing=true"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "default": ("execution.packing=null", "execution.compile=null"),  # of a stage that is long enough to be compiled
    "padded": (),
    "packed": (PACKED,),
    "packed, compiled": (PACKED, "execution.compile=true"),
    "packed, checkpointing": (PACKED, CHECKPOINTING),
    "packed, checkpointing, ZeRO 3": (PACKED, CHECKPOINTING, "execution.zero_stage=3"),
    "packed, checkpointing, 32,768 tokens": (PACKED, CHECKPOINTING, TOKENS(32_768)),
    "packed, optimizer offloaded": (PACKED, "execution.offload_optimizer=true"),
}


def batch(config: Qwen2Config, num_rows: int, shortest: int = RESPONSE_TOKENS // 8) -> TrainBatch:
    """Rows of random tokens with on-policy responses of `shortest` tokens up to the limit."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, RESPONSE_TOKENS + 1, (num_rows,), generator=random).tolist()
    rows = [
        Trajectory(
            prompt_ids=(1,) * PROMPT_TOKENS,
            response_ids=tuple(torch.randint(1, config.vocab_size, (length,), generator=random).tolist()),
            source=(Source.ON_POLICY,) * length,
            logp_behavior=(-12.0,) * length,
            weight_version=(0,) * length,
            reward=float(number % 2),
            outcome=Outcome.CORRECT if number % 2 else Outcome.WRONG,
            finish_reason=FinishReason.STOP,
        )
        for number, length in enumerate(lengths)
    ]
    made = collate(rows, torch.tensor([row.reward - 0.5 for row in rows]), 0)
    return replace(made, logp_old_BT=made.logp_behavior_BT.nan_to_num())


def measure(shape: str, layout: tuple[str, ...], rows: TrainBatch) -> dict[str, float]:
    """Seconds of an update, its tokens and operations, and GiB of memory: estimated, and torch's peak."""
    config = load_experiment(
        EXPERIMENT,
        [
            *("chain=rl", "method=on_policy", "execution.ray.placement=disaggregated", "execution.ray.trainer_ranks=1"),
            *("execution.ray.engines=1", "execution.zero_stage=1", "execution.offload_optimizer=false"),
            *("execution.packing=false", "execution.compile=false", "execution.gradient_checkpointing=false"),
            *layout,
        ],
    )
    estimates = estimate_memory(from_model_config(SHAPES[shape].to_dict()), config, None)
    trainer = next(gpu for gpu in estimates if gpu.name == "trainer GPU")

    with torch.device(device()):
        model = Qwen2ForCausalLM._from_config(SHAPES[shape], dtype=torch.bfloat16)
    policy = Policy(model, config.rl.optimizer, config.execution, "bfloat16", config.rl.temperature)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()  # making random weights is no part of an update
    objective = objective_at(config.objective.terms, 1, 10, config.rl.max_response_tokens)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        policy.update(rows, objective, config.rl.optimizer.lr)
        if HAS_GPU:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    lengths = rows.row_lengths
    return {
        "seconds": min(took[2:]),
        "tokens": float(sum(lengths)),
        "flops": policy.flops.training(lengths, rows.num_scored),
        "estimate": trainer.total_gib - trainer.gib("process"),
        "peak": torch.cuda.max_memory_allocated() / GIB if HAS_GPU else 0.0,
    }


def main() -> None:
    """One line for each layout of each shape, as soon as it is measured."""
    init_process_group()
    gpu = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    peak = peak_flops(gpu)
    print(f"{gpu}, torch {torch.__version__}", flush=True)
    for asked in sys.argv[1:] or [name for name in SHAPES if name != "tiny"]:
        shape, _, only = asked.partition("/")
        for name in [only] if only else LAYOUTS:
            gc.collect()  # the policy of the layout before
            if HAS_GPU:
                torch.cuda.empty_cache()
            label = f"{shape}, {ROWS[shape]} rows, {name}"
            try:
                layout = (TOKENS(MICRO_BATCHES[shape]), *LAYOUTS[name])
                found = measure(shape, layout, batch(SHAPES[shape], ROWS[shape]))
                speed = f"{found['seconds']:.2f} s an update, {found['tokens'] / found['seconds']:,.0f} tokens/s"
                mfu = f", MFU {found['flops'] / found['seconds'] / peak:.1%}" if peak else ""
                ratio = f" (ratio {found['estimate'] / found['peak']:.2f})" if found["peak"] else ""
                memory = f"peak {found['peak']:.2f} GiB, estimate {found['estimate']:.2f}{ratio}"
                print(f"{label}: {speed}{mfu}; {memory}", flush=True)
            except Exception as error:  # one layout that fails leaves the others
                print(f"{label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
