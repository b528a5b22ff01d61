"""Peak memory of each rank while a frozen model is loaded and scores under ZeRO 3, whole on every rank or in shares.

Run: python tests/benchmarks/zero3_loading.py [layers]

Two gloo ranks load a Qwen2 with random weights (294 MiB in bfloat16 with the default of 20 layers) from a temporary
folder. Figures are by how much the highest resident memory (`VmHWM`) of a rank is above that before loading. They
include pages of the weight files while those are mapped. The files have float32 weights, so that every weight is
converted: on a CPU, weights in the type of their file would stay mapped, and a whole model would take no memory of its
own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import forget_peak, memory_bytes
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.processes import exit_without_finalizing
from luffy.training.batching import collate
from luffy.training.deepspeed_engine import load_to_train
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import FrozenPolicy
from luffy.training.ranks import init_process_group
from luffy.training.supervised import demonstration

WAYS = ("whole", "in shares")
RANKS = 2
SHARDED = ExecutionConfig(zero_stage=3)


def measure(way: str, folder: Path) -> tuple[float, float]:
    """MiB by which the peak of this rank rises while it loads the model, and until it has scored a row with it."""
    row = demonstration([1] * 16, [2] * 16)
    batch = collate([row], torch.zeros(1), pad_id=0)
    forget_peak()
    before = memory_bytes("VmRSS")
    model = load_causal_lm(folder, "bfloat16") if way == "whole" else load_to_train(folder, "bfloat16", SHARDED)
    loaded = memory_bytes("VmHWM")
    FrozenPolicy(model, SHARDED, temperature=1.0).logprobs(batch)
    return (loaded - before) / 2**20, (memory_bytes("VmHWM") - before) / 2**20


def work(way: str, folder: Path) -> None:
    """What each rank does; rank 0 prints the figures of all."""
    init_process_group()
    found: list[object] = [None] * RANKS
    dist.all_gather_object(found, measure(way, folder))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()
    exit_without_finalizing(0)


def on_ranks(way: str, folder: Path) -> list[list[float]]:
    """The figures of every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run([*command, __file__, way, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def write_model(folder: Path, layers: int) -> float:
    """Write a model with random weights; returns its size in bfloat16 in MiB."""
    config = Qwen2Config(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")
    return 2 * model.num_parameters() / 2**20


def main(layers: int) -> None:
    """Print a table with one line for each way and rank."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{write_model(Path(folder), layers):.0f} MiB in bfloat16, on {RANKS} ranks\n")
        print("| loaded | rank | peak of loading | peak as a frozen reference |\n|---|---|---|---|")
        for way in WAYS:
            for rank, (loading, scoring) in enumerate(on_ranks(way, Path(folder))):
                print(f"| {way} | {rank} | {loading:,.0f} MiB | {scoring:,.0f} MiB |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1], Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
