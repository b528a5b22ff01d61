"""Settings that must not change a result, so they are never part of a stage's identity."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)

from luffy.config.model import LoRAConfig
from luffy.config.stage_kinds import StageName
from luffy.config.strict import PositiveShare, StrictModel

LOWEST_VLLM_TEMPERATURE = 0.01
"""vLLM samples at this temperature when a request has a lower one that is not 0."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA layers can have."""
NO_FLOAT32_ADAPTER = "execution.vllm.adapter: separate needs model.dtype: bfloat16 on a GPU; set it to merged"
"""The line where vLLM's kernels on GPUs, which are for 16 bits, would end with an AssertionError."""
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The variable with which cuBLAS gives the same bits again, and which it reads at its first operation."""
WeightTransfer = Literal["object_store", "ipc"]


class CheckpointConfig(StrictModel):
    """How often stages write checkpoints; a stage resumes from its newest complete one."""

    base_every: PositiveInt = 200
    """Optimizer steps between checkpoints of `base`."""
    sft_every: PositiveInt = 100
    """Optimizer steps between checkpoints of `sft`."""
    sft_last: bool = False
    """Whether `sft` writes one after its last step, too, so that a longer run continues from there."""
    rl_every: PositiveInt = 50
    """RL steps between checkpoints of `rl`; steps after the newest are replayed from the journal."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep on disk."""


class VLLMConfig(StrictModel):
    """How vLLM engines are laid out on their devices."""

    engines: PositiveInt = 1
    """Engines that answer the prompts of `evaluate`, `difficulty`, `sample` and `sweep` at the same time, each on
    `tensor_parallel_size` GPUs of this machine. RL has its own number of engines, `ray.engines`."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs per engine; must divide the model's number of attention heads."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of each GPU's memory for weights and KV cache."""
    cpu_kv_cache_gb: PositiveFloat | None = None
    """KV cache in GiB without a GPU; None: enough for `max_num_seqs` full sequences, at most 4. What does not fit
    waits."""
    max_num_seqs: PositiveInt = 256
    """Sequences decoded at the same time."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one engine step; None: vLLM's own choice."""
    context_tokens: PositiveInt | None = None
    """Least number of tokens, of a prompt with its response, that an engine has room for, within the model's context.
    None: what its stage needs, and the other stages of the run that it may be kept for."""
    enforce_eager: bool | None = None
    """No compilation, no CUDA graphs: starts up to a minute sooner, slower at each token. None: where a stage samples
    so little that compiling would take longer than it saves. Always so without a GPU."""
    adapter: Literal["separate", "merged"] = "separate"
    """How the adapter of `model.lora` reaches engines in training. `separate`: its factors alone, which vLLM applies
    beside the weights; on a GPU, with `model.dtype: bfloat16`. `merged`: the whole model, with the product added to its
    weights and rounded to their type."""

    batch_invariant: bool = False
    """Kernels whose results do not depend on what else is in the batch (`VLLM_BATCH_INVARIANT`), and which are slower.
    For GPUs alone, from compute capability 8.0 on. With `rl.engine: vllm` they also take the place of the trainer's
    matrix products, which are in the same process. Never run on a GPU."""

    def separate(self, lora: LoRAConfig | None) -> LoRAConfig | None:
        """The adapter whose factors alone engines get; None: they get every weight."""
        return lora if self.adapter == "separate" else None


def vllm_rank(lora: LoRAConfig) -> int:
    """The rank of vLLM's layers for an adapter, whose own must be no more than the largest."""
    return next(rank for rank in VLLM_RANKS if rank >= lora.rank)


class RayConfig(StrictModel):
    """How `cluster: ray` lays trainer ranks and engines out over machines."""

    address: Annotated[str, Field(pattern=r"^(auto|[^\s:/]+:\d+)$")] | None = None
    """HOST:PORT of a running cluster (`RAY_USAGE_STATS_ENABLED=0 ray start --head`), or `auto` for the one that this
    machine belongs to. None: Ray is started on this machine and ended with the stage."""
    trainer_ranks: PositiveInt = 1
    """DeepSpeed ranks, one GPU each on machines with GPUs."""
    engines: PositiveInt = 1
    """vLLM engines (data parallel), each over `vllm.tensor_parallel_size` GPUs."""
    placement: Literal["colocated", "disaggregated"] = "disaggregated"
    """`disaggregated`: trainer and engines have their own GPUs. `colocated`: they share them in turn."""
    weight_transfer: WeightTransfer | None = None
    """How the policy's weights reach the engines. `object_store`: through CPU memory and Ray's object store. `ipc`:
    each engine copies from the memory of the colocated rank, on their GPU. None: `ipc` where colocated, else
    `object_store`."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for an actor to be placed and ready."""
    call_timeout_s: PositiveFloat = 3600.0
    """Longest wait for any call to an actor."""


