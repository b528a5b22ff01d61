"""Replacing the weights of a vLLM (0.32) worker, tensor by tensor: what runs in the worker itself.

vLLM's own `reload_weights` only logs what was missing, and leaves a tied output head on CPU as it was.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def begin_reload(worker: "Worker") -> set[str]:
    """Make the model ready for weights in Hugging Face's format; returns the names of its own parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = worker.get_model()
    names = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
    return names


def load_tensor(worker: "Worker", name: str, tensor: Tensor) -> set[str]:
    """Load one tensor; returns the parameters of the model that it is a part of."""
    from vllm.config import set_current_vllm_config

    load = cast(Callable[[list[tuple[str, Tensor]]], set[str]], worker.get_model().load_weights)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        return load([(name, tensor)])


def end_reload(worker: "Worker") -> None:
    """Finish the layers that wait for all others, and the output head."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        finalize_layerwise_reload(model, worker.model_config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                # On CPU the head multiplies by a packed copy of its weight. A tied head shares the embedding's tensor,
                # which is new by now, but nothing was loaded into the head itself, so that no one packed it again.
                module.quant_method.process_weights_after_loading(module)
