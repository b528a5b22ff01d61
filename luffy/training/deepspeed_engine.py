"""DeepSpeed engines: their configuration, optimizer and workarounds, and the loading of models that they train.

Under ZeRO 3 the model is built in `deepspeed.zero.Init`, which shards the parameters of each module as soon as the
module exists. Each rank then reads its own shares from the memory-mapped safetensors files. A rank's peak memory is its
share and the parameters of the largest module.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.config.training import OptimizerConfig
from luffy.errors import NumericalError
from luffy.training.fused_head import LogProbHead
from luffy.training.model_folder import StoredWeights, empty_model, load_causal_lm
from luffy.training.ranks import init_deepspeed_comm, init_process_group

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# Its optimizer for bfloat16 prints ten lines of memory use into the log of every stage.
bf16_optimizer.see_memory_usage = lambda message, force=False: None


@torch.no_grad()
def _add_to_sum(
    optimizer: bf16_optimizer.BF16_Optimizer, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool
) -> None:
    """As DeepSpeed's, but bfloat16 is added to float32 as it is, not through a copy of the gradient in float32."""
    if parameter.grad is not None:
        total: Tensor = optimizer.fp32_groups_gradients[group][index]
        total.add_(parameter.grad.view_as(total))
        vars(parameter)["_hp_grad"] = total
        optimizer.fp32_groups_has_gradients[group][index] = True


bf16_optimizer.BF16_Optimizer._update_hp_grad = _add_to_sum
_REDUCE_BUCKET = 500_000_000
"""Elements per gradient all-reduce: DeepSpeed's default."""
_NOTHING: Mapping[str, object] = {}


def deepspeed_config(
    optimizer: OptimizerConfig, execution: ExecutionConfig, dtype: DType, num_trained: int
) -> dict[str, object]:
    """DeepSpeed's configuration for a model with `num_trained` trained parameters; gradients accumulate until `step()`.

    DeepSpeed's managed accumulation divides by a fixed number of micro-batches. Here that number varies with the
    sequence lengths, and the loss is already normalised over the whole step.
    """
    # The engine allocates a buffer of this size, however little is trained.
    further: dict[str, object] = {"reduce_bucket_size": min(_REDUCE_BUCKET, num_trained)}
    if execution.offload_optimizer:
        further["offload_optimizer"] = {"device": "cpu"}
    return {
        **_basic_config(dtype, execution, further),
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # At stage 0 `ClippedStep` clips, since it also reports the norm.
        "gradient_clipping": optimizer.max_grad_norm if execution.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's CPU Adam would compile C++ on first use.
        "zero_force_ds_cpu_optimizer": False,
        # The default is the model's dtype, and a sum in bfloat16 would depend on the split into micro-batches.
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _basic_config(
    dtype: DType, execution: ExecutionConfig, further: Mapping[str, object] = _NOTHING
) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": execution.zero_stage, "overlap_comm": False, **further},
        # Under ZeRO 1, unless the optimizer is offloaded, a gradient is added to its float32 sum and dropped as soon as
        # it exists: no whole gradient in bfloat16 lies beside the sum, to be zeroed and added to for every micro-batch.
        "bf16": {"enabled": dtype == "bfloat16", "immediate_grad_update": True},
        "steps_per_print": 10**9,
    }


def building_in_shares(dtype: DType, execution: ExecutionConfig) -> deepspeed.zero.Init:
    """A context in which every module that is made has its parameters sharded over the ranks; a collective call."""
    assert execution.zero_stage == 3
    _join()
    # Tensors get the type and the device that they would get without the context.
    return deepspeed.zero.Init(config_dict_or_path=_basic_config(dtype, execution), tensor_overrides=[])


def start_engine(
    model: nn.Module, optimizer: OptimizerConfig, execution: ExecutionConfig, dtype: DType
) -> deepspeed.DeepSpeedEngine:
    """A DeepSpeed engine around `model` with torch's AdamW over its parameters that require a gradient."""
    _join()
    if execution.zero_stage == 3:
        _gather_heads_once(model)
        # Parameters that were added to a sharded model (a critic's head) get the type of its weights here: DeepSpeed
        # casts all parameters of an unsharded model, and none of a model in which some are sharded.
        added = [parameter for parameter in model.parameters() if not hasattr(parameter, "ds_id")]
        for parameter in added if is_sharded(model) else []:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(
        trained,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        eps=optimizer.eps,
        # One kernel for the whole step; offloaded, one pass over CPU memory, in a third of the time. None leaves the
        # choice to torch, which False would not: on CPUs its results stay as they were.
        fused=torch.cuda.is_available() or None,
    )
    # A parameter that is sharded is empty.
    num_trained = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
    config = deepspeed_config(optimizer, execution, dtype, num_trained)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config, dist_init_required=False)
    return engine


