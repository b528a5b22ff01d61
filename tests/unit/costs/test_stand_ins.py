"""Made-up data and policies: of exactly the lengths and the shape that are asked for."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from luffy.config.model import TinyArchitecture
from luffy.costs.stand_ins import StandIns, make, write_ask
from luffy.data.parquet import read_prompts
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts
from luffy.pipeline.machine.architecture import ModelArchitecture, from_model_config

SHAPE = ModelArchitecture(64, 2, 4, 2, 16, 96, 600, tied=True, qkv_bias=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand_ins")
    write_ask(folder, StandIns(3, "bfloat16", None, None, SHAPE, 128, 5, 40, 30, ("amc", "math500")))
    make(folder)
    return folder


def test_every_prompt_and_trace_has_its_length(made: Path) -> None:
    tokenizer = load_tokenizer(made / "data" / "tokenizer")
    for file in ("train.parquet", "sft.parquet", "corpus.parquet", "suites/amc.parquet", "suites/math500.parquet"):
        prompts = read_prompts(made / "data" / file)
        lengths = {len(ids) for ids in render_prompts(tokenizer, [prompt.messages for prompt in prompts])}
        traces = [trace.text for prompt in prompts for trace in prompt.traces]
        assert (len(prompts), lengths, {len(ids) for ids in encode_traces(tokenizer, traces)}) == (5, {40}, {30})
        assert len({prompt.uid for prompt in prompts}) == 5


def test_the_policy_has_the_shape_and_the_type(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "base" / "model")
    assert from_model_config(model.config.to_dict()) == SHAPE
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPE.num_parameters
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}


def test_an_embedded_policy_takes_the_tokenizer_of_the_prepared_data(made: Path, tmp_path: Path) -> None:
    tiny = TinyArchitecture(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    write_ask(tmp_path, StandIns(0, "float32", str(made / "data"), tiny))
    make(tmp_path)
    assert not (tmp_path / "data").exists()
    tokenizer = load_tokenizer(tmp_path / "base" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_heads_of_another_size_than_the_model_s_width_gives_keep_their_size(tmp_path: Path) -> None:
    shape = ModelArchitecture(64, 2, 4, 2, 32, 96, 600, tied=True)
    write_ask(tmp_path, StandIns(3, "float32", None, None, shape, 128, 5, 40, 30, ("amc",)))
    make(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "model")
    found = from_model_config(model.config.to_dict())
    assert found is not None and (found.head_size, found.num_heads, found.attention_size) == (32, 4, 128)
