"""Whether a self-teacher's divergence falls, where the base policy can read a solution in its prompt.

Run: python tests/benchmarks/self_distillation.py [--steps 20] [--workspace DIR]

The experiment is `arithmetic`, but half of its base's texts that reason in steps have the trace in the prompt, before
the problem, as `rl.teacher.prompt` puts it there. `opsd` and `opsd_jsd` follow from that base. A row is a step.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from measuring import ROOT

from luffy.config import load_experiment
from luffy.data.parquet import write_prompts
from luffy.data.sources import open_source
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.types import Message, Prompt

CHANGES = (
    "seed=1",
    "chain=rl",
    "model.architecture.max_position_embeddings=256",
    "data.max_prompt_tokens=130",
    "stages=[prepare_data, base, rl]",
    'rl.teacher.prompt="{trace} {problem}"',
)
METRICS = {
    "opsd": "actor/distillation_reverse_kl",  # as the sampled tokens estimate it
    "opsd_jsd": "actor/distillation_loss",  # which is the divergence itself
}


def texts() -> Iterator[Prompt]:
    """The base's texts of `arithmetic`, every second one that reasons in steps with its trace in the prompt."""
    config = load_experiment("arithmetic", ["seed=1"])
    assert config.data.corpus is not None
    stepwise = 0
    for prompt in open_source(config.data.corpus, "corpus", config.seed).rows():
        assert isinstance(prompt, Prompt)
        (trace,), (problem,) = prompt.traces, prompt.messages
        stepwise += (in_steps := "\n" in trace.text)
        if in_steps and stepwise % 2:
            prompt = replace(prompt, messages=(Message("user", f"{trace.text} {problem.content}"),))
        yield prompt


def main() -> None:
    """Print one line a method and step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workspace", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = arguments.workspace or Path(folder) / "workspace"
        write_prompts(corpus := Path(folder) / "corpus.parquet", texts())
        print("method\tstep\tdivergence\tcorrect\ttokens")
        for method, divergence in METRICS.items():
            settings = [f"name={method}", f"method={method}", f"rl.steps={arguments.steps}", *CHANGES]
            settings.append(f"data.corpus={{kind: file, path: {corpus}}}")
            command = [sys.executable, "-m", "luffy", "run", "--workspace", str(workspace), "arithmetic", *settings]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            for row in read_metrics(workspace / "runs" / f"{method}-1" / "stages" / "rl" / METRICS_FILE):
                length, correct = row["rollout/response_length_mean"], row["reward/correct_share"]
                print(f"{method}\t{row['step']:.0f}\t{row[divergence]:.4f}\t{correct:.3f}\t{length:.1f}", flush=True)


if __name__ == "__main__":
    main()
