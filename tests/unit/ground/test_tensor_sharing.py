"""Tensors that other processes open."""

import base64
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from support.patience import ran

from luffy.tensor_sharing import SharedTensor, SharingFailed

ADDS_ONE = """
import base64, pickle, sys
shared = pickle.loads(base64.b64decode(sys.argv[1]))
with shared.opened() as tensor:
    print(tensor.sum().item())
    tensor += 1
"""


def test_another_process_reads_and_writes_the_same_memory():
    tensor = torch.arange(6, dtype=torch.uint8)[2:]
    encoded = base64.b64encode(pickle.dumps(SharedTensor.of(tensor))).decode()
    done = ran([sys.executable, "-c", ADDS_ONE, encoded])
    assert done.stdout.strip() == "14", done.stderr
    assert tensor.tolist() == [3, 4, 5, 6]


def test_memory_that_cannot_be_opened_is_named():
    shared = SharedTensor.of(torch.zeros(3))
    elsewhere = replace(shared, gpu="GPU-elsewhere")
    lost = replace(shared, handle=shared.handle.replace(b"/torch_", b"/trrch_"))
    for cannot, why in ((elsewhere, "does not see GPU GPU-elsewhere"), (lost, "trrch")):
        with pytest.raises(SharingFailed, match=why), cannot.opened():
            pass
