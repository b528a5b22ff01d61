"""What a sandbox's configuration may say, and how a mistake is named."""

import pytest
from pydantic import ValidationError

from luffy.config.sandbox import SandboxConfig, SandboxLimits


def test_the_default_is_isolated() -> None:
    config = SandboxConfig()
    assert (config.kind, config.unsafe_local, config.packages) == ("bubblewrap", False, ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "unsafe_local"}, "accept that with unsafe_local: true"),
        ({"unsafe_local": True}, "unsafe_local has no effect with kind: bubblewrap"),
        ({"kind": "docker"}, "Input should be 'bubblewrap' or 'unsafe_local'"),
        ({"packages": ("../numpy",)}, "String should match pattern"),
        ({"timeout": 5}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SandboxConfig.model_validate(config)


def test_isolation_is_given_up_only_in_so_many_words() -> None:
    assert SandboxConfig(kind="unsafe_local", unsafe_local=True).kind == "unsafe_local"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"call_cpu_s": 121.0}, "call_cpu_s is larger than session_cpu_s"),
        ({"call_wall_s": 60.0, "session_wall_s": 59.0}, "call_wall_s is larger than session_wall_s"),
        ({"shown_output_bytes": 65, "printed_bytes": 64}, "shown_output_bytes is larger than printed_bytes"),
        ({"memory_mib": 0}, "greater than or equal to 64"),
        ({"call_cpu_s": float("inf")}, "finite number"),
    ],
)
def test_limits_fit_each_other(limits: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SandboxLimits.model_validate(limits)


def test_a_config_survives_its_own_json() -> None:
    config = SandboxConfig(packages=("numpy",), limits=SandboxLimits(memory_mib=1024))
    assert SandboxConfig.model_validate_json(config.model_dump_json()) == config
