"""The vLLM engine, in the caller's process. Only the `vllm_*` modules of this package use vLLM (0.32).

vLLM batches continuously and pads nothing, so prompts are not grouped by length. Long responses should start early, and
the rows of a prompt should stay together to share its KV cache (`VLLMEngine.generate`).
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from luffy.config.execution import VLLMConfig, vllm_rank
from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, LostError, LuffyError
from luffy.library_loading import without_collections
from luffy.model_shape import from_model_config, linear_layers
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, limit, room
from luffy.rollout.vllm_limits import (
    check_adapters,
    check_installed,
    check_layout,
    check_lengths,
    check_params,
    context_length,
    cpu_cache_bytes,
    read_shape,
)
from luffy.rollout.vllm_worker import AdapterUpdate, WeightUpdate, is_batch_invariant, on_worker
from luffy.types import FinishReason

if TYPE_CHECKING:
    import vllm
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

_ENVIRONMENT = {
    # In this process, so that weights can be updated between two steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
_CLOSED = "it was closed"
_PROBES = [RolloutRequest(tuple(range(length)), seed=0) for length in range(1, 9)]
"""Prompts whose likeliest token has to be as likely after a sleep as before, with the same adapter."""
_PROBE_GAP = 0.01
"""Nats; as the same work on the same device, the two are computed alike."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Call:
    """The requests of one `generate`."""

    number: int
    size: int
    completions: dict[int, Completion] = field(default_factory=dict)
    abandoned: bool = False
    """The thread of the call gave up; the next step removes the call's rows."""

    @property
    def is_done(self) -> bool:
        return len(self.completions) == self.size


@dataclass(frozen=True, slots=True)
class _SampledRow:
    """One request of a call."""

    call: _Call
    index: int
    request: RolloutRequest
    params: SamplingParams


class FairLock:
    """A first-in, first-out lock: an update waits for at most one step of each other thread.

    A wait of more than `timeout_s` raises LuffyError.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # The first ticket holds the lock.
        self._queue: deque[object] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in the block, and then pass it to the thread that has waited longest."""
        ticket, acquired = object(), False
        with self._changed:
            self._queue.append(ticket)
            try:
                acquired = self._changed.wait_for(lambda: self._queue[0] is ticket, self._timeout_s)
            finally:
                if not acquired:
                    self._queue.remove(ticket)
                    self._changed.notify_all()
        if not acquired:
            raise LuffyError(f"the engine was busy for {self._timeout_s:g} s: a step or an update of its weights hangs")
        try:
            yield
        finally:
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


