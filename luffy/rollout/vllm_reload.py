"""Functions that run in a vLLM (0.32) worker and replace its weights, tensor by tensor.

vLLM's own `reload_weights` only logs missing weights, and does not update a tied output head on CPU.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def begin_reload(worker: "Worker") -> set[str]:
    """Prepare the model to load weights in Hugging Face format; returns the names of its parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = worker.get_model()
    names = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
    return names


def load_tensor(worker: "Worker", name: str, tensor: Tensor) -> set[str]:
    """Load one tensor; returns the parameters of the model that it fills in whole or in part."""
    from vllm.config import set_current_vllm_config

    load = cast(Callable[[list[tuple[str, Tensor]]], set[str]], worker.get_model().load_weights)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        return load([(name, tensor)])


def end_reload(worker: "Worker") -> None:
    """Finish the layers that need all weights, and the output head."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        finalize_layerwise_reload(model, worker.model_config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                # On CPU the head uses a packed copy of its weight. A tied head shares the embedding's tensor, which is
                # new by now, but nothing was loaded into the head itself, so its copy has to be packed again here.
                module.quant_method.process_weights_after_loading(module)
