"""Time of an update of an engine's weights (`perf/weights_s`), in each way that `execution.ray.weight_transfer` knows.

Run: python tests/benchmarks/weight_transfer.py [rounds] [size in MB ...]

One rank and one vLLM engine under Ray, on models with random weights in float32. The ways take turns, on the same
cluster; the first update of each, which forms the group, is not counted. The tables show median and fastest round.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch
from measuring import show
from reference.ray_case import CONTEXT, spec_of
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.cluster.ray_cluster import RayCluster
from luffy.config.execution import WeightTransfer

WAYS = get_args(WeightTransfer)
_LAYERS = 8


def model_of(megabytes: int) -> PreTrainedModel:
    """A model whose decoder has about this size; the vocabulary is small."""
    # A layer has 16 h^2 parameters: attention 4 h^2, the MLP 12 h^2.
    width = round((megabytes * 1e6 / 4 / _LAYERS / 16) ** 0.5 / 64) * 64
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=_LAYERS,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, dtype=torch.float32)


def seconds(cluster: RayCluster, way: WeightTransfer, version: int) -> float:
    """Time of one `publish`, as a step logs it."""
    cluster._way = way
    began = time.perf_counter()
    cluster.publish(version)
    return time.perf_counter() - began


def measure(megabytes: int, rounds: int) -> tuple[float, dict[str, list[float]]]:
    """The size of the weights in MB, and the times of each way."""
    model = model_of(megabytes)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    with tempfile.TemporaryDirectory() as name:
        spec = spec_of(Path(name), model, zero_stage=0, placement="colocated")
        with RayCluster(spec) as cluster:
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):
                for turn, way in enumerate(WAYS):
                    times[way].append(seconds(cluster, way, 1 + len(WAYS) * number + turn))
    return size, {way: found[1:] for way, found in times.items()}


def main() -> None:
    """Print one table a model, as soon as it is measured."""
    rounds, *sizes = [int(argument) for argument in sys.argv[1:]] or [5]
    for megabytes in sizes or [100, 400]:
        size, times = measure(megabytes, rounds)
        rows = [(way, f"{statistics.median(found):.2f}", f"{min(found):.2f}") for way, found in times.items()]
        show(("way", "median", "fastest"), rows, f"{size:.0f} MB of weights: seconds of an update of the engine")


if __name__ == "__main__":
    main()
