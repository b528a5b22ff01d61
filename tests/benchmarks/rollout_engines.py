"""Tokens a second of the embedded engine and of vLLM, the same requests on the same model in turn.

Run: python tests/benchmarks/rollout_engines.py [rows] [tokens] [model folder]

The model is a small one with random weights unless a folder is given. Each engine decodes all rows three times; the
table shows the fastest round. vLLM's start is not counted but told.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from measuring import fastest, show
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import VLLMConfig
from luffy.rollout.engine import RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine

CONFIG = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip


def requests(rows: int) -> list[RolloutRequest]:
    """Eight rows a prompt, prompts of 16 to 80 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(
            torch.randint(4, 1024, (int(torch.randint(16, 80, (), generator=generator)),), generator=generator).tolist()
        )
        for _ in range(rows // 8)
    ]
    return [RolloutRequest(prompt, seed) for seed, prompt in enumerate(p for p in prompts for _ in range(8))]


def random_model(folder: Path) -> Path:
    """A small model in `folder`."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(folder)
    return folder


def main() -> None:
    """Print one line an engine."""
    rows, tokens = (int(argument) for argument in (sys.argv[1:] + ["64", "64"][len(sys.argv) - 1 :])[:2])
    given = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    asked, params = requests(rows), SamplingParams(1.0, tokens, stop_token_ids=())
    with tempfile.TemporaryDirectory() as name:
        folder = given or random_model(Path(name))
        began = time.perf_counter()
        vllm = VLLMEngine.from_folder(folder, VLLMConfig(), "float32", max_model_len=80 + tokens)
        started = time.perf_counter() - began
        engines: dict[str, RolloutEngine] = {
            "transformers": TransformersEngine.from_folder(folder, "float32", batch_size=256),
            "vllm": vllm,
        }
        drawn: dict[str, int] = {}

        def decode(label: str) -> None:
            completions = engines[label].generate(asked, params)
            drawn[label] = sum(len(completion.token_ids) for completion in completions)

        seconds = fastest({label: partial(decode, label) for label in engines})
        vllm.close()
    rows = [(label, f"{drawn[label] / took:,.0f}") for label, took in seconds.items()]
    show(("engine", "tokens/s"), rows, f"{len(asked)} x {tokens} tokens")
    print(f"vLLM started in {started:.1f} s; {torch.get_num_threads()} threads each")


if __name__ == "__main__":
    main()
