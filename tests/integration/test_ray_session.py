"""Ray as a stage starts and ends it: only its own processes."""

import subprocess
import threading

import pytest
import ray
from patience import PATIENCE_S

from luffy.cluster.ray_session import ray_session
from luffy.config.execution import RayConfig


@pytest.mark.slow
def test_a_process_that_another_thread_starts_while_ray_starts_outlives_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    others, init = [], ray.init

    def start_both(**options: object) -> object:
        others.append(subprocess.Popen(["sleep", "1000"]))
        return init(**options)

    monkeypatch.setattr(ray, "init", start_both)
    with ray_session(RayConfig(start_timeout_s=PATIENCE_S), num_actors=1):
        pass
    for thread in threading.enumerate():
        if thread.name == "ray-end":  # it kills what Ray has started
            thread.join(PATIENCE_S)
    (other,) = others
    assert other.poll() is None
    other.kill()
