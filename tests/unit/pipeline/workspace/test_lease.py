"""A lease keeps a second machine out; the machines are boot ids here, and the lock plays no part."""

import threading

from patience import wait_until

from luffy.pipeline.workspace.lease import LEASE_FILE, Lease, LeaseWatch, Renewal, leased

OFTEN = Renewal(every_s=0.01)
EXPIRING = Renewal(every_s=60.0, expiry_s=0.2)


def ignored(holder):
    pass


def abandon(directory, boot):
    """What a machine leaves that has lost its power."""
    kept = []
    with leased(directory, ignored, ignored, boot=boot):
        kept.append((directory / LEASE_FILE).read_bytes())
    (directory / LEASE_FILE).write_bytes(kept[0])


def test_a_lease_expires_when_it_was_seen_unchanged_for_long_enough():
    now = 0.0
    watch = LeaseWatch(90.0, clock=lambda: now)
    lease = Lease("pid 17 on west", "west", "a", renewals=3)
    assert not watch.is_expired(lease)
    now = 90.0
    assert not watch.is_expired(lease)
    assert not watch.is_expired(Lease("pid 17 on west", "west", "a", renewals=4))
    now = 180.5
    assert watch.is_expired(Lease("pid 17 on west", "west", "a", renewals=4))


def test_a_second_machine_waits_until_the_first_has_ended(tmp_path):
    waited, entered = threading.Event(), threading.Event()

    def on_another_machine():
        with leased(tmp_path, lambda holder: waited.set(), ignored, boot="east"):
            entered.set()

    second = threading.Thread(target=on_another_machine)
    with leased(tmp_path, ignored, ignored, boot="west", renewal=OFTEN):
        second.start()
        wait_until(waited.is_set)
        assert not entered.is_set()
    wait_until(entered.is_set)
    second.join()
    assert not (tmp_path / LEASE_FILE).exists()


def test_the_lease_of_a_machine_that_was_lost_is_taken_after_its_expiry(tmp_path):
    abandon(tmp_path, "west")
    waited = []
    with leased(tmp_path, waited.append, ignored, boot="east", renewal=EXPIRING):
        assert len(waited) == 1
    assert "or until its lease expires" in waited[0]


def test_on_the_same_machine_the_lock_alone_decides(tmp_path):
    abandon(tmp_path, "west")
    waited = []
    with leased(tmp_path, waited.append, ignored, boot="west"):
        assert waited == []


def test_a_holder_whose_lease_was_taken_is_told_and_leaves_the_new_one_alone(tmp_path):
    lost = []
    with leased(tmp_path, ignored, lost.append, boot="west", renewal=OFTEN):
        abandon(tmp_path, "west")
        taken = (tmp_path / LEASE_FILE).read_bytes()
        wait_until(lambda: lost)
    assert lost[0].startswith("pid ")
    assert (tmp_path / LEASE_FILE).read_bytes() == taken