class VLLMEngine:
    """Generates with vLLM; `generate` is thread-safe, also during a weight update.

    Each thread that waits for its responses steps the engine for all of them. Updates happen between two steps:
    running responses continue after an update on their old KV cache, and each token carries the version of the weights
    that sampled it. Responses that are not admitted yet (`max_num_seqs`) use only the new weights. An admitted one that
    has no token yet, for lack of KV cache, may share the old cache of its prompt with the other rows of its group.

    A response depends on its seed and its logits. The last bits of the logits vary with the rest of the batch, so a
    sampled token may differ where two candidates are nearly tied. Earlier calls have no influence: their KV cache is
    reused only where requests ask for it (`shares_cache_with`).

    With an `adapter`, whose factors updates bring, the weights stay those of the folder, also while the engine sleeps.
    Such an engine generates from its first update on: rows that began without an adapter would go on without one.

    One engine per process at a time: vLLM keeps its process groups in module state.
    """

    def __init__(
        self,
        llm: "LLMEngine",
        config: VLLMConfig,
        wait_timeout_s: float,
        found_default_group: bool,
        reads_text: bool,
        is_kept: bool,
        adapter: LoRAConfig | None,
    ) -> None:
        assert not (is_kept and adapter), "layers with adapters take no weights of another model"
        self._llm = llm
        self._adapter = adapter
        self._applied: LoRARequest | None = None
        """Names the adapter, once there is one."""
        self._before_sleep: list[float] = []
        """Log-probabilities of the probes, in an engine with an adapter that has slept."""
        self._is_kept = is_kept
        self._sleeps = llm.model_config.enable_sleep_mode
        self._max_num_seqs = config.max_num_seqs
        self._environment = _environment(config)
        self._lock = FairLock(wait_timeout_s)
        self._numbers = itertools.count()
        self._waiting: deque[_SampledRow] = deque()
        self._running: dict[str, _SampledRow] = {}
        self._found_default_group = found_default_group
        self._reads_text = reads_text
        self._broken: str | None = None
        self._asleep = False
        self._num_updates = 0
        self.watch: Callable[[int, int], None] | None = None
        """Called after each step that finishes responses, with their number and that of their tokens."""
        self._set_version(0 if adapter is None else -1)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        config: VLLMConfig,
        dtype: str,
        *,
        max_model_len: int | None = None,
        sleep_mode: bool = False,
        wait_timeout_s: float = 1800.0,
        reads_text: bool = False,
        is_kept: bool = False,
        adapter: LoRAConfig | None = None,
        before_loading: Callable[[], None] = lambda: None,
    ) -> "VLLMEngine":
        """An engine on a model folder.

        `max_model_len` limits prompt and response together (None: the model's context length). `sleep_mode` enables
        `sleep` (GPUs only). `wait_timeout_s` limits the wait for another thread's step or update. `reads_text` loads
        the folder's tokenizer, which `SamplingParams.stop` needs to end responses. `is_kept`: after `close` it waits
        for `take_over`. `adapter`: updates bring the factors of this adapter in place of weights. `before_loading` is
        called when only the part that uses the device is left.

        Raises ConfigError when vLLM is not installed, the folder holds no model, or the model does not fit the
        configuration.
        """
        shape = read_shape(folder)
        check_layout(folder, shape, config, max_model_len)
        check_installed()
        if adapter is not None:
            check_adapters(dtype)
        # vLLM reads these variables on import.
        os.environ.update(_environment(config))
        if not torch.cuda.is_available():
            # vLLM would set its own number of threads in the thread that starts the engine, and then fail in the
            # threads that step it.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # vLLM logs two dozen irrelevant warnings at every start.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with _without_compiler():
            with without_collections(freeze=False):
                _check_head_dim(folder, shape)
                from vllm.engine.arg_utils import EngineArgs
                from vllm.model_executor.model_loader.utils import get_model_cls
                from vllm.usage.usage_lib import UsageContext
                from vllm.utils.import_utils import resolve_obj_by_qualname
                from vllm.v1.engine.llm_engine import LLMEngine

            arguments = EngineArgs(
                **_engine_arguments(folder, shape, config, dtype, max_model_len, adapter),
                skip_tokenizer_init=not reads_text,
                seed=0,  # of the process; every request has its own
                enable_sleep_mode=sleep_mode,
            )
            # vLLM's CPU worker replaces this function with one that raises; restore it for the rest of the process.
            set_num_threads = torch.set_num_threads
            found_default_group = dist.is_initialized()
            try:
                planned = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
                with without_collections(freeze=False):
                    resolve_obj_by_qualname(planned.parallel_config.worker_cls)
                    get_model_cls(planned.model_config)
                before_loading()
                llm = LLMEngine.from_vllm_config(planned, disable_log_stats=True)
            except ValueError as error:
                raise ConfigError(f"{folder}: vLLM refuses this model or its layout: {_first_line(error)}") from error
            except AssertionError as error:
                if "memory profiling" not in str(error):
                    raise
                raise LostError(
                    "another process released memory of the GPU while vLLM measured it; the same command tries again, "
                    "best with execution.gpus above 0, or once the other process has ended"
                ) from error
            finally:
                torch.set_num_threads = set_num_threads
        engine = cls(llm, config, wait_timeout_s, found_default_group, reads_text, is_kept, adapter)
        engine._require_kernels(config)
        return engine

    def _require_kernels(self, config: VLLMConfig) -> None:
        """Raise LuffyError, and end the engine, where the worker lacks the kernels of `batch_invariant`."""
        if config.batch_invariant and not on_worker(self._llm, is_batch_invariant):
            self.shut_down()
            raise LuffyError(
                "execution.vllm.batch_invariant: vLLM does not have these kernels: it was imported before the setting "
                "reached it, or has none for this device; start the stage in a process of its own, or set it to false"
            )

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token; -1 before there is an adapter to sample with."""
        return self._weight_version

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its response."""
        return self._llm.model_config.max_model_len

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order.

        Raises ConfigError for a request longer than the engine's context, and LuffyError when the engine failed in
        another thread.
        """
        check_params(params)
        check_lengths(requests, params, self.max_model_len)
        call = _Call(next(self._numbers), len(requests))
        # Longest expected first, so that no long response runs alone at the end. Only the room left by a prefix is
        # known beforehand; the sort is stable, so that the rows of a prompt stay together and share its KV cache.
        order = sorted(range(len(requests)), key=lambda i: -room(requests[i], params))
        with self._lock.held():
            self._waiting.extend(_SampledRow(call, i, requests[i], params) for i in order)
        try:
            while not call.is_done:
                with self._lock.held():
                    if not call.is_done:
                        self._step()
        finally:
            call.abandoned = not call.is_done
        return [call.completions[i] for i in range(len(requests))]

    @contextmanager
    def weight_update(self, version: int) -> Iterator[WeightUpdate | AdapterUpdate]:
        """Replace all weights, or the adapter, between two steps with what the block loads or receives.

        A tied output head is not sent. No tensor may be modified before the block ends. Raises LuffyError when some of
        the model's weights are missing, or layers of the adapter not applied; the engine cannot be used after a failed
        update.
        """
        with self._lock.held(), self._breaks_on_failure("an update of its weights"):
            update = WeightUpdate(self._llm) if self._adapter is None else AdapterUpdate(self._llm, self._adapter)
            yield update
            self._applied = update.finish()
            self._set_version(version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace what the engine has with `weights`, consumed one at a time; raises what `weight_update` raises."""
        with self.weight_update(version) as update:
            for name, tensor in weights:
                update.load(name, tensor)
                del tensor

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace all weights with those of a model folder (`*.safetensors`); raises what `load_weights` raises."""
        with self.weight_update(version) as update:
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        update.load(name, tensors.get_tensor(name))

    def sleep(self) -> None:
        """Release GPU memory for the trainer, weights included, which go to CPU memory where an adapter is beside them.

        Generate again only after `wake_up`, with new weights loaded between its two parts. With an adapter the first
        part is the whole, and the engine goes on as before.
        """
        if self._applied is not None:
            self._before_sleep = self._probe()
        with self._lock.held():
            assert not self._running and not self._waiting, "an engine that generates cannot sleep"
            self._llm.sleep(1 if self._adapter is not None else 2)
            self._asleep = True

    def wake_up(self, part: str) -> None:
        """Allocate a part of the memory again: `weights`, then `kv_cache`, which ends the sleep.

        Raises LostError where weights or an adapter have suffered (vLLM issue 53888).
        """
        with self._lock.held():
            if not self._asleep:
                return
            self._asleep = not self._llm.wake_up([part] if self._adapter is None else None)
        if self._applied is not None:
            gap = max(abs(now - before) for now, before in zip(self._probe(), self._before_sleep, strict=True))
            if not gap <= _PROBE_GAP:  # NaN, too
                raise LostError(
                    f"vLLM's log-probabilities are {gap:.3g} nats from those before it slept: its weights or adapter "
                    "have suffered; the same command resumes the stage, if need be with execution.vllm.adapter=merged"
                )

    def _probe(self) -> list[float]:
        watch, self.watch = self.watch, None
        found = self.generate(_PROBES, SamplingParams(0.0, 1, stop_token_ids=()))
        self.watch = watch
        return [completion.logprobs[0] for completion in found]

    def close(self) -> None:
        """Shut vLLM down, or, where it is kept, have it wait for `take_over`, asleep if it can.

        No other thread may be using the engine. May be called twice.
        """
        if not self._is_kept:
            self.shut_down()
        elif self._sleeps and not self._asleep:
            self.sleep()

    def take_over(self, folder: Path) -> None:
        """Begin again with a model folder of the same architecture, as version 0; raises what `load_weights` raises."""
        os.environ.update(self._environment)
        self.watch = None
        if self._asleep:
            self.wake_up("weights")
        self.load_weights_from(folder, 0)
        if self._asleep:
            self.wake_up("kv_cache")

    def shut_down(self) -> None:
        """Shut vLLM down for good."""
        if self._broken != _CLOSED:
            self._broken = _CLOSED
            destroy = dist.destroy_process_group
            if self._found_default_group:  # vLLM would destroy it, too
                dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
            try:
                self._llm.engine_core.shutdown()
            finally:
                dist.destroy_process_group = destroy

    def _step(self) -> None:
        """Sample one token for every running row and hand finished rows to their calls. The caller holds the lock."""
        from vllm.inputs.engine import tokens_input

        assert not self._asleep, "wake the engine before it generates"
        assert self._adapter is None or self._applied is not None, "give the engine an adapter before it generates"
        with self._breaks_on_failure("a step"):
            if abandoned := [name for name, row in self._running.items() if row.call.abandoned]:
                for name in abandoned:
                    del self._running[name]
                self._llm.abort_request(abandoned)
            if any(row.call.abandoned for row in self._waiting):
                self._waiting = deque(row for row in self._waiting if not row.call.abandoned)
            # Rows wait here and not in vLLM's queue, so that their cache salt names the weights that they start with.
            while self._waiting and len(self._running) < self._max_num_seqs:
                row = self._waiting.popleft()
                name = str(next(self._numbers))
                self._running[name] = row
                salt = f"{row.request.shares_cache_with or row.call.number}/{self._num_updates}"
                prompt = tokens_input([*row.request.prompt_ids, *row.request.prefix_ids], cache_salt=salt)
                sampling = _sampling(row.request, row.params, self._reads_text)
                self._llm.add_request(name, prompt, sampling, lora_request=self._applied)
            completions = list[Completion]()
            for output in cast("list[RequestOutput]", self._llm.step()):
                if output.finished:
                    row = self._running.pop(output.request_id)
                    row.call.completions[row.index] = completion = _completion(output)
                    completions.append(completion)
        if completions and self.watch is not None:
            self.watch(len(completions), sum(len(completion.token_ids) for completion in completions))

    def _set_version(self, version: int) -> None:
        # vLLM labels the tokens of each step with this version.
        self._llm.set_weight_version(str(version))
        self._weight_version = version
        self._num_updates += 1

    @contextmanager
    def _breaks_on_failure(self, what: str) -> Iterator[None]:
        """Mark the engine as unusable when the block fails, which leaves vLLM in an unknown state."""
        if self._broken is not None:
            raise LuffyError(f"the vLLM engine cannot be used: {self._broken}")
        try:
            yield
        except BaseException as error:  # also an interrupt, which may come in the middle of a step
            self._broken = f"{what} failed ({type(error).__name__}: {_first_line(error)}); start another engine"
            raise


def _environment(config: VLLMConfig) -> dict[str, str]:
    return _ENVIRONMENT | ({"VLLM_BATCH_INVARIANT": "1"} if config.batch_invariant else {})


def _check_head_dim(folder: Path, shape: Mapping[str, object]) -> None:
    """Raise ConfigError for a head size that vLLM does not support on CPU, where it fails at the first token."""
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


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Have vLLM not compile its sampler on CPU: a minute of C++ at the first start, without any gain in speed.

    vLLM decides when its modules are loaded. Later, `execution.compile` may need the compiler in this process.
    """
    given = os.environ.get("TORCHDYNAMO_DISABLE")
    if torch.cuda.is_available() or given is not None:
        yield
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]


