import pytest

from luffy.cluster.ray_session import Place, by_machine, layout, layout_apart
from luffy.config.execution import RayConfig
from luffy.errors import ClusterError


def test_without_gpus_every_process_takes_a_cpu():
    wanted = layout(RayConfig(trainer_ranks=2), tensor_parallel_size=4, gpus=False, num_engines=1)
    assert wanted.bundles == [{"CPU": 1}] * 3
    assert (wanted.total("GPU"), wanted.total("CPU")) == (0, 3)
    assert wanted.engines == [Place(2, cpus=1, gpus=0)]


def test_a_rank_takes_one_gpu_and_an_engine_as_many_as_it_is_cut_over():
    wanted = layout(RayConfig(trainer_ranks=2), tensor_parallel_size=4, gpus=True, num_engines=3)
    assert wanted.bundles == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 4}] * 3
    assert (wanted.total("GPU"), wanted.total("CPU")) == (14, 5)
    assert [place.bundle for place in (*wanted.ranks, *wanted.engines)] == [0, 1, 2, 3, 4]


def test_colocated_engines_take_half_of_the_gpu_of_their_rank():
    config = RayConfig(trainer_ranks=2, engines=2, placement="colocated")
    wanted = layout(config, tensor_parallel_size=1, gpus=True, num_engines=2)
    assert wanted.bundles == [{"CPU": 2, "GPU": 1}] * 2
    assert wanted.ranks == wanted.engines == [Place(0, cpus=1, gpus=0.5), Place(1, cpus=1, gpus=0.5)]
    assert layout(config, 1, gpus=False, num_engines=2).bundles == [{"CPU": 1}] * 4


def test_ranks_beside_servers_elsewhere_have_their_gpus_alone():
    config = RayConfig(trainer_ranks=2, engines=2, placement="colocated")
    wanted = layout(config, tensor_parallel_size=1, gpus=True, num_engines=0)
    assert wanted.bundles == [{"CPU": 1, "GPU": 1}] * 2
    assert wanted.engines == []


def test_engines_without_ranks_have_bundles_of_their_own():
    wanted = layout_apart(num_ranks=0, num_engines=2, tensor_parallel_size=4, gpus=True)
    assert (wanted.ranks, wanted.bundles) == ([], [{"CPU": 1, "GPU": 4}] * 2)
    assert wanted.engines == [Place(0, cpus=1, gpus=4), Place(1, cpus=1, gpus=4)]
    assert layout_apart(0, 3, 4, gpus=False).bundles == [{"CPU": 1}] * 3


def test_ranks_that_share_sequences_are_on_one_machine():
    places = [Place(bundle, cpus=1, gpus=1) for bundle in range(4)]
    ordered = by_machine(places, {0: "b", 1: "a", 2: "b", 3: "a"}, together=2)
    assert [place.bundle for place in ordered] == [1, 3, 0, 2]
    with pytest.raises(ClusterError, match=r"sequence_parallel: 2 ranks share each sequence .* placed some .* on 2;"):
        by_machine(places, {0: "a", 1: "a", 2: "a", 3: "b"}, together=2)
