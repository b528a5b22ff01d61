"""Export of a checkpoint as a plain Hugging Face folder, without DeepSpeed."""

from pathlib import Path

from luffy.config.model import DType
from luffy.config.settings import RLSettings, SFTSettings
from luffy.pipeline.chain.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.chain.manifest import MANIFEST_FILE
from luffy.training.adapter import ADAPTER_FOLDER, Adapter
from luffy.training.engine_state import PieceKey, PieceReader
from luffy.training.model_folder import copy_tokenizer, load_causal_lm, own_weights, write_model_folder
from luffy.training.policy_model import PolicyModel

_MODEL = "model"


def export_checkpoint(checkpoint: Path, stage: Path, tokenizer: Path, dtype: DType, folder: Path) -> None:
    """Write the policy of `checkpoint` to `folder`: safetensors, configurations, tokenizer and chat template.

    `stage` is the directory of the stage, `sft` or `rl`, that wrote the checkpoint. An adapter is merged, and also
    written by itself. Runs in one process, whatever the number of ranks that wrote the checkpoint. Raises
    CheckpointError for a broken checkpoint, ConfigError when the adapter's library is not installed.
    """
    job = read_job(stage / JOB_FILE)
    assert isinstance(job.settings, SFTSettings | RLSettings)
    lora = job.settings.lora
    # A checkpoint of an adapter holds no other weights. Any checkpoint of a full training overwrites all of them.
    finished = lora is None and (stage / MANIFEST_FILE).is_file()
    causal_lm = load_causal_lm((stage if finished else inputs_of(job, stage)["model"]) / _MODEL, dtype)
    adapter = None if lora is None else Adapter(causal_lm, lora, seed=0)
    stored = PieceReader(checkpoint / "policy")
    for name, parameter in PolicyModel(causal_lm, temperature=1.0, chunk_tokens=1).named_parameters():
        if parameter.requires_grad:
            stored.read(PieceKey("weight", 0, name), parameter.detach().view(-1))
    weights = own_weights(causal_lm) if adapter is None else adapter.merged_weights()
    write_model_folder(causal_lm, {weight.name: weight.value() for weight in weights}, folder)
    if adapter is not None:
        adapter.save({factor.name: factor.value() for factor in adapter.factors()}, folder / ADAPTER_FOLDER)
    copy_tokenizer(tokenizer, folder)
