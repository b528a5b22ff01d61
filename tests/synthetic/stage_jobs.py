"""The order of a stage program, on inputs that look finished, and a tiny model that vLLM can run on a CPU."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.settings import StageSettings
from luffy.pipeline.job import StageJob, write_job
from synthetic.arithmetic import tiny_tokenizer
from synthetic.finished_stages import write_finished


def write_stage_job(
    out: Path, stage: str, settings: StageSettings, inputs: dict[str, Path], execution: ExecutionConfig
) -> list[str]:
    """Write the job of a stage that evaluates or measures `sft`; returns the arguments of its program."""
    out.mkdir()
    for name, directory in inputs.items():
        folders = (path.name for path in sorted(directory.iterdir()) if path.is_dir())
        write_finished(directory, "prepare_data" if name == "data" else "sft", name, "cd" * 8, folders)
    job = StageJob(
        node="evaluate_sft" if stage == "evaluate" else stage,
        stage=stage,
        key="ab" * 8,
        settings=settings,
        inputs={name: str(directory) for name, directory in inputs.items()},
        upstream=dict.fromkeys(inputs, "cd" * 8),
        execution=execution,
        tracking=TrackingConfig(),
    )
    write_job(out / "config.yaml", job)
    return ["--config", str(out / "config.yaml"), "--out", str(out)]


def write_wide_model(
    folder: Path, seed: int, tokenizer: PreTrainedTokenizerBase | None = None, context: int = 48
) -> None:
    """Heads of 32 dimensions, the smallest of vLLM's attention on a CPU."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = tokenizer or tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        **shape,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
