"""Seconds per RL step of TRL's GRPOTrainer and of luffy's RL stage, on the same model, prompts and lengths.

Run: python tests/benchmarks/against_trl.py [14m|arithmetic|small] [steps] [threads] [TRL's batch sizes: 8,16,16x2]
     python tests/benchmarks/against_trl.py --one luffy|trl 0.5B|tiny STEPS VARIANT [FOLDER]    (one alone, with vLLM)

Needs `pip install trl`. Both train a randomly initialised Qwen2 in float32 with Dr.GRPO: 8 rows a prompt, one optimizer
step per batch of rollouts, no gradient checkpointing. Each variant runs in a process of its own, one after the other;
its first step is not counted. `16x2` is TRL in two processes, as `accelerate` starts them, and `ranks` is luffy with
`execution.ranks: 2`, each process with half of the threads. `14m` (16 prompts, up to 600 tokens) takes 40 minutes for a
counted step, the others minutes. With a batch of 128 rows TRL needs more than 24 GB of memory for it; a variant that is
killed is left out.

With vLLM, on the GPU that the trainer uses too, the variants are `colocated` (luffy: under Ray), `colocated-local`
(luffy: in the trainer's process), both with bfloat16 weights, float32 master weights and micro-batches of 16,384 packed
tokens through compiled layers, and `colocated-8` (TRL, in the trainer's process: float32 weights under bfloat16
autocast, its default, with 8 rows a micro-batch). All engines sleep while the trainer learns. Before the update TRL
scores each response once more, to correct for the sampler's probabilities; its gap of log-probabilities is from there.
FOLDER keeps the model for the next variant. `tiny` runs on a CPU with vLLM's CPU build.
"""

import importlib.util
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import psutil
import torch
from gpu_update import qwen2
from measuring import ROOT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback

from luffy.cluster.local import open_cluster
from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig, RayConfig, VLLMConfig
from luffy.config.settings import settings_in
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.loop import StepRunner
from luffy.rl.rows import RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.tracking.journal import RolloutJournal
from luffy.training.learner import TrainerSpec

ROWS = 8
LR = 1e-6
END = 1
"""Token id of the end of sequence; 0 is padding."""


class Size(NamedTuple):
    """A model and its rollouts. The vocabulary decides how early a random model ends its responses."""

    shape: tuple[int, int, int, int, int, int]
    """Vocabulary, hidden and intermediate size, layers, heads, heads of keys and values."""
    prompts: int
    prompt_tokens: int
    response_tokens: int
    trl_batches: tuple[int, ...] = ()
    """Values of TRL's `per_device_train_batch_size` to try; the fastest counts."""


SIZES = {
    "14m": Size((512, 384, 1024, 8, 6, 6), 16, 48, 600, (8, 16, 32, 128)),
    "arithmetic": Size((79, 96, 256, 3, 4, 4), 16, 24, 80, (16, 32, 64, 128)),
    "small": Size((79, 96, 256, 3, 4, 4), 2, 24, 40, (8, 16)),
    "0.5B": Size((151_936, 896, 4864, 24, 14, 2), 32, 256, 1024),
    "tiny": Size((512, 64, 128, 2, 2, 1), 2, 16, 24),
}
PROCESSES = 2
"""Of a variant with several."""
OURS = {
    "padded": ExecutionConfig(),
    "packed": ExecutionConfig(packing=True),
    "ranks": ExecutionConfig(packing=True, ranks=PROCESSES, micro_batch_tokens=2048),
}
VLLM = "colocated"
"""Prefix of the variants with vLLM."""
VLLM_SHARE = 0.3
"""Of the GPU's memory, for weights and KV cache of the engine."""
LOCAL = f"{VLLM}-local"
COLOCATED = ExecutionConfig(
    packing=True,
    compile=True,
    zero_stage=1,
    vllm=VLLMConfig(gpu_memory_utilization=VLLM_SHARE),
    ray=RayConfig(placement="colocated"),
)


def tokenizer_of(size: Size) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": END} | {f"w{i}": i for i in range(2, size.shape[0])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def prompts_of(size: Size, steps: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    shape = (size.prompts * steps, size.prompt_tokens)
    return [tuple(row) for row in torch.randint(2, size.shape[0], shape, generator=generator).tolist()]


def save_model(size: Size, folder: Path, dtype: torch.dtype) -> None:
    """Write the model and its tokenizer, unless the folder has them."""
    if (folder / "tokenizer.json").exists():
        return
    torch.manual_seed(0)
    config = qwen2(*size.shape, max_position_embeddings=2048, eos_token_id=END, pad_token_id=0)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)


