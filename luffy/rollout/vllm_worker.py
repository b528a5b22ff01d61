"""What replaces the weights of vLLM's (0.32) workers.

Tensor by tensor, since vLLM's own `reload_weights` only logs missing weights, and does not update a tied output head on
CPU.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from luffy.errors import LuffyError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

_Result = TypeVar("_Result")


class WeightUpdate:
    """Replaces all weights of an engine, which takes no step until `finish`."""

    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm
        self._missing = set(self._on_worker(begin_reload))

    def load(self, name: str, tensor: Tensor) -> None:
        """Load a tensor on any device, under its Hugging Face name; it is released once its layer is complete."""
        self._missing -= self._on_worker(load_tensor, name, tensor)

    def finish(self) -> None:
        """Complete the model. Raises LuffyError when some of its weights are missing."""
        self._on_worker(end_reload)
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise LuffyError(f"weights were not sent: {names} ({len(self._missing)} in all)")

    def _on_worker(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """The result of `function(worker, *arguments)`, which is the same on every rank of the engine."""
        return self._llm.collective_rpc(function, args=arguments)[0]


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
