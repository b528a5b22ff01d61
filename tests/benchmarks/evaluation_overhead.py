"""What the stage `evaluate` costs beside the engine's start, generation and grading: 6,023 short responses by vLLM.

Run: python tests/benchmarks/evaluation_overhead.py [tokens a response] [layers]

Six suites of the sizes of LUFFY's evaluation file (30, 30 and 83 problems with 32 responses; 500, 272, 675 with one),
with generated problems, a small untrained model and no end-of-sequence, so that every response has its full length. The
stage runs as it does in a chain, reading prepared data and writing all of its results. What is left when the union of
the times of start, generation and grading is taken from the wall time is its own: prompts, records, files, statistics.
Python's start and its imports (torch, transformers) come before and are told apart.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_BEGAN = time.time()

import torch  # noqa: E402 - its import is part of what is measured
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig  # noqa: E402
from luffy.config.execution import ExecutionConfig, TrackingConfig, VLLMConfig  # noqa: E402
from luffy.config.grading import GradingConfig  # noqa: E402
from luffy.config.settings import EvaluateSettings  # noqa: E402
from luffy.data.parquet import write_prompts  # noqa: E402
from luffy.data.tokenizer import build_tokenizer  # noqa: E402
from luffy.grading.pool import GraderPool  # noqa: E402
from luffy.pipeline.machine.events import EventWriter  # noqa: E402  # noqa: E402
from luffy.rollout.vllm_engine import VLLMEngine  # noqa: E402
from luffy.stages.evaluate import run  # noqa: E402
from luffy.stages.program import StageContext  # noqa: E402
from luffy.types import Message, Prompt  # noqa: E402

IMPORTED = time.time()
SUITES = {"aime24": (30, 32), "aime25": (30, 32), "amc": (83, 32), "math500": (500, 1), "minerva": (272, 1),
          "olympiad": (675, 1)}  # fmt: skip
"""Problems, and responses to each."""
Interval = tuple[float, float]


def timed(what: Callable[..., object], intervals: list[Interval]) -> Callable[..., object]:
    """`what`, each call of it added_to into `intervals`."""

    def call(*arguments: object, **named: object) -> object:
        began = time.perf_counter()
        try:
            return what(*arguments, **named)
        finally:
            intervals.append((began, time.perf_counter()))

    return call


def covered(intervals: list[Interval]) -> float:
    """Seconds of their union."""
    total, end = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def prepare(folder: Path, layers: int) -> dict[str, Path]:
    """Prepared suites, and a model whose tokenizer they have made."""
    (folder / "data" / "suites").mkdir(parents=True)
    prompts = {
        name: [
            Prompt(
                f"{name}-{i}",
                name,
                (Message("user", f"A farmer has {i} geese and buys {i % 7 + 2} more. How many has she now? " * 2),),
                str(i + i % 7 + 2),
                extra_info={"subject": f"subject {i % 5}", "level": i % 3},
            )
            for i in range(count)
        ]
        for name, (count, _) in SUITES.items()
    }
    for name, rows in prompts.items():
        write_prompts(folder / "data" / "suites" / f"{name}.parquet", rows)
    card = {"sources": {f"suites.{name}": {} for name in SUITES}}
    (folder / "data" / "card.json").write_text(json.dumps(card), encoding="utf-8")
    tokenizer = build_tokenizer([prompt.messages[0].content for rows in prompts.values() for prompt in rows])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "base" / "model")
    tokenizer.save_pretrained(folder / "base" / "model")
    return {"data": folder / "data", "model": folder / "base"}


def main() -> None:
    """Print one line a part."""
    tokens, layers = (int(argument) for argument in (sys.argv[1:] + ["64", "4"][len(sys.argv) - 1 :])[:2])
    settings = EvaluateSettings(
        seed=0,
        dtype="float32",
        evaluation=EvaluationConfig(
            decodings={"sampled": DecodingConfig(temperature=0.6)},
            max_response_tokens=tokens,
            engine="vllm",
            suites={name: SuiteConfig(num_samples=samples) for name, (_, samples) in SUITES.items() if samples > 1},
        ),
        grading=GradingConfig(),
    )
    execution = ExecutionConfig(vllm=VLLMConfig(cpu_kv_cache_gb=1.0, max_num_seqs=256))
    parts: dict[str, list[Interval]] = {"engine start": [], "generation": [], "grading": []}
    VLLMEngine.from_folder = timed(VLLMEngine.from_folder, parts["engine start"])  # type: ignore[method-assign,assignment]
    VLLMEngine.generate = timed(VLLMEngine.generate, parts["generation"])  # type: ignore[method-assign,assignment]
    GraderPool.grade = timed(GraderPool.grade, parts["grading"])  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as name:
        inputs, out = prepare(Path(name), layers), Path(name) / "out"
        out.mkdir()
        events = EventWriter(out / "events.jsonl")
        began = time.perf_counter()
        run(settings, StageContext(out, inputs, "key", "evaluate_base", execution, TrackingConfig(), events))
        wall = time.perf_counter() - began
        written = sum(path.stat().st_size for path in out.glob("*.*"))
    report(parts, wall, tokens, written)


def report(parts: dict[str, list[Interval]], wall: float, tokens: int, written: int) -> None:
    """Print what was measured."""
    own, imports = wall - covered([interval for part in parts.values() for interval in part]), IMPORTED - _BEGAN
    rows = sum(count * samples for count, samples in SUITES.values())
    table = Table("part", "s", "share of the stage", title=f"{rows:,} responses of {tokens} tokens, {written:,} bytes")
    for name, intervals in parts.items():
        table.add_row(name, f"{covered(intervals):.2f}", f"{covered(intervals) / wall:.1%}")
    table.add_row("everything else", f"{own:.2f}", f"{own / wall:.1%}")
    table.add_row("the stage", f"{wall:.2f}", "")
    table.add_row("imports before it", f"{imports:.2f}", f"{imports / (wall + imports):.1%} of both")
    Console().print(table)


if __name__ == "__main__":
    main()
