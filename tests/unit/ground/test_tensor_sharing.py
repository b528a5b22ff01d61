"""Tensors that other processes open, and groups of three members over gloo, one in each thread of this process."""

import base64
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.patience import PATIENCE_S, ran

from luffy.broadcast_group import BroadcastFailed, BroadcastGroup, Meeting, TensorSpec
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


CPU = torch.device("cpu")
SENT = [torch.arange(6.0).reshape(2, 3), torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor(7)]
SPECS = [TensorSpec(str(i), tuple(tensor.shape), tensor.dtype) for i, tensor in enumerate(SENT)]


@contextmanager
def group_of_three() -> Iterator[tuple[BroadcastGroup, list[BroadcastGroup], ThreadPoolExecutor]]:
    meeting = Meeting("127.0.0.1", 3, timeout_s=PATIENCE_S)
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(meeting.invitation.join, rank, CPU) for rank in (1, 2)]
        sender = meeting.lead(CPU, ["first", "second"])
        receivers = [future.result() for future in joining]
        yield sender, receivers, threads
        for group in (sender, *receivers):
            group.close()


def test_every_receiver_gets_the_tensors_of_rank_0():
    with group_of_three() as (sender, receivers, threads):
        receiving = [threads.submit(group.receive, SPECS, CPU) for group in receivers]
        sender.finish(sender.start(SENT))
        for future in receiving:
            for sent, received in zip(SENT, future.result(), strict=True):
                assert sent.dtype == received.dtype and torch.equal(sent, received)


def test_a_receiver_that_leaves_ends_the_wait_of_the_others():
    with group_of_three() as (sender, receivers, threads):
        receivers[0].close()
        staying = threads.submit(receivers[1].receive, SPECS, CPU)
        with pytest.raises(BroadcastFailed, match="a member is gone"):
            sender.finish(sender.start(SENT))
        sender.close()
        assert not sender.is_open
        with pytest.raises(BroadcastFailed, match="a member is gone"):
            staying.result()


def test_a_machine_that_cannot_be_reached_is_named():
    with pytest.raises(BroadcastFailed, match=r"192\.0\.2\.1 cannot be reached"):  # an address for documentation
        Meeting("192.0.2.1", 2, timeout_s=1)


def test_a_group_that_a_member_never_joins_fails_in_time():
    meeting = Meeting("127.0.0.1", 2, timeout_s=0.5)
    with pytest.raises(BroadcastFailed, match="a member did not join"):
        meeting.lead(CPU, ["nobody"])