class Step(NamedTuple):
    """Seconds of the parts, tokens, and distance of the log-probabilities of engine and trainer."""

    generation: float
    weights: float
    """From the trainer to the engine."""
    update: float
    tokens: float
    """Of the responses."""
    gap_mean: float = math.nan
    gap_max: float = math.nan
    cpu: float = math.nan
    """Seconds of all threads of the first process, which other programs on the machine lengthen less."""

    @property
    def seconds(self) -> float:
        return self.generation + self.weights + self.update

    def __str__(self) -> str:
        parts = f"generation {self.generation:.2f} s, weights {self.weights:.2f} s, update {self.update:.2f} s"
        whole = f"{self.seconds:.2f} s in all, {self.cpu:.2f} CPU s"
        speed = f"{self.tokens:,.0f} tokens, {self.tokens / self.seconds:,.0f} a second"
        return f"{parts}; {whole}; {speed}; gap of log-probabilities {self.gap_mean:.5f}, at most {self.gap_max:.4f}"


def say(text: str) -> None:
    """Print `text` with the seconds since this process started."""
    print(f"{time.time() - psutil.Process().create_time():6.1f} s: {text}", flush=True)


def echo(folder: Path) -> None:
    """Print, from a thread, what is appended to the logs of the processes under Ray."""

    def watch() -> None:
        shown: dict[Path, int] = {}
        while True:
            for log in folder.glob("**/logs/*.log"):
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                for line in lines[shown.get(log, 0) :]:
                    say(f"{log.stem}: {line}")
                shown[log] = len(lines)
            time.sleep(0.3)

    threading.Thread(target=watch, daemon=True).start()


def luffy_steps(size: Size, folder: Path, model: Path, steps: int, variant: str) -> Iterator[Step]:
    """Steps of the RL stage's own loop with real grading, by the embedded engine or by vLLM."""
    execution = OURS.get(variant, COLOCATED)
    shared = ("model.dtype=bfloat16", "execution.zero_stage=1")
    given = {VLLM: (*shared, "cluster=ray", "execution.ray.placement=colocated"), LOCAL: (*shared, "rl.engine=vllm")}
    config = load_experiment(
        ROOT / "exp_configs" / "arithmetic.yaml",
        ["chain=rl", "method=dr_grpo", f"rl.steps={steps}", f"rl.prompts_per_step={size.prompts}",
         f"rl.max_response_tokens={size.response_tokens}", "data.max_trace_tokens=8", f"rl.optimizer.lr={LR}",
         *given.get(variant, ())],
    )  # fmt: skip
    settings = settings_in(config, "rl")
    longest = size.prompt_tokens + size.response_tokens
    spec = TrainerSpec(settings, execution, model, folder / "out", longest, pad_id=0)
    tasks = [RolloutTask(str(i), ids, "0", ()) for i, ids in enumerate(prompts_of(size, steps))]
    decode = tokenizer_of(size).decode
    with ExitStack() as stack:
        say("the model lies there; the cluster starts")
        cluster = stack.enter_context(open_cluster(spec))
        say("started")
        grader = stack.enter_context(GraderPool.configured(execution, settings.grading, folder / JUDGE_CACHE))
        params = SamplingParams(1.0, size.response_tokens, (END,))
        collector = GroupCollector(grader, decode, params, settings.objective.group, settings.seed, steps)
        runner = stack.enter_context(StepRunner(settings, cluster, tasks, collector, RolloutJournal(folder / "j")))
        for step in range(1, steps + 1):
            began = time.process_time()
            outcome = runner.run(step)
            cpu = time.process_time() - began
            found = outcome.metrics
            waited, weights = found["perf/trainer_idle_s"], found["perf/weights_s"]
            if "perf/weights_sending_s" in found:
                say(f"step {step}: {found['perf/weights_sending_s']:.2f} s of {weights:.2f} for sending weights")
            tokens = sum(len(row.response_ids) for group in outcome.groups for row in group.trajectories)
            gaps = found["rollout/logp_gap_mean"], found["rollout/logp_gap_max"]
            done = Step(waited - weights, weights, found["perf/step_s"] - waited, tokens, *gaps, cpu)
            say(f"luffy's step {step}: {done}")
            yield done