def is_sharded(model: nn.Module) -> bool:
    """Whether ZeRO 3 has sharded the parameters of a model that has no engine yet."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def start_frozen_engine(model: nn.Module, execution: ExecutionConfig, dtype: DType) -> deepspeed.DeepSpeedEngine:
    """An engine without an optimizer, which gathers the weights of a sharded `model` module by module."""
    _join()
    _gather_heads_once(model)
    config = _basic_config(dtype, execution)
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    return engine


def _gather_heads_once(model: nn.Module) -> None:
    # The head loops over chunks; as a leaf module its weight is gathered once, however many chunks a rank has.
    # A critic has no such head.
    set_z3_leaf_modules(model, [LogProbHead], raise_if_not_found=False)


class ClippedStep:
    """The optimizer step of an engine, with gradient clipping and the norm before it at any ZeRO stage.

    Create it right after the engine: at stage 0, where DeepSpeed reports no norm, it registers a pre-step hook.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, config: OptimizerConfig) -> None:
        self._engine = engine
        self._config = config
        self._grad_norm = math.nan
        self._clips = engine.zero_optimization_stage() == 0
        self._set_aside: list[tuple[torch.nn.Parameter, Tensor]] = []
        adamw = engine.optimizer if self._clips else engine.optimizer.optimizer
        if self._clips:
            adamw.register_step_pre_hook(self._clip)
        if config.skip_grad_norm is not None:
            adamw.register_step_pre_hook(self._set_gradient_aside)
            adamw.register_step_post_hook(self._put_gradient_back)

    def take(self, lr: float, model: str) -> dict[str, float]:
        """Step with the accumulated gradient at learning rate `lr`; returns metrics prefixed with `model`.

        `grad_norm` is the global norm before clipping. `skipped_update` is 1 if it was above `skip_grad_norm`, so that
        weights and moments did not change. Raises NumericalError when the norm is not finite; the weights must not be
        used then.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = self._norm()
        check_finite("gradient norm", norm)  # ZeRO 1 to 3 say nothing of it
        metrics = {f"{model}/grad_norm": norm, f"{model}/lr": lr}
        if self._config.skip_grad_norm is not None:
            metrics[f"{model}/skipped_update"] = float(self._is_too_large())
        return metrics

    def _norm(self) -> float:
        # DeepSpeed's optimizer has the norm once it has clipped, the engine only after the step.
        return self._grad_norm if self._clips else float(self._engine.optimizer._global_grad_norm)

    def _is_too_large(self) -> bool:
        assert self._config.skip_grad_norm is not None
        return self._norm() > self._config.skip_grad_norm

    def _set_gradient_aside(self, adamw: torch.optim.Optimizer, *_: object) -> None:
        """Hide a gradient above `skip_grad_norm`: AdamW does not touch the weights and moments of parameters without a
        gradient."""
        if not self._is_too_large():
            return
        parameters = [parameter for group in adamw.param_groups for parameter in group["params"]]
        self._set_aside = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _gradient in self._set_aside:
            parameter.grad = None

    def _put_gradient_back(self, *_: object) -> None:
        # DeepSpeed's optimizers keep views of the gradient.
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside = []

    def _clip(self, *_: object) -> None:
        parameters = self._engine.module.parameters()
        self._grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        check_finite("gradient norm", self._grad_norm)


def check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise NumericalError(f"the {name} is {value}; lower the learning rate or check the data")


def _join() -> None:
    init_process_group()
    init_deepspeed_comm()


logger = logging.getLogger(__name__)


def load_to_train(folder: Path, dtype: DType, execution: ExecutionConfig) -> PreTrainedModel:
    """The model in a Hugging Face folder; under ZeRO 3 in shares, a collective call.

    A folder whose weights are stored differently from the model's parameters (transformers fuses the experts of some
    MoE models) is loaded whole on every rank. The engine of a trained model then shards it; a frozen one stays whole.
    """
    if execution.zero_stage < 3:
        return load_causal_lm(folder, dtype)
    stored = StoredWeights.of(folder)
    with torch.device("meta"):
        outline = empty_model(folder, dtype)
    if not _has_all(stored, outline):
        logger.warning("%s is loaded whole on every rank: its weights are not stored as the model has them", folder)
        return load_causal_lm(folder, dtype)
    with building_in_shares(dtype, execution), no_init_weights():
        causal_lm = empty_model(folder, dtype)
    causal_lm.tie_weights()
    for name, parameter in causal_lm.named_parameters():
        _fill(parameter, stored.read(name))
    if causal_lm.can_generate() and (folder / GENERATION_CONFIG_NAME).exists():
        causal_lm.generation_config = GenerationConfig.from_pretrained(folder)
    return causal_lm


def _has_all(stored: StoredWeights, outline: PreTrainedModel) -> bool:
    """Whether every parameter is stored under its own name, as it is, and there is nothing else to load."""
    parameters, shapes = dict(outline.named_parameters(remove_duplicate=False)), stored.shapes
    return (
        outline.state_dict().keys() <= parameters.keys()  # no buffer is stored
        and not outline._keep_in_fp32_modules_strict
        and not any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(outline))
        and all(shapes.get(name) == list(weight.shape) for name, weight in outline.named_parameters())
    )


@torch.no_grad()
def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's share of a parameter; DeepSpeed leaves padding after the end of the last one."""
    share: Tensor = vars(parameter)["ds_tensor"]
    mine = whole.view(-1)[dist.get_rank() * share.numel() :][: share.numel()]
    share.narrow(0, 0, mine.numel()).copy_(mine)
