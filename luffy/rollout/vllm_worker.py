"""What replaces the weights of vLLM's (0.32) workers: in servers, and in the engines of this program.

Tensor by tensor, since vLLM's own `reload_weights` only logs missing weights, and does not update a tied output head on
CPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from luffy.errors import LuffyError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""Entries of a config.json that do not affect the model's outputs."""
_Result = TypeVar("_Result")


class ServerWorker:
    """Methods added to the worker of a server that `ServerEngine` uses.

    `vllm serve --worker-extension-cls luffy.rollout.vllm_worker.ServerWorker` mixes the class into vLLM's own worker,
    and `/collective_rpc` calls its methods by name: strings in, JSON out.
    """

    def luffy_settings(self) -> dict[str, object]:
        """The settings of the server that a rollout engine depends on."""
        config = cast("Worker", self).vllm_config
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "generation_config": config.model_config.generation_config,
            "device": config.device_config.device_type,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        }

    def luffy_difference(self, folder: str) -> str | None:
        """Why the weights of `folder` do not fit the served model; None when they do."""
        from vllm.transformers_utils.config import get_config

        if not (Path(folder) / "config.json").is_file():
            return f"the server sees no model folder at {folder}; it must be mounted there under the same path"
        served = cast("Worker", self).model_config.hf_config.to_dict()
        asked = get_config(folder, trust_remote_code=False).to_dict()
        for name in sorted((served.keys() | asked.keys()) - NOT_COMPARED):
            if served.get(name) != asked.get(name):
                return (
                    f"the server was started with another model: its {name} is {served.get(name)}, that of {folder} "
                    f"is {asked.get(name)}"
                )
        return None

    def luffy_load(self, folder: str) -> list[str]:
        """Replace the weights with those of `folder`; returns the parameters that were missing."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        worker = cast("Worker", self)
        files = sorted(str(file) for file in Path(folder).glob("*.safetensors"))
        missing = begin_reload(worker)
        for name, tensor in safetensors_weights_iterator(files, use_tqdm_on_load=False):
            missing -= load_tensor(worker, name, tensor)
        end_reload(worker)
        return sorted(missing)


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
