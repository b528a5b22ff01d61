"""vLLM in the process of a stage: a new engine, or that of the stage before with other weights.

Starting one takes seconds on a CPU, and on a GPU a minute or more. A process that runs several stages
(`luffy.stages.engine_host`) calls `keep_engine` once, and its engine then outlives the stages: closed, it waits, on a
GPU asleep, and `open_vllm` gives it the weights of the next model. A response depends on nothing that it did before
(`VLLMEngine`). One with an adapter ends with its stage.
"""

import gc
import hashlib
import logging
import time
from pathlib import Path

import torch

from luffy.config.execution import VLLMConfig
from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, LostError
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.rollout.vllm_limits import check_layout, context_length, read_shape

logger = logging.getLogger(__name__)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""Entries of a config.json that do not affect the model's outputs."""
_keeps = False
_kept: tuple[VLLMEngine, object, bool] | None = None
"""The engine of this process, what it was made from, and whether it is without compilation."""
_is_first = True
"""Whether no engine has started in this process yet."""


def keep_engine() -> None:
    """From now on engines of this process are kept for its next stage."""
    global _keeps
    _keeps = True


def open_vllm(
    folder: Path,
    config: VLLMConfig,
    dtype: str,
    *,
    longest: int,
    reads_text: bool,
    shares_gpu: bool = False,
    adapter: LoRAConfig | None = None,
) -> VLLMEngine:
    """An engine on a model folder, for prompts with responses of at most `longest` tokens; the caller closes it.

    `reads_text`: for `SamplingParams.stop`. `shares_gpu`: it has to be able to sleep, on a GPU. `adapter`: what updates
    bring in place of weights.

    Raises what `VLLMEngine.from_folder` raises.
    """
    global _is_first, _kept
    shape = read_shape(folder)
    check_layout(folder, shape, config, longest)
    files = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    tokenizer = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    architecture = {name: value for name, value in shape.items() if name not in _NOT_COMPARED}
    made_from = architecture, tokenizer, config.model_copy(update={"enforce_eager": None}), dtype, adapter
    is_eager = bool(config.enforce_eager) or not torch.cuda.is_available()
    if _kept is not None:
        engine, of_engine, kept_is_eager = _kept
        # One that has been compiled also serves work that would not have paid for it.
        if of_engine == made_from and engine.max_model_len >= longest and (is_eager or not kept_is_eager):
            engine.take_over(folder)
            logger.info("vLLM engine kept: weights of %s", "/".join(folder.parts[-3:]))
            return engine
        _kept = None
        engine.shut_down()
        del engine
    is_first, _is_first = _is_first, False
    if not is_first:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    began = time.monotonic()
    try:
        engine = VLLMEngine.from_folder(
            folder,
            config,
            dtype,
            max_model_len=max(longest, min(config.context_tokens or longest, context_length(shape) or longest)),
            sleep_mode=torch.cuda.is_available() and (shares_gpu or _keeps),
            reads_text=reads_text or _keeps,
            is_kept=_keeps and adapter is None,
            adapter=adapter,
        )
    except ConfigError as error:
        if is_first or not torch.cuda.is_available():
            raise
        raise LostError(f"no second vLLM engine starts in this process ({error}); another process tries") from error
    if _keeps and adapter is None:
        _kept = engine, made_from, is_eager
    logger.info("vLLM engine started in %.0f s", time.monotonic() - began)
    return engine
