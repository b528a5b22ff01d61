"""Tensors on their way to another process: what they are, their bytes, and memory that both use without a copy.

Memory is shared on a GPU by CUDA's handles for interprocess communication (IPC), on a CPU as shared memory: by torch's
own reductions for `torch.multiprocessing`, and here in any two processes, with memory that is found by the GPU's UUID.
"""

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from luffy.errors import LuffyError, first_line

_DEVICE = 6
"""Place of the GPU's number among the arguments of torch's `rebuild_cuda_tensor`."""


class SharingFailed(LuffyError):
    """The memory cannot be given away, or not be opened where it was sent."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor without its values, which a receiver finds in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, data: Tensor) -> Tensor:
        """The tensor whose bytes `data` has (see `bytes_of`), in the same memory."""
        return data.view(self.dtype).view(self.shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The values of a tensor as one row of bytes (uint8), in the same memory if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor of another process, for one use of `opened`; that process keeps its own reference until then."""

    gpu: str | None
    """UUID of the GPU: processes may number the same GPUs differently. None: in CPU memory."""
    handle: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> "SharedTensor":
        """Share a tensor of this process; one on a CPU moves to shared memory. Raises SharingFailed."""
        before = multiprocessing.get_sharing_strategy()
        with _failing():
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            multiprocessing.set_sharing_strategy("file_system")  # descriptors only reach a process's own children
            try:
                handle = bytes(ForkingPickler.dumps(reduce_tensor(tensor)))
                return cls(_uuid(tensor.device.index) if tensor.is_cuda else None, handle)
            finally:
                multiprocessing.set_sharing_strategy(before)

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """The tensor, for the length of the block; copy what has to live longer.

        Raises SharingFailed where this process does not see the GPU or may not open the memory.
        """
        with _failing():
            rebuild, arguments = pickle.loads(self.handle)  # noqa: S301 - from a process of this stage
            if self.gpu is not None:
                indices = [index for index in range(torch.cuda.device_count()) if _uuid(index) == self.gpu]
                if not indices:
                    raise RuntimeError(f"this process does not see GPU {self.gpu}")
                arguments = (*arguments[:_DEVICE], indices[0], *arguments[_DEVICE + 1 :])
            tensor: Tensor = rebuild(*arguments)
        try:
            yield tensor
        finally:
            if tensor.is_cuda:  # the other process may release the memory after the block
                torch.cuda.current_stream(tensor.device).synchronize()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch raises RuntimeError, or a subclass, for what the system refuses
        raise SharingFailed(first_line(error)) from error
