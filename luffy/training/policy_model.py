"""Log-probabilities of given tokens under a causal language model, in bounded memory.

`PolicyModel` computes those of a micro-batch, `score` those of a whole batch without gradient.

`Adapter` is LoRA by peft (Hu et al., arXiv 2106.09685, section 4.1), trained while the weights stay frozen. A layer
computes `W x + alpha / rank B A x`; `A` starts random, `B` at zero. Weights leave the trainer merged, `W + alpha / rank
B A`, one at a time and as copies, so that evaluation and the next stage see an ordinary model and the weights in
training never change. vLLM gets the factors of the adapter in training (`Policy.published`).

Shape legend: `K` weights per token, `S` scores of a token, `C` choices of a teacher, `B` rows, `T` tokens, `N` response
tokens of all rows, `H` hidden size, `V` vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import deepspeed
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from luffy.config.execution import ExecutionConfig
from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, DataError
from luffy.model_shape import missing_package
from luffy.training.attention import AttentionInputs, attention_inputs
from luffy.training.batching import dummy_micro_batch, split_into_micro_batches
from luffy.training.fused_head import Entropy, LogProbHead
from luffy.training.model_folder import FolderWeight, own_weight
from luffy.training.ranks import device, max_over_ranks, to_device
from luffy.types import TrainBatch

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as AdaptedLinear


_LARGE_LOGIT = 100.0
"""Large enough for a cap on the logits to have an effect (`refuse_processed_logits`)."""


class PolicyModel(nn.Module):
    """A causal language model whose forward pass returns log-probabilities and entropies.

    Owns the decoder and the output embeddings; `causal_lm` holds the same weights, named as in the model folder.
    """

    def __init__(self, causal_lm: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.decoder = causal_lm.get_decoder()
        self.head = LogProbHead(causal_lm.get_output_embeddings(), temperature, chunk_tokens)
        # In a tuple, so that torch does not register the weights a second time under other names.
        self._causal_lm = (causal_lm,)

    @property
    def causal_lm(self) -> PreTrainedModel:
        return self._causal_lm[0]

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        response_mask_BT: Tensor,
        attention: AttentionInputs,
        entropy: Entropy,
        untempered: bool = False,
        choice_BTC: Tensor | None = None,
        top_k: int | None = None,
    ) -> Tensor:
        """`(S, B, T)` log-probabilities and entropies at response tokens, 0 elsewhere; see `LogProbHead.forward`.

        With `top_k`, instead what `LogProbHead.most_probable` returns, `choice_BTC` being the candidates. Padding is on
        the right. In packed rows positions restart with every sequence, and `attention` says where; see
        `luffy.training.attention`.
        """

        def head(hidden_NH: Tensor, target_N: Tensor, place_N: Tensor) -> tuple[Tensor, ...]:
            choice_NC = None
            if choice_BTC is not None:
                choice_CBT = F.pad(choice_BTC[:, 1:], (0, 0, 0, 1)).permute(2, 0, 1)
                choice_NC = choice_CBT.flatten(1).index_select(1, place_N).T.long()
            if top_k is not None:
                return self.head.most_probable(hidden_NH, target_N, top_k, entropy != "none", choice_NC)
            return self.head(hidden_NH, target_N, entropy, untempered, choice_NC)

        return response_scores(self.decoder, head, input_ids_BT, position_ids_BT, response_mask_BT, attention)


def response_scores(
    decoder: nn.Module,
    head: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    input_ids_BT: Tensor,
    position_ids_BT: Tensor,
    response_mask_BT: Tensor,
    attention: AttentionInputs,
) -> Tensor:
    """`(S, B, T)` the scores that `head` computes of response tokens, 0 elsewhere.

    `head` maps `(N, H)` hidden states, the `(N,)` tokens that follow them and their places among `B x T` to float32
    scores `(N,)`. The mask is best on the CPU: nothing then waits for a GPU to count the response tokens.
    """
    predicts_BT = F.pad(response_mask_BT[:, 1:], (0, 1))
    place_N = to_device(predicts_BT.flatten().nonzero().squeeze(-1))
    hidden_BTH = decoder(
        input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, **attention
    ).last_hidden_state
    next_id_BT = F.pad(input_ids_BT[:, 1:], (0, 1))
    hidden_NH, next_id_N = (one.index_select(0, place_N) for one in (hidden_BTH.flatten(0, 1), next_id_BT.flatten()))
    score_SN = torch.stack(head(hidden_NH, next_id_N, place_N))
    nothing = torch.zeros(len(score_SN), predicts_BT.numel(), device=hidden_BTH.device)
    score_SBT = nothing.index_copy(1, place_N, score_SN).unflatten(1, predicts_BT.shape)
    return F.pad(score_SBT[..., :-1], (1, 0))


@torch.no_grad()
def refuse_processed_logits(causal_lm: PreTrainedModel) -> None:
    """Raise DataError for architectures that scale or cap the logits after their output embeddings.

    `LogProbHead` applies the embeddings alone, so that it can work in chunks; for such a model it would train on other
    log-probabilities than the rollouts were sampled from. A collective call for a model that is sharded: it gathers the
    output embeddings and nothing else.
    """
    head = causal_lm.get_output_embeddings()
    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        hidden_BTH = torch.linspace(-1.0, 1.0, 4 * head.weight.shape[1], device=causal_lm.device).view(1, 4, -1)
        hidden_BTH = hidden_BTH.to(head.weight.dtype)
        hidden_BTH *= _LARGE_LOGIT / head(hidden_BTH).abs().max()
        plain_BTV = head(hidden_BTH).float()
        # The logits that the model computes from these hidden states; its decoder does not run.
        decoder = causal_lm.get_decoder()
        found = MoeModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, hidden_BTH))
        decoder.forward = lambda *_, **__: found
        try:
            ids_BT = torch.zeros(hidden_BTH.shape[:2], dtype=torch.long, device=hidden_BTH.device)
            full_BTV = causal_lm(input_ids=ids_BT, use_cache=False).logits.float()
        finally:
            del decoder.forward  # restores the method of its class
    if not torch.allclose(plain_BTV, full_BTV, rtol=1e-2, atol=1e-2):
        raise DataError(
            f"model.path: {type(causal_lm).__name__} scales or caps its logits, which training does not support; "
            "use an architecture whose logits are its output embeddings (Qwen2, Llama, Mistral, ...)"
        )


Forward = Callable[[TrainBatch], Tensor]
"""`(B, T)` one number per token of a micro-batch, or `(S, B, T)` several."""


@torch.no_grad()
def score(module: nn.Module, forward: Forward, batch: TrainBatch, execution: ExecutionConfig) -> Tensor:
    """The results of `forward` for the response tokens, without gradient, float32 on the CPU; 0 elsewhere.

    `module`, which `forward` runs, is in eval mode meanwhile: dropout is off and consumes no random numbers.
    """
    was_training = module.training
    module.eval()
    shape, total = batch.input_ids_BT.shape, None
    # In place of weights: the position of each token in the batch.
    place_1BT = torch.arange(batch.input_ids_BT.numel()).view(1, *shape)
    for micro, micro_place_1BT in micro_batches(batch, place_1BT, execution):
        own_N = micro.response_mask_BT.flatten().nonzero().squeeze(-1)
        found = forward(micro).float()
        if total is None:  # several numbers a token may be more than a GPU has room for
            total = torch.zeros(*found.shape[:-2], *shape, device=device() if found.dim() == 2 else "cpu")
        own, place_N = found.flatten(-2).index_select(-1, to_device(own_N)), micro_place_1BT.flatten()[own_N]
        total.flatten(-2).index_copy_(-1, place_N.to(total.device), own.to(total.device))
    module.train(was_training)
    return torch.zeros(shape) if total is None else total.cpu()  # with one number, the only wait for a GPU


_COMPILED_MULTIPLE = 8
"""Divides the widths of micro-batches for compiled layers, which have one kernel for all of them: 16-byte loads."""


def micro_batches(
    batch: TrainBatch, weight_KBT: Tensor, execution: ExecutionConfig
) -> Iterator[tuple[TrainBatch, Tensor]]:
    """This rank's micro-batches and their weights, on the CPU.

    Every rank gets the same number, so that all make the same collective calls.
    """
    packed = bool(execution.packing)
    # torch would compile again for a width of 1.
    multiple = _COMPILED_MULTIPLE if execution.compile else 1
    micros = split_into_micro_batches(batch, weight_KBT, execution.micro_batch_tokens, packed, multiple)
    missing = max_over_ranks(len(micros)) - len(micros)
    yield from micros + [dummy_micro_batch(batch, weight_KBT, multiple)] * missing


def model_inputs(micro: TrainBatch, execution: ExecutionConfig) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
    """Token ids and positions on the device, response mask on the CPU, and the bounds of packed sequences.

    `micro` is on the CPU, where its tokens are counted and its bounds found.
    """
    ids_BT, position_BT = to_device(micro.input_ids_BT), to_device(micro.position_ids_BT)
    return ids_BT, position_BT, micro.response_mask_BT, attention_inputs(micro.position_ids_BT, execution)


ADAPTER_FOLDER = "adapter"
"""Folder in an exported model with the adapter alone, in peft's format, for the model that the stage started from."""
_NAME = "default"
"""Name of the adapter within peft's layers."""


