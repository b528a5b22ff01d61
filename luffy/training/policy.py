"""The policy in training: a DeepSpeed engine that updates on whole batches and reports what happened.

Shape legend: `K` objective terms, `B` rows, `T` tokens.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.config.objective import TermConfig
from luffy.config.training import OptimizerConfig
from luffy.errors import ConfigError, DataError, NumericalError
from luffy.objectives.losses import TokenBatch
from luffy.objectives.normalisation import token_weights
from luffy.objectives.objective import needs_entropy_gradient, objective_loss
from luffy.training.batching import MicroBatch, split_into_micro_batches, weightless
from luffy.training.deepspeed_engine import start_engine
from luffy.training.distributed import device, max_over_ranks, sum_over_ranks
from luffy.training.policy_model import PolicyModel, refuse_processed_logits
from luffy.training.update_metrics import UpdateMetrics
from luffy.types import TrainBatch


def load_causal_lm(folder: Path | str, dtype: DType) -> PreTrainedModel:
    """The model in a Hugging Face folder (or hub id), without its `generation_config`'s sampling habits."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")


class Policy:
    """A causal language model that learns from `TrainBatch`es by a list of objective terms.

    Its logits are divided by `temperature`, that of the rollouts, so that its log-probabilities are those of the
    distribution that was sampled from.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        optimizer: OptimizerConfig,
        execution: ExecutionConfig,
        dtype: DType,
        temperature: float = 1.0,
    ) -> None:
        if execution.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        causal_lm.train()
        causal_lm.to(device())  # type: ignore[arg-type]
        refuse_processed_logits(causal_lm)
        model = PolicyModel(causal_lm, temperature, execution.logprob_chunk_tokens)
        self.engine = start_engine(model, optimizer, execution, dtype)
        self._execution = execution
        self._optimizer = optimizer
        self._grad_norm = math.nan
        if execution.zero_stage == 0:
            self.engine.optimizer.register_step_pre_hook(self._clip_before_step)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The same weights under the names of the model folder."""
        return self.engine.module.causal_lm

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens under the present weights, 0 elsewhere."""
        logp_BT = torch.zeros(batch.input_ids_BT.shape)
        width = batch.input_ids_BT.shape[1]
        # Each token's place in the batch, from 1, travels where its weight would.
        place_1BT = torch.arange(1, len(batch) * width + 1).view(1, len(batch), width)
        for micro in self._micro_batches(batch, place_1BT):
            micro_logp_BT, _ = self._forward(micro, entropy_gradient=False)
            mask_BT = micro.batch.response_mask_BT & (micro.weight_KBT[0] > 0)
            logp_BT.view(-1)[micro.weight_KBT[0][mask_BT] - 1] = micro_logp_BT.cpu()[mask_BT]
        return logp_BT

    def update(
        self, batch: TrainBatch, terms: Sequence[TermConfig], max_response_tokens: int, lr: float
    ) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch; returns the step's metrics (`actor/...`).

        Raises NumericalError when the loss or the gradient is not finite; the weights are then unchanged.
        """
        metrics = self.accumulate(batch, terms, max_response_tokens)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        norm = self._last_grad_norm()
        _check_finite("gradient norm", norm)  # ZeRO 1 to 3 skip such a step without a word
        return metrics | {"actor/grad_norm": norm, "actor/lr": lr}

    def accumulate(self, batch: TrainBatch, terms: Sequence[TermConfig], max_response_tokens: int) -> dict[str, float]:
        """Add the gradient of a batch to the engine without stepping; returns the batch's metrics."""
        weight_KBT = token_weights(terms, batch, max_response_tokens, sum_over_ranks)
        entropy_gradient = needs_entropy_gradient(terms)
        metrics = UpdateMetrics(terms)
        for micro in self._micro_batches(batch, weight_KBT):
            logp_BT, entropy_BT = self._forward(micro, entropy_gradient)
            tokens = _token_batch(micro, logp_BT, entropy_BT)
            output = objective_loss(terms, tokens, micro.weight_KBT.to(logp_BT.device))
            # DeepSpeed averages gradients over ranks; the weights already divide by the total over all of them.
            self.engine.backward(output.loss * self.engine.world_size)
            if micro.weight_KBT.any():
                metrics.add(micro.batch, tokens, output)
        summary = metrics.summary(sum_over_ranks)
        _check_finite("loss", summary["actor/loss"])
        return summary

    @contextmanager
    def inference_model(self) -> Iterator[PreTrainedModel]:
        """The whole model for generation, its weights gathered while the context lasts (ZeRO 3 shards them)."""
        if self._execution.zero_stage == 3 and self.causal_lm.config.tie_word_embeddings:
            # The hook of the input embedding shards the shared weight again before the output embedding reads it.
            raise ConfigError("execution.zero_stage: 3 cannot generate with a model of tied embeddings; use 1 or 2")
        parameters = list(self.causal_lm.parameters()) if self._execution.zero_stage == 3 else []
        self.causal_lm.eval()
        with deepspeed.zero.GatheredParameters(parameters, enabled=bool(parameters)):
            yield self.causal_lm
        self.causal_lm.train()

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model folder (safetensors), parameter by parameter under ZeRO 3."""
        state = {}
        for name, parameter in self.causal_lm.named_parameters():
            sharded = self._execution.zero_stage == 3
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                state[name] = parameter.detach().cpu().clone()
        state |= {name: buffer.detach().cpu().clone() for name, buffer in self.causal_lm.named_buffers()}
        if self.engine.global_rank == 0:
            persistent = self.causal_lm.state_dict().keys()
            self.causal_lm.save_pretrained(folder, state_dict={k: v for k, v in state.items() if k in persistent})

    def _micro_batches(self, batch: TrainBatch, weight_KBT: Tensor) -> list[MicroBatch]:
        execution = self._execution
        micros = split_into_micro_batches(batch, weight_KBT, execution.micro_batch_tokens, execution.packing)
        # Every rank makes the same number of collective calls, however its rows were cut.
        missing = max_over_ranks(len(micros)) - len(micros)
        return micros + [weightless(micros[0])] * missing

    def _forward(self, micro: MicroBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        where = device()
        mask_BT = None if micro.packed else micro.batch.attention_mask_BT.to(where)
        return self.engine(
            micro.batch.input_ids_BT.to(where),
            mask_BT,
            micro.position_ids_BT.to(where),
            micro.batch.response_mask_BT.to(where),
            entropy_gradient,
        )

    def _clip_before_step(self, *_: object) -> None:
        parameters = self.engine.module.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._optimizer.max_grad_norm, error_if_nonfinite=False)
        self._grad_norm = float(norm)
        _check_finite("gradient norm", self._grad_norm)

    def _last_grad_norm(self) -> float:
        """Norm before clipping, over all ranks."""
        if self._execution.zero_stage == 0:
            return self._grad_norm
        return float(self.engine.get_global_grad_norm())


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise NumericalError(f"the {name} is {value}; lower the learning rate or check the data")


def _token_batch(micro: MicroBatch, logp_BT: Tensor, entropy_BT: Tensor) -> TokenBatch:
    where = logp_BT.device
    logp_old_BT = micro.batch.logp_old_BT.to(where)
    return TokenBatch(
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
        # With one update a phase the weights have not moved since it began: the policy stands in for itself.
        logp_old_BT=torch.where(logp_old_BT.isnan(), logp_BT.detach(), logp_old_BT),
        logp_behavior_BT=micro.batch.logp_behavior_BT.to(where),
        advantage_BT=micro.batch.advantage_BT.to(where),
    )


def check_fits(model: PreTrainedModel, longest: int, what: str) -> None:
    """Raise DataError when `what` of `longest` tokens does not fit the model's positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise DataError(
            f"{what} takes {longest} tokens but the model has {limit} positions: "
            "lower data.max_prompt_tokens / max_response_tokens, or raise the model's max_position_embeddings"
        )
