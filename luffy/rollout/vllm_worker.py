"""What replaces the weights, or the LoRA adapter, of vLLM's (0.32) workers.

Weights go tensor by tensor, since vLLM's own `reload_weights` only logs missing weights, and does not update a tied
output head on CPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, LuffyError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

_Result = TypeVar("_Result")


class WeightUpdate:
    """Replaces all weights of an engine, which takes no step until `finish`."""

    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm
        self._missing = set(on_worker(llm, begin_reload))

    def load(self, name: str, tensor: Tensor) -> None:
        """Load a tensor on any device, under its Hugging Face name; it is released once its layer is complete."""
        self._missing -= on_worker(self._llm, load_tensor, name, tensor)

    def finish(self) -> None:
        """Complete the model. Raises LuffyError when some of its weights are missing."""
        on_worker(self._llm, end_reload)
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise LuffyError(f"weights were not sent: {names} ({len(self._missing)} in all)")


def on_worker(llm: "LLMEngine", function: Callable[..., _Result], *arguments: object) -> _Result:
    """The result of `function(worker, *arguments)`, which is the same on every rank of the engine."""
    return llm.collective_rpc(function, args=arguments)[0]


_ADAPTER = 1
"""vLLM's number of the adapter; 0 is none."""
_REMEDY = "give other model.lora.targets, or set execution.vllm.adapter: merged"


class AdapterUpdate:
    """Replaces the LoRA adapter of an engine, which takes no step until `finish`."""

    def __init__(self, llm: "LLMEngine", config: LoRAConfig) -> None:
        self._llm, self._config = llm, config
        self._factors: dict[str, Tensor] = {}

    def load(self, name: str, tensor: Tensor) -> None:
        """Take a factor on any device, under its name in a folder of peft."""
        self._factors[name] = tensor

    def finish(self) -> "LoRARequest":
        """What requests name to be answered with the adapter.

        Raises ConfigError where vLLM cannot apply all of it, LuffyError where it has none.
        """
        from vllm.lora.request import LoRARequest

        factors = {name: tensor.cpu().contiguous() for name, tensor in self._factors.items()}
        config = {"r": self._config.rank, "lora_alpha": self._config.alpha, "target_modules": "all-linear"}
        with TemporaryDirectory(prefix="luffy-adapter-") as folder:  # vLLM takes adapters from folders alone
            save_file(factors, f"{folder}/adapter_model.safetensors")
            Path(folder, "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            try:
                self._llm.add_lora(LoRARequest("policy", _ADAPTER, folder, load_inplace=True))
            except ValueError as error:
                raise ConfigError(f"model.lora: vLLM refuses the adapter: {error}; {_REMEDY}") from error
        if _ADAPTER not in self._llm.list_loras():
            raise LuffyError("vLLM has no adapter after its update")
        if unused := on_worker(self._llm, unapplied):
            raise ConfigError(f"model.lora: vLLM has no adapter at {unused[0]} ({len(unused)} in all); {_REMEDY}")
        return LoRARequest("policy", _ADAPTER, folder)


def is_batch_invariant(worker: "Worker") -> bool:
    """Whether the worker's kernels are those that do not depend on the batch; private API of vLLM.

    Some modules decide when they are imported, and without a word.
    """
    from vllm.model_executor.determinism import batch_invariant
    from vllm.v1.attention.ops import triton_unified_attention

    return bool(batch_invariant._batch_invariant_MODE and triton_unified_attention.is_batch_invariant)


def unapplied(worker: "Worker") -> list[str]:
    """Layers of the adapter that the worker's model does not apply, which vLLM leaves unsaid; private API of vLLM."""
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter = manager.get_adapter(_ADAPTER)
    assert adapter is not None
    return sorted(set(adapter.loras) - set(manager.modules))


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
