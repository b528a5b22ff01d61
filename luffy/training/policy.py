"""Models that give log-probabilities of responses: the policy in training, and frozen ones beside it.

`Policy` is a DeepSpeed engine that updates on whole batches and reports metrics. Frozen models are the reference of KL
terms, which may follow the policy (`MovingReference`), and teachers (`luffy.training.teachers`).

Shape legend: `K` objective terms, `B` rows, `T` tokens, `C` choices of a teacher.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.config.training import MovingReferenceConfig, OptimizerConfig
from luffy.errors import ConfigError, DataError
from luffy.objectives.losses import TokenBatch
from luffy.objectives.objective import objective_loss, token_weights
from luffy.objectives.schedules import StepObjective
from luffy.training.attention import attention_for_generation, compile_layers, set_attention, without_compiled_layers
from luffy.training.deepspeed_engine import ClippedStep, check_finite, is_sharded, start_engine, start_frozen_engine
from luffy.training.fused_head import Entropy
from luffy.training.model_folder import FolderWeight, own_weights, write_model_folder
from luffy.training.policy_model import (
    ADAPTER_FOLDER,
    Adapter,
    PolicyModel,
    micro_batches,
    model_inputs,
    refuse_processed_logits,
    score,
)
from luffy.training.ranks import device, sum_over_ranks, to_device
from luffy.training.update_metrics import ModelFlops, UpdateMetrics
from luffy.types import TrainBatch

_CPU = torch.device("cpu")


class Policy:
    """A causal language model trained on `TrainBatch`es with a list of objective terms.

    Logits are divided by `temperature`, that of the rollouts, so that log-probabilities are those of the sampling
    distribution. Terms that learn from demonstrations use temperature 1. With an `adapter`, which has to be part of
    `causal_lm`, only the adapter is trained.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        optimizer: OptimizerConfig,
        execution: ExecutionConfig,
        dtype: DType,
        temperature: float = 1.0,
        adapter: Adapter | None = None,
    ) -> None:
        if execution.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        causal_lm.train()
        model = PolicyModel(causal_lm, temperature, execution.logprob_chunk_tokens).to(device())
        refuse_processed_logits(causal_lm)
        self.engine = start_engine(model, optimizer, execution, dtype)
        # Tries the decoder, whose weights the engine may have to gather.
        self._execution = compile_layers(causal_lm, set_attention(causal_lm, execution))
        model.head.is_compiled = bool(self._execution.compile)
        self.adapter = adapter
        self._temperature = temperature
        self._step = ClippedStep(self.engine, optimizer)
        self.flops = ModelFlops.of_config(causal_lm.config.to_dict(), adapter.num_parameters if adapter else None)
        """None for a kind of model whose operations are not counted."""

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model with the parameter names of its folder, except in layers with an adapter."""
        return self.engine.module.causal_lm

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens under the current weights, 0 elsewhere."""
        return self._score(batch, "none")

    def choices(self, batch: TrainBatch, top_k: int, entropy: Entropy = "none") -> Tensor:
        """`(S, B, T)` what `LogProbHead.most_probable` returns of the response tokens, 0 elsewhere; the batch's choices
        are the candidates."""

        def forward(micro: TrainBatch) -> Tensor:
            return self._forward(micro, entropy, choice_BTC=candidates(micro), top_k=top_k)

        return score(self.engine.module, forward, batch, self._execution)

    def choose_among(self, vocabulary: int) -> None:
        """Let `choices` take the first `vocabulary` tokens alone, which other models have, too."""
        head = self.engine.module.head
        head.vocabulary = min(vocabulary, head.vocabulary or vocabulary)

    def entropies(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` entropies (nats) at the response tokens, 0 elsewhere; no gradient."""
        return self._score(batch, "value")

    def update(self, batch: TrainBatch, objective: StepObjective, lr: float) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch; returns the step's metrics (`actor/...`).

        Raises NumericalError when the loss or the gradient is not finite; the weights are then unchanged.
        """
        metrics = self.accumulate(batch, objective)
        return metrics | self._step.take(lr, "actor")

    def accumulate(self, batch: TrainBatch, objective: StepObjective) -> dict[str, float]:
        """Add the gradient of a batch to the engine without stepping; returns the batch's metrics."""
        weight_KBT = token_weights(objective, batch, sum_over_ranks)
        entropy: Entropy = "gradient" if any(term.needs_entropy_gradient for term in objective.terms) else "value"
        untempered = self._temperature != 1.0 and any(term.is_untempered for term in objective.terms)
        metrics = UpdateMetrics(objective.terms, objective.teachers)
        for on_cpu, weight_on_cpu in micro_batches(batch, weight_KBT, self._execution):
            micro, micro_weight_KBT = on_cpu.map(to_device), to_device(weight_on_cpu)
            num_choices = micro.logq_BTC.shape[-1]
            choice_BTC = micro.choice_BTC if num_choices else None
            scores_SBT = self._forward(on_cpu, entropy, untempered, choice_BTC)
            scores_SBT, logp_CBT = scores_SBT.split([len(scores_SBT) - num_choices, num_choices])
            (logp_BT, entropy_BT), (untempered_logp_BT, untempered_entropy_BT) = scores_SBT[:2], scores_SBT[-2:]
            tokens = TokenBatch(
                logp_BT=logp_BT,
                entropy_BT=entropy_BT,
                untempered_logp_BT=untempered_logp_BT,
                untempered_entropy_BT=untempered_entropy_BT,
                # With one update a phase the weights have not moved since it began: the policy is its own old policy.
                logp_old_BT=torch.where(micro.logp_old_BT.isnan(), logp_BT.detach(), micro.logp_old_BT),
                logp_behavior_BT=micro.logp_behavior_BT,
                logp_ref_BT=micro.logp_ref_BT,
                logp_teacher_BT=micro.logp_teacher_BT,
                logp_BTC=logp_CBT.permute(1, 2, 0),
                logq_BTC=micro.logq_BTC,
                advantage_BT=micro.advantage_BT,
                sequence_BT=micro.sequence_BT,
                selected_BT=micro.response_mask_BT,
            )
            output = objective_loss(objective.terms, tokens, micro_weight_KBT)
            # DeepSpeed averages gradients over ranks, but the weights are already normalised over all ranks.
            self.engine.backward(output.loss * self.engine.world_size)
            metrics.add(micro, tokens, micro_weight_KBT, output)
        summary = metrics.summary()
        check_finite("loss", summary["actor/loss"])
        return summary

    @contextmanager
    def inference_model(self) -> Iterator[PreTrainedModel]:
        """The whole model for generation; weights sharded by ZeRO 3 are gathered for the length of the context."""
        if self._execution.zero_stage == 3 and self.causal_lm.config.tie_word_embeddings:
            # The input embedding's hook partitions the shared weight again before the output embedding reads it.
            raise ConfigError("execution.zero_stage: 3 cannot generate with tied embeddings; use 1 or 2")
        parameters = list(self.causal_lm.parameters()) if self._execution.zero_stage == 3 else []
        self.causal_lm.eval()
        gathered = deepspeed.zero.GatheredParameters(parameters, enabled=bool(parameters))
        try:
            with gathered, attention_for_generation(self.causal_lm), without_compiled_layers(self._execution):
                yield self.causal_lm
        finally:
            self.causal_lm.train()

    def weights(self, to: torch.device = _CPU) -> Iterator[tuple[str, Tensor]]:
        """Name in the model folder and a copy on `to` of every weight, one at a time; an adapter is merged into them.

        Under ZeRO 3 each parameter is gathered when it is reached, so that no rank holds more than one full weight.
        Collective: all ranks have to iterate to the end. A tied output head is not included.
        """
        own = own_weights(self.causal_lm) if self.adapter is None else self.adapter.merged_weights()
        return self._copies(own, to)

    def published(self, to: torch.device) -> Iterator[tuple[str, Tensor]]:
        """What a vLLM engine gets, as `weights` gives it: `weights`, or an adapter's factors by their names in peft.

        The factors alone are about a hundredth of a model, and no bit of an update is lost in rounding a merged weight.
        """
        if self.adapter is None or self._execution.vllm.adapter == "merged":
            return self.weights(to)
        return self._copies(self.adapter.factors(), to)

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model folder (safetensors), weight by weight under ZeRO 3.

        An adapter is merged, and also written by itself to `ADAPTER_FOLDER` in the folder.
        """
        factors = {} if self.adapter is None else dict(self._copies(self.adapter.factors(), _CPU))
        if self.engine.global_rank != 0:
            for _ in self.weights():  # only rank 0 holds the whole model in memory
                pass
            return
        write_model_folder(self.causal_lm, dict(self.weights()), folder)
        if self.adapter is not None:
            self.adapter.save(factors, folder / ADAPTER_FOLDER)

    def _copies(self, weights: Iterable[FolderWeight], to: torch.device) -> Iterator[tuple[str, Tensor]]:
        sharded = self._execution.zero_stage == 3
        for weight in weights:
            with deepspeed.zero.GatheredParameters(list(weight.parameters), enabled=sharded):
                copy = weight.value().to(to, copy=True)  # the gathered parameters are freed with the context
            yield weight.name, copy

    def _score(self, batch: TrainBatch, entropy: Entropy) -> Tensor:
        """The last score of the head: the entropy if it is computed, else the log-probability."""
        module = self.engine.module
        return score(module, lambda micro: self._forward(micro, entropy)[-1], batch, self._execution)

    def _forward(
        self,
        micro: TrainBatch,
        entropy: Entropy,
        untempered: bool = False,
        choice_BTC: Tensor | None = None,
        top_k: int | None = None,
    ) -> Tensor:
        found: Tensor = self.engine(*model_inputs(micro, self._execution), entropy, untempered, choice_BTC, top_k)
        return found


def check_fits(model: PreTrainedModel, longest: int, what: str) -> None:
    """Raise DataError when `what`, with `longest` tokens, is longer than the model's context."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise DataError(
            f"{what} takes {longest} tokens but the model has {limit} positions: "
            "lower data.max_prompt_tokens / max_response_tokens, or raise the model's max_position_embeddings"
        )


def candidates(micro: TrainBatch) -> Tensor | None:
    """`(B, T, C)` the tokens that a micro-batch carries as choices, on the device; None without any."""
    return to_device(micro.choice_BTC) if micro.choice_BTC.shape[-1] else None


class UnadaptedPolicy:
    """The policy in training without its adapter: the policy that the stage starts from, without a copy of it."""

    def __init__(self, policy: Policy) -> None:
        assert policy.adapter is not None
        self._policy, self._adapter = policy, policy.adapter

    def logprobs(self, batch: TrainBatch) -> Tensor:
        with self._adapter.disabled():
            return self._policy.logprobs(batch)

    def choices(self, batch: TrainBatch, top_k: int, entropy: Entropy = "none") -> Tensor:
        with self._adapter.disabled():
            return self._policy.choices(batch, top_k, entropy)


class FrozenPolicy:
    """A causal language model that only computes log-probabilities; whole on every rank, or sharded.

    Takes over `causal_lm`: moves it to the device and freezes it. It stays sharded where `load_to_train` has sharded
    it; every call is then a collective one. `temperature` is that of the trained policy, and `vocabulary` the number of
    its tokens, if another model's choices among them are wanted. One that `takes_turns` has its weights on a GPU within
    `on_device` alone, in pinned CPU memory otherwise; a sharded one stays.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        execution: ExecutionConfig,
        temperature: float,
        vocabulary: int | None = None,
        takes_turns: bool = False,
    ) -> None:
        causal_lm.eval()
        causal_lm.requires_grad_(False)
        model = PolicyModel(causal_lm, temperature, execution.logprob_chunk_tokens).to(device())
        model.head.vocabulary = vocabulary
        dtype: DType = "bfloat16" if causal_lm.dtype == torch.bfloat16 else "float32"
        self._run: nn.Module = start_frozen_engine(model, execution, dtype) if is_sharded(causal_lm) else model
        self._model = model
        # Tries the decoder, whose weights the engine may have to gather.
        self._execution = compile_layers(causal_lm, set_attention(causal_lm, execution))
        model.head.is_compiled = bool(self._execution.compile)
        self._kept: dict[Tensor, Tensor] = {}
        """The weights in CPU memory of a model that takes turns."""
        if takes_turns and not is_sharded(causal_lm):
            kept = {weight: weight.data.cpu() for weight in (*model.parameters(), *model.buffers())}
            is_cuda = device().type == "cuda"
            self._kept = {weight: data.pin_memory() for weight, data in kept.items()} if is_cuda else kept
            self._leave()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model with the parameter names of its folder."""
        return self._model.causal_lm

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights are on the device for the length of the context. They never change, so leaving copies nothing."""
        for weight, kept in self._kept.items():
            weight.data = kept.to(device(), non_blocking=True)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for weight, kept in self._kept.items():
            weight.data = kept

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return score(self._model, lambda micro: self._forward(micro)[0], batch, self._execution)

    def choices(self, batch: TrainBatch, top_k: int, entropy: Entropy = "none") -> Tensor:
        """As `Policy.choices`."""
        return score(self._model, lambda micro: self._forward(micro, entropy, top_k), batch, self._execution)

    def _forward(self, micro: TrainBatch, entropy: Entropy = "none", top_k: int | None = None) -> Tensor:
        choice_BTC = None if top_k is None else candidates(micro)
        inputs = model_inputs(micro, self._execution)
        found: Tensor = self._run(*inputs, entropy=entropy, choice_BTC=choice_BTC, top_k=top_k)
        return found


class MovingReference:
    """A frozen copy of the policy that is refreshed after every `refresh_every`-th RL step.

    Whole on each rank at any ZeRO stage, as the frozen policy that it takes over has to be. An average is kept in
    float32, in CPU memory: in bfloat16 a small share of the policy would be rounded away.
    """

    def __init__(self, policy: Policy, initial: FrozenPolicy, config: MovingReferenceConfig) -> None:
        assert policy.adapter is None
        self._policy, self._reference, self._config = policy, initial, config
        self._parameters = {name: parameter.detach() for name, parameter in initial.causal_lm.named_parameters()}
        self._averages = {} if config.mixup == 1 else {n: p.float().cpu().clone() for n, p in self._parameters.items()}

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return self._reference.logprobs(batch)

    def choices(self, batch: TrainBatch, top_k: int, entropy: Entropy = "none") -> Tensor:
        return self._reference.choices(batch, top_k, entropy)

    def follow(self, step: int) -> None:
        """Refresh the reference if RL step `step`, whose updates are done, is one after which it is due.

        A collective call: under ZeRO 3 the policy's weights are gathered one by one.
        """
        if step % self._config.refresh_every:
            return
        share = self._config.mixup
        for name, weight in self._policy.weights():
            if self._averages:
                weight = self._averages[name].mul_(1 - share).add_(weight.float(), alpha=share)
            self._parameters[name].copy_(weight)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds: tensors that it may also be read into; call `publish` after that."""
        return self._averages or self._parameters

    def publish(self) -> None:
        """Give the model the averages that were read from a checkpoint."""
        with torch.no_grad():
            for name, average in self._averages.items():
                self._parameters[name].copy_(average)


ReferencePolicy = UnadaptedPolicy | FrozenPolicy | MovingReference
"""A policy that terms compare with; `logprobs` are `(B, T)`, 0 at tokens that are no response."""
