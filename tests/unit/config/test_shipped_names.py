"""Experiments and samples that are found by their shipped names, from any folder."""

import pytest

from luffy.config import load_experiment
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.config.shipped import expand_pattern, experiment_names
from luffy.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_shipped_experiment_is_found_by_its_name():
    assert load_experiment("arithmetic", ["seed=5"]).seed == 5
    assert load_sweep("compare_arithmetic").design.name == "compare_arithmetic"
    assert (kind_of_file("compare_arithmetic"), kind_of_file("smoke")) == ("comparison", "experiment")


def test_a_file_wins_over_a_shipped_name(elsewhere):
    (elsewhere / "smoke").write_text("name: [")
    with pytest.raises(ConfigError, match=r"^smoke:1: not valid YAML"):
        load_experiment("smoke")


@pytest.mark.parametrize("name", ["arithmetics", "exp_configs/arithmetic", "exp_configs/smoke.yaml"])
def test_an_unknown_name_is_refused_with_the_shipped_ones(name):
    with pytest.raises(ConfigError) as caught:
        load_experiment(name)
    assert str(caught.value).startswith(f"{name}: no such file")
    assert all(shipped in str(caught.value) for shipped in experiment_names())


def test_shipped_samples_are_found_from_any_folder(elsewhere):
    name = "data/samples/shop_train.jsonl"
    assert expand_pattern(name)[0].is_file()
    (elsewhere / "data/samples").mkdir(parents=True)
    (elsewhere / name).touch()
    assert (elsewhere / expand_pattern(name)[0]).samefile(elsewhere / name)
