"""A lease keeps a second machine out; the machines are boot ids here, and the lock plays no part."""

import errno
import itertools
import threading
from pathlib import Path

from patience import wait_until

from luffy.pipeline.workspace import lease
from luffy.pipeline.workspace.lease import LEASE_FOLDER, Lease, LeaseWatch, Renewal, foreign_holder, leased
from luffy.pipeline.workspace.lock import holder_of, lock_if_free

OFTEN = Renewal(every_s=0.01)
EXPIRING = Renewal(every_s=60.0, expiry_s=0.2)


def ignored(holder):
    pass


def files(directory):
    return {path.name: path.read_bytes() for path in (directory / LEASE_FOLDER).iterdir()}


def abandon(directory, boot):
    """What a machine leaves that has lost its power."""
    with leased(directory, ignored, ignored, boot=boot):
        left = files(directory)
    for name, contents in left.items():
        (directory / LEASE_FOLDER / name).write_bytes(contents)


def in_thread(directory, boot, **how):
    """Whether that machine has waited, whether it is inside, and what ends it."""
    waited, entered, leave = threading.Event(), threading.Event(), threading.Event()

    def work():
        with leased(directory, lambda holder: waited.set(), ignored, boot=boot, **how):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return waited, entered, lambda: (leave.set(), thread.join())


def test_a_lease_expires_when_it_was_looked_at_for_long_enough_without_a_renewal():
    clock = itertools.count(0.0, 3.0)
    watch = LeaseWatch(90.0, clock=lambda: next(clock))
    first, renewed = (Lease(1, "pid 17 on west", "west", renewals=number) for number in (3, 4))
    assert not any(watch.is_expired(first) for _ in range(31))
    looks = [watch.is_expired(renewed) for _ in range(32)]
    assert looks == [False] * 31 + [True]


def test_a_disk_that_was_away_from_both_machines_expires_no_lease():
    clock = iter([0.0, 0.0, 300.0])  # the second look hung for so long, and so may the holder's renewal
    watch = LeaseWatch(90.0, clock=lambda: next(clock))
    seen = Lease(1, "pid 17 on west", "west")
    assert [watch.is_expired(seen), watch.is_expired(seen)] == [False, False]


def test_a_second_machine_waits_until_the_first_has_ended(tmp_path):
    with leased(tmp_path, ignored, ignored, boot="west", renewal=OFTEN):
        waited, entered, leave = in_thread(tmp_path, "east")
        wait_until(waited.is_set)
        assert not entered.is_set()
    wait_until(entered.is_set)
    leave()


def test_of_many_machines_that_begin_at_once_one_is_inside(tmp_path):
    inside, most, start = [], [], threading.Barrier(8)

    def work(boot):
        start.wait()
        with leased(tmp_path, ignored, ignored, boot=boot):
            inside.append(boot)
            most.append(len(inside))
            inside.remove(boot)

    threads = [threading.Thread(target=work, args=(f"machine {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert list(files(tmp_path)) == ["000008.json"]


def test_the_lease_of_a_machine_that_was_lost_is_taken_after_its_expiry_by_one_of_two(tmp_path):
    abandon(tmp_path, "west")
    several = [in_thread(tmp_path, boot, renewal=Renewal(every_s=0.01, expiry_s=0.5)) for boot in ("east", "north")]
    wait_until(lambda: any(entered.is_set() for _, entered, _ in several))
    assert all(waited.is_set() for waited, _, _ in several)
    first, second = sorted(several, key=lambda one: not one[1].is_set())
    assert not second[1].is_set()
    first[2]()
    wait_until(second[1].is_set)
    second[2]()


def test_a_lease_that_a_failing_disk_has_cut_short_is_waited_for(tmp_path):
    abandon(tmp_path, "west")
    (tmp_path / LEASE_FOLDER / "000001.json").write_bytes(b"")
    waited = []
    with leased(tmp_path, waited.append, ignored, boot="east", renewal=EXPIRING):
        assert waited == ["another machine, or until its lease expires"]


def test_on_the_same_machine_the_lock_alone_decides(tmp_path):
    abandon(tmp_path, "west")
    waited = []
    with leased(tmp_path, waited.append, ignored, boot="west"):
        assert waited == []


def test_a_holder_whose_lease_was_taken_is_told_and_cannot_take_it_back(tmp_path):
    lost = []
    with leased(tmp_path, ignored, lost.append, boot="west", renewal=OFTEN):
        abandon(tmp_path, "west")
        (name,) = files(tmp_path).keys() - {"000001.json"}
        taken = files(tmp_path)[name]
        wait_until(lambda: lost)
    assert lost[0].startswith("the stage went to ")
    assert files(tmp_path)[name] == taken
    # What the former holder wrote last is below it.
    waited = []
    with leased(tmp_path, waited.append, ignored, boot="east", renewal=EXPIRING):
        assert len(waited) == 1


def test_a_holder_that_was_suspended_for_too_long_is_told_although_nobody_has_taken_it(tmp_path, monkeypatch):
    lost, now = [], [0.0]
    monkeypatch.setattr(lease, "time_since_boot", lambda: now[0])
    with leased(tmp_path, ignored, lost.append, boot="west", renewal=Renewal(every_s=0.01, expiry_s=90.0)):
        now[0] = 91.0
        wait_until(lambda: lost)
    assert lost == ["its lease has expired"]


def test_what_another_machine_has_leased_is_in_use(tmp_path):
    assert foreign_holder(tmp_path) is None
    with leased(tmp_path, ignored, ignored, boot="west"):
        assert foreign_holder(tmp_path) == holder_of(tmp_path)
        assert holder_of(tmp_path).startswith("pid ")
        with lock_if_free(tmp_path) as is_ours:
            assert not is_ours
    assert holder_of(tmp_path) is None
    with lock_if_free(tmp_path) as is_ours:
        assert is_ours


def test_a_lease_that_is_deleted_while_it_is_read_over_nfs_is_no_error(tmp_path, monkeypatch):
    abandon(tmp_path, "west")
    read, stale = Path.read_bytes, [OSError(errno.ESTALE, "Stale file handle")]

    def read_bytes(path):
        if stale:
            raise stale.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert foreign_holder(tmp_path) is not None
    assert not stale