_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^\s/?#:@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?")


def _checked(url: str) -> str:
    if not _URL.fullmatch(url):
        raise ValueError("must be like http://host:8000")
    return url.rstrip("/")


def _without_password(url: str) -> str:
    if "@" in urlsplit(url).netloc:
        raise ValueError("must name no user or key, which every run would record; give them as its package says")
    return url.rstrip("/")


class ServerConfig(StrictModel):
    """Servers of OpenAI's protocol (`luffy/rollout/text_endpoint.py`)."""

    urls: tuple[Annotated[str, AfterValidator(_checked)], ...] = ()
    """`http://host:8000`, without path, with `/v1` or another that serves `/chat/completions` or `/completions`."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the API key for all of them."""
    request_timeout_s: PositiveFloat = 1800.0
    """Longest wait for a reply, a whole response."""
    max_retries: NonNegativeInt = 5
    """Further attempts after a broken connection, a server error (5xx) or a 429; Retry-After is respected."""
    concurrency: PositiveInt = 256
    """Concurrent requests to a server."""

    def _complaints(self) -> Iterator[str]:
        if len(set(self.roots)) < len(self.urls):
            yield "urls: give each server once"

    @property
    def roots(self) -> tuple[str, ...]:
        """The base URLs of a vLLM server's own endpoints."""
        return tuple(url.removesuffix("/v1") for url in self.urls)

    @property
    def api_roots(self) -> tuple[str, ...]:
        """The base URLs of OpenAI's endpoints: the given path, `/v1` if there is none."""
        return tuple(url if urlsplit(url).path else f"{url}/v1" for url in self.urls)


