import pytest

from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.errors import ClusterError


def member(log):
    return Member("trainer rank 1", handle=None, log=log)


def test_who_died_is_named_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "rank_1.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    first, *tail = str(MemberDied(member(log), "died")).splitlines()
    assert first == f"trainer rank 1 died; the same command resumes the stage. The end of {log}:"
    assert tail == [f"line {i}" for i in range(85, 100)]


@pytest.mark.parametrize(("text", "said"), [(None, "(no log at "), ("", "(the log is empty)")])
def test_a_log_that_says_nothing_is_no_second_error(tmp_path, text, said):
    log = tmp_path / "rank_1.log"
    if text is not None:
        log.write_text(text)
    assert said in str(MemberDied(member(log), "died"))


def test_a_closed_cluster_is_waited_for_no_longer(tmp_path):
    supervisor = Supervisor()
    supervisor.close()
    with pytest.raises(ClusterError, match="was closed"):
        supervisor.answers([member(tmp_path)], ["a reference"], timeout_s=60)