class Adapter:
    """The LoRA adapter of a policy, and the only part of it that is trained.

    Modifies `causal_lm` in place: freezes its weights and wraps its layers. The random start of `A` depends on `seed`
    alone. Raises ConfigError when peft is not installed, or for targets that are not linear layers of the model.
    """

    def __init__(self, causal_lm: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
        if (missing := missing_package()) is not None:
            raise ConfigError(missing)
        import peft  # an optional dependency, and slow to import
        from peft.tuners.lora import Linear as AdaptedLinear

        # The output embeddings stay out: `LogProbHead` reads their weight directly and would bypass an adapter.
        head, modules = causal_lm.get_output_embeddings(), causal_lm.named_modules()
        complaint = config.complaint([name for name, one in modules if isinstance(one, nn.Linear) and one is not head])
        if complaint is not None:
            raise ConfigError(complaint)
        wanted = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type] # peft divides it by the rank, whatever number it is
            target_modules="all-linear" if config.targets is None else list(config.targets),
            lora_dropout=config.dropout,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            # In the type of the weights, as in full training: with bfloat16 the optimizer keeps float32 masters.
            self._peft_model = peft.get_peft_model(causal_lm, wanted, _NAME, autocast_adapter_dtype=False)
        self._causal_lm = causal_lm
        self._layers: dict[str, AdaptedLinear] = {
            name: module for name, module in causal_lm.named_modules() if isinstance(module, AdaptedLinear)
        }
        trained = {name: weight for name, weight in causal_lm.named_parameters() if weight.requires_grad}
        self._factors = list(trained)
        self.num_parameters = sum(weight.numel() for weight in trained.values())  # before ZeRO 3 takes them apart

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the context the model computes without the adapter; take no gradient in it."""
        with self._peft_model.disable_adapter():
            yield

    def factors(self) -> Iterator[FolderWeight]:
        """`A` and `B` of every adapted layer, by their names in a folder of peft."""
        parameters = dict(self._causal_lm.named_parameters())
        for name in self._factors:
            in_peft = f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"
            yield own_weight(in_peft, parameters[name])

    def merged_weights(self) -> Iterator[FolderWeight]:
        """Every weight of the model folder, with the adapter merged into those of adapted layers.

        A tied output head is not included.
        """
        factors = frozenset(self._factors)
        for name, parameter in self._causal_lm.named_parameters():
            if name in factors:
                continue
            module, _, kind = name.rpartition(".")
            layer = self._layers.get(module.removesuffix(_WRAPPED))
            if layer is None:
                yield own_weight(name, parameter)
            elif kind == "weight":
                yield _merged(f"{module.removesuffix(_WRAPPED)}.weight", parameter, layer)
            else:  # a bias, which has no adapter
                yield own_weight(f"{module.removesuffix(_WRAPPED)}.{kind}", parameter)

    def save(self, factors: Mapping[str, Tensor], folder: Path) -> None:
        """Write peft's folder of the adapter; `factors` are the values of `factors()`, on the CPU."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(factors), folder / "adapter_model.safetensors", {"format": "pt"})
        config = self._peft_model.peft_config[_NAME].to_dict()
        # The folder is part of a stage's result, which must not depend on the path of the base model.
        config |= {"base_model_name_or_path": None, "inference_mode": True}
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets of module names
        (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


_WRAPPED = ".base_layer"
"""Where peft keeps the layer that it has wrapped."""


def _merged(name: str, weight: nn.Parameter, layer: "AdaptedLinear") -> FolderWeight:
    factor_a, factor_b = (factors[_NAME].get_parameter("weight") for factors in (layer.lora_A, layer.lora_B))

    @torch.no_grad()
    def value() -> Tensor:
        # In float32, where peft's own function rounds the product to the weight's type before it adds it.
        product = layer.scaling[_NAME] * (factor_b.float() @ factor_a.float())
        # GPT-2 keeps its weights transposed.
        return (weight.float() + (product.T if layer.fan_in_fan_out else product)).to(weight.dtype)

    return FolderWeight(name, (weight, factor_a, factor_b), value)