def trl_steps(size: Size, folder: Path, model: Path, steps: int, variant: str) -> Iterator[Step]:
    """Steps of GRPOTrainer, which generates with transformers' `generate` or with vLLM."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    engine, (batch, *processes) = variant.startswith(VLLM), map(int, variant.removeprefix(f"{VLLM}-").split("x"))
    number, on_gpu = processes[0] if processes else 1, torch.cuda.is_available()
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=LR, max_steps=steps,
        num_generations=ROWS, per_device_train_batch_size=batch,
        gradient_accumulation_steps=size.prompts * ROWS // batch // number, max_completion_length=size.response_tokens,
        loss_type="dr_grpo", scale_rewards="none", beta=0.0, temperature=1.0, use_vllm=engine,
        vllm_max_model_length=size.prompt_tokens + size.response_tokens, vllm_gpu_memory_utilization=VLLM_SHARE,
        vllm_enable_sleep_mode=on_gpu,
    )  # fmt: skip
    texts = [" ".join(f"w{token}" for token in ids) for ids in prompts_of(size, steps)]
    spent: dict[str, float] = defaultdict(float)
    steps_done: list[Step] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.began, self.cpu_began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            wall, drawn, sent = time.perf_counter() - self.began, spent["generation"], spent["weights"]
            metrics = trainer._metrics["train"]
            gaps = (metrics[f"sampling/sampling_logp_difference/{kind}"] for kind in ("mean", "max"))
            found = [gap[-1] if gap else math.nan for gap in gaps]
            cpu = time.process_time() - self.cpu_began
            steps_done.append(Step(drawn - sent, sent, wall - drawn, spent["tokens"] * number, *found, cpu))
            say(f"TRL's step {len(steps_done)}: {steps_done[-1]}")
            spent.clear()

    def length_reward(completions: list[str], **_: object) -> list[float]:
        return [len(text) / 1000 for text in completions]

    def timed(call: Callable[..., object], part: str) -> Callable[..., object]:
        def timing(*given: object, **named: object) -> object:
            began = time.perf_counter()
            found = call(*given, **named)
            spent[part] += time.perf_counter() - began
            if isinstance(found, tuple):
                spent["tokens"] += sum(map(len, found[1]))
            return found

        return timing

    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(model, attn_implementation="sdpa", dtype=torch.float32),
        reward_funcs=length_reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model), callbacks=[Clock()],
    )  # fmt: skip
    trainer._generate = timed(trainer._generate, "generation")
    if engine:
        # vLLM's CPU build repacks its weights, and TRL then cannot replace them.
        sync = trainer.vllm_generation.sync_weights if on_gpu else lambda: None
        trainer.vllm_generation.sync_weights = timed(sync, "weights")
    say("started")
    trainer.train()
    yield from steps_done


def measure(system: str, size: str, steps: int, variant: str, kept: Path | None = None) -> Step:
    """The mean of all steps but the first; each is printed. `kept` is a folder for the model."""
    say("libraries are loaded")
    dtype = torch.bfloat16 if variant.startswith(VLLM) else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model" if kept is None else kept / f"{size}-{dtype}"
        save_model(SIZES[size], model, dtype)
        echo(folder)
        _, *counted = (trl_steps if system == "trl" else luffy_steps)(SIZES[size], folder, model, steps + 1, variant)
    return Step(*map(fmean, zip(*counted, strict=True)))


def main() -> None:
    """Measure each variant of both in a process of its own, which prints its steps and their mean."""
    if sys.argv[1:2] == ["--one"]:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        system, size, steps, variant, *kept = sys.argv[2:]
        print(f"{system} {variant}: {measure(system, size, int(steps), variant, *map(Path, kept))}", flush=True)
        os._exit(0)  # DeepSpeed's group and the graders need no farewell
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed: pip install trl")
    size, steps, threads, *batches = [*sys.argv[1:], *("small", "3", str(torch.get_num_threads()))[len(sys.argv) - 1 :]]
    tried = batches[0].split(",") if batches else map(str, SIZES[size].trl_batches)
    print(", ".join(f"{name} {version(name)}" for name in ("trl", "luffy-rl", "transformers", "torch")))
    print(f"{size}: {SIZES[size]}, mean of {steps} steps after the first, {threads} threads", flush=True)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "WORLD_SIZE": str(PROCESSES)}
    for system, variant in [("trl", batch) for batch in tried] + [("luffy", name) for name in OURS]:
        number = PROCESSES if variant.endswith(f"x{PROCESSES}") else 1  # luffy starts its own further ranks
        shares = number if system == "trl" else OURS[variant].ranks
        command = [sys.executable, __file__, "--one", system, size, steps, variant]
        started = []
        for rank in range(number):
            place = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if number > 1 else {}
            given = os.environ | quiet | place | {"OMP_NUM_THREADS": str(int(threads) // shares)}
            started.append(subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL if rank else None))
        if code := max((process.wait() for process in started), key=abs):
            print(f"{system} {variant}: ended with {code} (-9: killed, for lack of memory, say)", flush=True)


if __name__ == "__main__":
    main()
