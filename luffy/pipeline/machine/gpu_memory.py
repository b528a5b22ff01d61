"""The memory of a GPU as a sum of components, for the estimates of training and of generation."""

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30
FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_PROCESS_GIB = 1.5
"""Empirical allowance for a process: CUDA context, library workspaces and NCCL."""
ENGINE_PROCESS_GIB = 2.0
"""The same for a vLLM engine, with its CUDA graphs. A sleeping engine keeps it."""


@dataclass(frozen=True, slots=True)
class Component:
    """One use of a GPU's memory."""

    name: str
    gib: float
    formula: str
    """How the number is computed, in words."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Peak memory of the GPUs of one kind, by component."""

    name: str
    count: int
    components: tuple[Component, ...]
    limit_gib: float | None = None
    """Memory available to it; None: unknown."""

    @property
    def total_gib(self) -> float:
        return total_gib(self.components)

    @property
    def fits(self) -> bool:
        """Whether it fits; true if the limit is unknown."""
        return self.limit_gib is None or self.total_gib <= self.limit_gib

    def gib(self, name: str) -> float:
        """Sum over the components of that name."""
        return total_gib(component for component in self.components if component.name == name)


def total_gib(components: Iterable[Component]) -> float:
    return sum(component.gib for component in components)


def process_allowance(*, of_vllm: bool = False) -> Component:
    """Memory that a process takes before it loads a model."""
    gib = ENGINE_PROCESS_GIB if of_vllm else _PROCESS_GIB
    return Component("process", gib, f"allowance: CUDA context, NCCL{', CUDA graphs' if of_vllm else ''}")
