"""Floating-point operations per second of an update and of rollouts, against plain matrix products of the same shapes.

Run: python tests/benchmarks/update_flops.py [rows] [response tokens] [threads] [--profile]

Counts the matrix products of one policy update and of one call of the embedded engine (14 million parameters, float32),
then runs each distinct product alone in the same process. The quotient of the two times is the share that a pass made
of nothing but matrix products would reach; attention's kernel is in the pass and not among the products. `--profile`
prints torch's table of the most expensive operators.
"""

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.config.training import OptimizerConfig, SFTConfig
from luffy.objectives.schedules import objective_at
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.batching import collate
from luffy.training.policy import Policy
from luffy.training.supervised import demonstration

CONFIG = Qwen2Config(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip
LAYOUTS: dict[str, dict[str, object]] = {
    "update, padded": {},
    "update, packed": {"packing": True},
    "update, packed, 2048 tokens": {"packing": True, "micro_batch_tokens": 2048},
}
PROMPT_TOKENS = 48
OPTIMIZER = OptimizerConfig(lr=1e-6)
Product = tuple[str, tuple[tuple[int, ...], ...]]
"""An operator and the shapes of its arguments."""


class Products(TorchDispatchMode):
    """Counts the matrix products that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Product] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            self.counts[name, tuple(tuple(tensor.shape) for tensor in args[-2:])] += 1
        return func(*args, **(kwargs or {}))


def flops(product: Product) -> int:
    left, right = product[1]
    return 2 * right[-1] * torch.Size(left).numel()


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alone(counts: Counter[Product]) -> float:
    """Seconds of the same products, each shape timed by the faster of two runs."""
    total = 0.0
    for (name, shapes), count in counts.items():
        left, right = (torch.randn(shape) for shape in shapes)
        run = torch.bmm if name == "bmm" else torch.mm
        total += count * min(seconds(lambda: run(left, right)) for _ in range(3))  # noqa: B023 - called at once
    return total


def lengths(rows: int, response_tokens: int) -> list[int]:
    """Responses of uneven lengths up to the limit, as a random model of 512 tokens ends them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(rows).exponential_(1 / CONFIG.vocab_size, generator=generator).ceil().int()
    return drawn.clamp(1, response_tokens).tolist()


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(copy.deepcopy(CONFIG), attn_implementation="sdpa")


def work(rows: int, response_tokens: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    tokens = lengths(rows, response_tokens)
    demonstrations = [demonstration([2] * PROMPT_TOKENS, [3] * length) for length in tokens]
    batch = collate(demonstrations, torch.ones(rows), pad_id=0)
    terms = SFTConfig(epochs=1, batch_size=1, optimizer=OPTIMIZER).objective.terms
    objective = objective_at(terms, 1, 1, response_tokens)
    requests = [RolloutRequest((2,) * PROMPT_TOKENS, seed) for seed in range(rows)]
    engine = TransformersEngine(model().eval(), 256)
    found: dict[str, Callable[[], object]] = {
        "rollouts": lambda: engine.generate(requests, SamplingParams(1.0, response_tokens, (1,)))
    }
    for name, layout in LAYOUTS.items():
        policy = Policy(model(), OPTIMIZER, ExecutionConfig(**layout), "float32")  # type: ignore[arg-type]
        found[name] = lambda policy=policy: policy.update(batch, objective, 1e-6)
    return found


def main() -> None:
    """Print one line for rollouts and for each layout of the update."""
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    rows, response_tokens, threads = (numbers + [32, 300, torch.get_num_threads()][len(numbers) :])[:3]
    torch.set_num_threads(threads)
    table = Table("pass", "seconds", "Gflop/s", "products alone s", "Gflop/s ", "share")
    for name, run in work(rows, response_tokens).items():
        with Products() as products:
            run()
        operations = sum(count * flops(product) for product, count in products.counts.items()) / 1e9
        took, products_took = min(seconds(run) for _ in range(2)), alone(products.counts)
        columns = (f"{took:.2f}", f"{operations / took:.0f}", f"{products_took:.2f}")
        table.add_row(name, *columns, f"{operations / products_took:.0f}", f"{products_took / took:.0%}")
        if "--profile" in sys.argv:
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                run()
            print(name, trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), sep="\n")
    Console().print(table)
    print(
        f"{rows} rows of {PROMPT_TOKENS} + up to {response_tokens} tokens, {threads} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
