"""`execution.cpu_instructions` reaches torch, whether it is loaded before the stage is told or afterwards."""

import subprocess
import sys

import pytest
import torch

from luffy.config.execution import ExecutionConfig
from luffy.errors import UserError
from luffy.stages import program

TOLD = "from luffy.stages.program import _set_up_cpu; from luffy.config.execution import ExecutionConfig; " \
    "_set_up_cpu(ExecutionConfig(cpu_instructions={instructions!r})); "  # fmt: skip
ASKED = "print(torch.backends.cpu.get_cpu_capability())"
MULTIPLIED = "torch.set_num_threads(1); torch.manual_seed(0); x = torch.randn(300, 300); " \
    "print(torch.softmax(x @ x, 1).double().sum(0).norm().item().hex())"  # fmt: skip
pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs a CPU with AVX2"
)


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_torch_uses_what_is_chosen_to_the_same_bits_in_both_orders():
    first, then = (
        said(f"{before}{TOLD.format(instructions='avx2')}import torch; {ASKED}; {MULTIPLIED}").split()
        for before in ("", "import torch; ")
    )
    assert first == then and first[0] == "AVX2"
    for before in ("", "import torch; "):
        native = said(f"{before}{TOLD.format(instructions='native')}import torch; {ASKED}")
        assert native == torch.backends.cpu.get_cpu_capability()


def test_a_process_that_has_chosen_already_is_refused(monkeypatch):
    for name in program._AVX2:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(UserError, match="torch has already chosen another"):
        program._set_up_cpu(ExecutionConfig(cpu_instructions="avx2"))