class ExecutionConfig(StrictModel):
    """How the work is laid out on the machine: batches, processes, memory, engines and retries."""

    micro_batch_tokens: PositiveInt = 16384
    """Padded (or packed) tokens of one forward and backward pass; gradients do not depend on it."""
    packing: bool | None = None
    """Concatenate sequences into one row instead of padding them; None: where a GPU attends to all of them in one call
    (torch's FlashAttention, from Ampere on in bfloat16), which is faster. Elsewhere packed sequences take a call each.
    Either way the memory of attention grows linearly with the tokens of a micro-batch."""
    compile: bool | None = None
    """Compile the decoder layers of the models in training, except for their attention, and the output head's passes
    over logits (torch.compile). Takes up to a minute at the start of a stage, less when it was compiled before; needs a
    C++ compiler, and changes only the last bits of floats. The embedded engine generates without it. Not for ZeRO 3.
    None: on a GPU where it works, in stages long enough to repay it."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. 3 also shards frozen models, and no rank loads or trains a model whole."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory (ZeRO 1-3)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logprob_chunk_tokens: PositiveInt = 4096
    """Tokens whose logits are in memory at the same time."""
    rollout_batch_size: PositiveInt = 256
    """Sequences the embedded engine decodes at once."""
    grader_workers: PositiveInt = 2
    """Grading processes."""
    reward_device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] | None = None
    """Device of graders of `kind: reward_model`, which score `micro_batch_tokens` at a time in the stage's own process:
    under Ray beside ranks and engines, and beside a vLLM engine in what it leaves of its GPU. None: the first GPU that
    the process sees, else the CPU."""
    data_workers: PositiveInt | None = None
    """Processes of `prepare_data` for a large source, each with its own grading process; None: one per core."""
    ranks: PositiveInt = 1
    """Ranks of `cluster: local`, each in a process of its own; they train and generate side by side. On a machine with
    GPUs each has one, and there are no more than GPUs. It can change only the last bits of floats."""
    num_threads: PositiveInt | None = None
    """CPU threads of a rank, or of another stage; None: torch's default. It can change only the last bits of floats."""
    deterministic: bool = False
    """Processes that train take deterministic kernels alone (`torch.use_deterministic_algorithms`, and cuBLAS with
    `CUBLAS_WORKSPACE_CONFIG`), and end with an error at an operation that has none. On CPUs a step gives the same bits
    without it. Never run on a GPU."""
    cpu_instructions: Literal["native", "avx2"] = "native"
    """Instructions of torch's CPU kernels. `native` are the fastest, and round differently from one kind of CPU to
    another; `avx2` rounds alike on every Intel CPU that has AVX2, with the embedded engine and `cluster: local`."""
    max_logp_gap: PositiveFloat | None = None
    """Ends RL when engine and trainer differ by more on a step's sampled tokens (mean, nats); None: no bound."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    vllm: VLLMConfig = VLLMConfig()
    ray: RayConfig = RayConfig()
    server: ServerConfig = ServerConfig()
    """Where `model.endpoint` is served."""
    teachers: dict[str, ServerConfig] = Field(default_factory=dict)
    """Where endpoints of `sample.teachers` are served, by teacher; a given `api_key_variable` must be set."""
    rl_teachers: dict[str, ServerConfig] = Field(default_factory=dict)
    """vLLM servers of the teachers of `rl.teachers` of `kind: served`, by teacher."""
    gpus: NonNegativeInt | None = None
    """GPUs of this machine that a training or generating stage takes exclusively, after waiting for busy ones; None: as
    many as it can use. 0: it uses all visible GPUs and may share them."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of each GPU in GiB, for the check whether a run fits; None: as detected on this machine."""
    retries: NonNegativeInt = 1
    """How often a run resumes a stage that was killed or lost a process, machine or endpoint; never after a mistake."""
    retry_delay_s: NonNegativeFloat = 10.0
    """Wait before each retry."""
    time_limits_s: dict[StageName, PositiveFloat] = Field(default_factory=dict)
    """Time limit of a stage in one run, by name; a stage that exceeds it is ended, and the next run resumes it."""
    grace_s: PositiveFloat = 20.0
    """Time that a stage has after SIGTERM to finish its step and write a checkpoint; then it is ended at once. Keep it
    below what the scheduler grants (30 s by default under Slurm and Kubernetes)."""
    shared_cache: Annotated[str, AfterValidator(_without_password)] | None = None
    """A folder, or a URL of fsspec (`s3://bucket/luffy` with s3fs installed), through which workspaces share finished
    stages: those that are not finished here are taken from it, and finished ones copied to it, without checkpoints.
    Whoever may write there decides what comes out here."""
    parallel_stages: PositiveInt | None = None
    """Most stages of a run at the same time; None: as many as fit this machine's GPUs, or its cores without one."""

    @property
    def uncompiled_with(self) -> str | None:
        """The setting that `compile` does not support; None: there is none."""
        uncompiled = {
            "zero_stage: 3": self.zero_stage == 3,
            # torch's compiler makes code for the instructions of the CPU at hand.
            "cpu_instructions: avx2": self.cpu_instructions == "avx2",
        }
        return next((setting for setting, is_set in uncompiled.items() if is_set), None)

    def _complaints(self) -> Iterator[str]:
        if self.offload_optimizer and self.zero_stage == 0:
            yield "offload_optimizer has no effect with zero_stage: 0; use 1, 2 or 3"
        if self.compile and self.uncompiled_with is not None:
            yield f"compile: true does not support {self.uncompiled_with}; use compile: false or another setting"
        if self.ray.placement == "colocated" and (
            self.ray.engines != self.ray.trainer_ranks or self.vllm.tensor_parallel_size > 1
        ):
            yield (
                f"ray.placement: colocated puts one engine beside each trainer rank: set ray.engines to "
                f"{self.ray.trainer_ranks} and vllm.tensor_parallel_size to 1, or use disaggregated"
            )
        if self.ray.placement == "disaggregated" and self.ray.weight_transfer == "ipc":
            yield (
                "ray.weight_transfer: ipc needs engines on the ranks' GPUs, and ray.placement: disaggregated gives "
                "them others; use object_store or colocated"
            )


class TrackingConfig(StrictModel):
    """Where numbers go besides `metrics.jsonl`, which is always written."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "luffy"
    tags: tuple[Annotated[str, StringConstraints(pattern=r"^[^\s,]+$")], ...] = ()
    """Words for the run, by which `luffy show --tag` lists it; services get them, too."""
    note: str = ""
    """What the run is for; shown in the list of runs."""
    wandb_entity: str | None = None
    """User or team of the project; None: wandb's default."""
    tensorboard: str | None = None
    """Folder for TensorBoard's event files; needs the package tensorboard (the extra `trackers`)."""
    samples_every: PositiveInt = 10
    """RL steps between written sample rollouts (`samples.jsonl`)."""
    num_samples: PositiveInt = 4
    """Rollouts written each time."""

    @property
    def services(self) -> list[str]:
        """The services that are configured."""
        on = {"wandb": self.wandb != "disabled", "tensorboard": self.tensorboard}
        return [name for name, is_on in on.items() if is_on]