def _engine_arguments(
    folder: Path,
    shape: Mapping[str, object],
    config: VLLMConfig,
    dtype: str,
    max_model_len: int | None,
    adapter: LoRAConfig | None = None,
) -> dict[str, Any]:
    """The `EngineArgs` that this machine and the contract of `RolloutEngine` require."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": max_model_len or context_length(shape),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": bool(config.enforce_eager),
        # Inside a Ray actor vLLM would choose Ray for more than one GPU; its workers are children of this process.
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        # Log-probabilities under the sampling distribution, temperature applied; greedy rows: the plain softmax.
        "logprobs_mode": "processed_logprobs",
        # The folder's own generation_config is never applied.
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # With async scheduling a step may return while the next one is running (EngineCore.step_with_batch_queue): an
        # update after the step would label those tokens with weights that did not sample them.
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": vllm_rank(adapter)}
        if (architecture := from_model_config(shape)) is not None:
            # By itself vLLM has adapters at the embeddings and the output head, too, and computes with their zeros.
            layers = (name for name in linear_layers(architecture) if adapter.adapts(name))
            arguments["lora_target_modules"] = sorted({name.rpartition(".")[2] for name in layers})
    if not torch.cuda.is_available():
        arguments |= {
            "kv_cache_memory_bytes": cpu_cache_bytes(config, shape, dtype, max_model_len),
            # Compiling takes longer than it saves in a short run.
            "enforce_eager": True,
            # After a chunk of a prompt vLLM rewinds the row's generator, which CPU generators do not support
            # (GPUModelRunner._bookkeeping_sync: "CPU Generator does not use offset").
            "enable_chunked_prefill": False,
        }
    return arguments


def _sampling(request: RolloutRequest, params: SamplingParams, reads_text: bool) -> "vllm.SamplingParams":
    """vLLM's parameters for one row; only temperature and top-p shape the distribution."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        seed=request.seed,
        max_tokens=limit(request, params),
        stop_token_ids=list(params.stop_token_ids),
        # The model's own end-of-sequence token stops a row only when it is among the stop tokens.
        ignore_eos=True,
        # Log-probability of the sampled token alone.
        logprobs=0,
        flat_logprobs=True,
        stop=list(params.stop) if reads_text else [],
        include_stop_str_in_output=True,
        detokenize=reads_text and bool(params.stop),
        # Stop strings may be special tokens.
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: "RequestOutput") -> Completion:
    (generated,) = output.outputs
    if generated.finish_reason not in _FINISH_REASONS:
        raise LuffyError(f"vLLM: unexpected finish_reason {generated.finish_reason!r}")
    spans = generated.weight_versions or []
    completion = Completion(
        token_ids=tuple(generated.token_ids),
        logprobs=tuple(cast("FlatLogprobs", generated.logprobs).logprobs),
        finish_reason=_FINISH_REASONS[generated.finish_reason],
        weight_versions=tuple(int(span.version) for span in spans for _ in range(span.start, span.end)),
    )
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.weight_versions)
    return completion


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
