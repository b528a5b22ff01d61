"""Worker extension for the vLLM (0.32) servers that `ServerEngine` uses.

`vllm serve --worker-extension-cls luffy.rollout.vllm_worker.ServerWorker` mixes the class into vLLM's own worker, and
`/collective_rpc` calls its methods by name: strings in, JSON out.
"""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from luffy.rollout.vllm_reload import begin_reload, end_reload, load_tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""Entries of a config.json that do not affect the model's outputs."""


class ServerWorker:
    """Methods added to vLLM's worker."""

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
        for name in sorted((served.keys() | asked.keys()) - _NOT_COMPARED):
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
