"""The judge, against a real endpoint on this machine."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from synthetic.endpoint import CHAT, Answer, Endpoint, Reply, completion

from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    CustomGrader,
    GraderKind,
    GradingConfig,
    JudgeGrader,
    MathGrader,
    WeightedGrader,
    WeightedPart,
)
from luffy.errors import ConfigError, LostError, LuffyError
from luffy.grading.kinds import conclude, leaves
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest, Problem, require_verdicts
from luffy.types import Outcome

DRIPS = Reply(drips=True)
IS_CUT = completion("At first sight VERDICT: CORRECT, yet", "length")


def says(*texts: str) -> Answer:
    """The texts one after the other, the last of them for ever."""
    left = list(texts)
    return lambda path, body: completion(left.pop(0) if len(left) > 1 else left[0])


def always(reply: Reply) -> Answer:
    return lambda path, body: reply


def fails(status: int) -> Answer:
    return always(Reply(status, b"out of order"))


TOO_LONG = always(Reply(body=b" " * (2 << 20)))


def prompts(endpoint: Endpoint) -> list[str]:
    return [body["messages"][0]["content"] for _, body in endpoint.asked]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint(says("VERDICT: CORRECT"), (CHAT,))) as started:
        yield started


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luffy.http_client._FIRST_DELAY_S", 0.01)


def judge(endpoint: Endpoint, response: str, cache: Path | None = None, **settings: object) -> Grade:
    kind = JudgeGrader.model_validate({"url": f"{endpoint.url}/v1", "model": "m", "timeout_s": PATIENCE_S, **settings})
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind), cache) as pool:
        return pool.grade([GradeRequest(response, "four", Problem("2 + 2?"))])[0]


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("Same thing.\nVERDICT: CORRECT", Outcome.CORRECT),
        ("VERDICT: INCORRECT", Outcome.WRONG),
        ("VERDICT: CORRECT? No.\nVERDICT: **INCORRECT**", Outcome.WRONG),
        ("verdict: correct", Outcome.CORRECT),
        ("<think>VERDICT: CORRECT?</think>VERDICT: INCORRECT", Outcome.WRONG),
        ("<think>VERDICT: CORRECT?</think>I cannot say", Outcome.UNPARSABLE),
        ("<think>VERDICT: CORRECT?", Outcome.UNPARSABLE),
    ],
)
def test_the_last_verdict_counts(endpoint: Endpoint, reply: str, outcome: Outcome) -> None:
    endpoint.answer = says("hm", reply)  # the first attempt has none
    grade = judge(endpoint, "<think>5</think>It is 4")
    assert (grade.outcome, grade.extracted) == (outcome, "It is 4")
    assert grade.seconds > 0


@pytest.mark.parametrize(
    ("reply", "outcome", "reward"),
    [
        ("VERDICT: 0.7", Outcome.CORRECT, 0.7),
        ("VERDICT: **0.25**.", Outcome.WRONG, 0.25),
        ("VERDICT: .5", Outcome.CORRECT, 0.5),
        ("VERDICT: 1", Outcome.CORRECT, 1.0),
        *((f"VERDICT: {word}", Outcome.UNPARSABLE, 0.0) for word in ("1.5", "-0.5", "70%", "7/10", "CORRECT", "nan")),
    ],
)
def test_a_graded_verdict_is_the_reward(endpoint: Endpoint, reply: str, outcome: Outcome, reward: float) -> None:
    endpoint.answer = says(reply)
    grade = judge(endpoint, "4", correct_from=0.5, prompt="{reference} {answer} VERDICT: <0 to 1>", retries=0)
    assert (grade.outcome, grade.reward, grade.is_unjudged) == (outcome, reward, False)


def test_the_judge_sees_the_final_reply_the_question_and_the_reference(endpoint: Endpoint) -> None:
    judge(endpoint, "<think>secret</think>It is {reference}, VERDICT: CORRECT")
    (prompt,) = prompts(endpoint)
    assert "secret" not in prompt
    assert "It is {reference}, VERDICT: CORRECT" in prompt
    assert "2 + 2?" in prompt
    assert "[Reference]\nfour" in prompt


@pytest.mark.parametrize("response", ["<think>4", "<think>4</think> "])
def test_without_a_final_reply_there_is_no_request(endpoint: Endpoint, response: str) -> None:
    assert judge(endpoint, response).outcome is Outcome.NO_ANSWER
    assert endpoint.asked == []


def test_verdicts_are_kept_on_disk_and_failures_are_not(endpoint: Endpoint, tmp_path: Path) -> None:
    for answer, outcome in ((fails(500), Outcome.CRASHED), (always(IS_CUT), Outcome.UNPARSABLE)):
        endpoint.answer = answer
        assert judge(endpoint, "4", tmp_path, retries=0).outcome is outcome
    assert list(tmp_path.iterdir()) == []
    endpoint.answer = says("VERDICT: CORRECT")
    assert judge(endpoint, "4", tmp_path).outcome is Outcome.CORRECT
    endpoint.answer = says("VERDICT: INCORRECT")
    again = judge(endpoint, "4", tmp_path)
    assert (again.outcome, again.reason) == (Outcome.CORRECT, "the judge says CORRECT")
    assert judge(endpoint, "4", tmp_path, model="another").outcome is Outcome.WRONG
    assert len(endpoint.asked) == 4


def test_a_different_endpoint_gets_a_new_request(endpoint: Endpoint, tmp_path: Path) -> None:
    assert judge(endpoint, "4", tmp_path).outcome is Outcome.CORRECT
    with closing(Endpoint(says("VERDICT: INCORRECT"), (CHAT,))) as other:
        assert judge(other, "4", tmp_path).outcome is Outcome.WRONG


@pytest.mark.parametrize("answer", [fails(503), always(DRIPS), always(Reply(body=b"[]"))])
def test_an_unreachable_judge_leaves_the_answer_unjudged(endpoint: Endpoint, answer: Answer) -> None:
    endpoint.answer = answer
    alone = JudgeGrader(url=f"{endpoint.url}/v1", model="m", timeout_s=0.3, retries=0)
    combined = BothGrader(of=(MathGrader(), alone))
    with GraderPool(1, PATIENCE_S) as pool:
        grades = [pool.grade_one(r"\boxed{4}", "4", kind=kind) for kind in (alone, combined)]
        wrong = pool.grade_one(r"\boxed{5}", "4", kind=combined)
    assert [grade.is_unjudged for grade in grades] == [True, True]
    assert wrong.outcome is Outcome.WRONG
    assert not wrong.is_unjudged


MATH, JUDGE = MathGrader(), JudgeGrader(url="http://judge", model="m")


def weighted(*parts: GraderKind) -> WeightedGrader:
    return WeightedGrader(parts=tuple(WeightedPart(weight=0.5, grader=part) for part in parts))


@pytest.mark.parametrize(
    ("kind", "math", "is_unjudged"),
    [
        (AnyGrader(of=(MATH, JUDGE)), Outcome.WRONG, True),
        (AnyGrader(of=(MATH, JUDGE)), Outcome.CORRECT, False),
        (AnyGrader(of=(BothGrader(of=(MATH, MATH)), JUDGE)), Outcome.NO_ANSWER, True),
        (BothGrader(of=(MATH, JUDGE)), Outcome.CORRECT, True),
        (BothGrader(of=(MATH, JUDGE)), Outcome.WRONG, False),
        (AnyGrader(of=(JUDGE, MATH)), Outcome.CORRECT, False),
        (BothGrader(of=(JUDGE, MATH)), Outcome.WRONG, False),
        (weighted(MATH, JUDGE), Outcome.CORRECT, True),
        (weighted(MATH, JUDGE), Outcome.WRONG, True),
        (AnyGrader(of=(weighted(MATH, JUDGE), MATH)), Outcome.WRONG, True),
        (weighted(MATH, BothGrader(of=(MATH, JUDGE))), Outcome.WRONG, False),
    ],
)
def test_a_combination_that_a_missing_verdict_could_decide_has_none(kind, math, is_unjudged):
    missing = Grade(Outcome.CRASHED, "4", "judge: no connection", is_unjudged=True)
    found = [missing if isinstance(leaf, JudgeGrader) else Grade(math, "4", "by math") for leaf in leaves(kind)]
    grade = conclude(kind, iter(found))
    assert grade.is_unjudged is is_unjudged
    assert (grade.outcome is Outcome.CRASHED) is is_unjudged


def test_a_verdict_and_another_graders_crash_are_not_unjudged(endpoint: Endpoint) -> None:
    def judged(reply: str) -> Grade:
        endpoint.answer = says(reply)
        return judge(endpoint, "4", retries=0)

    found = [judged(reply) for reply in ("VERDICT: CORRECT", "VERDICT: INCORRECT", "hm")]
    raises = CustomGrader(function="json:loads_of_this", version=1)
    kind = BothGrader(of=(JudgeGrader(url=f"{endpoint.url}/v1", model="m"), raises))
    parts = (found[0], Grade(Outcome.CRASHED, None, "json:loads_of_this raised ValueError: judge: x"))
    found.append(conclude(kind, iter(parts)))
    assert found[3].outcome is Outcome.CRASHED
    assert not any(grade.is_unjudged for grade in found)


def test_a_damaged_cache_entry_is_requested_again(endpoint: Endpoint, tmp_path: Path) -> None:
    judge(endpoint, "4", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert judge(endpoint, "4", tmp_path).outcome is Outcome.CORRECT
    assert json.loads(file.read_text()) == {"verdict": "CORRECT"}


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (says("I cannot say"), Outcome.UNPARSABLE, "judge: the reply holds no verdict"),
        (always(IS_CUT), Outcome.UNPARSABLE, "judge: the reply is cut at max_tokens"),
        (fails(503), Outcome.CRASHED, "judge: the endpoint answers 503 Service Unavailable: out of order"),
        (always(Reply(body=b"[]")), Outcome.CRASHED, "judge: the reply is no chat completion"),
        (always(Reply(body=b"[" * 200_000)), Outcome.CRASHED, "judge: the reply is no chat completion"),
        (TOO_LONG, Outcome.CRASHED, "judge: {url}: the response is longer than 1048576 bytes"),
    ],
)
def test_failures_are_retried_up_to_the_limit_and_named(endpoint, answer, outcome, reason):
    endpoint.answer = answer
    grade = judge(endpoint, "4", retries=2)
    assert (grade.outcome, grade.reason) == (outcome, reason.replace("{url}", f"{endpoint.url}/v1"))
    assert len(endpoint.asked) == 3


def test_a_judge_that_wants_to_be_left_alone_for_a_day_is(endpoint: Endpoint) -> None:
    endpoint.answer = always(Reply(429, b"", {"Retry-After": "100000"}))
    grade = judge(endpoint, "4", retries=3)
    assert len(endpoint.asked) == 1
    with pytest.raises(LostError, match=r"have no verdict \(judge: .* 429 .*\(Retry-After: 100000\)\); kept"):
        require_verdicts([grade], "answers", "kept")


def test_a_reply_that_only_drips_is_timed_out(endpoint: Endpoint) -> None:
    endpoint.answer = always(DRIPS)
    assert judge(endpoint, "4", timeout_s=0.5, retries=1).outcome is Outcome.TIMED_OUT


def test_an_endpoint_that_is_not_there_is_named() -> None:
    kind = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=1)
    with GraderPool(1, PATIENCE_S) as pool:
        grade = pool.grade_one("4", "four", kind=kind)
    assert grade.outcome is Outcome.CRASHED
    assert "http://127.0.0.1:9/v1: no answer" in grade.reason


def test_a_refusal_is_the_users_mistake(endpoint: Endpoint) -> None:
    endpoint.answer = fails(401)
    with pytest.raises(ConfigError, match="401 Unauthorized: out of order; check url, model and api_key_variable"):
        judge(endpoint, "4")
    assert len(endpoint.asked) == 1


def test_the_key_comes_from_its_variable(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        judge(endpoint, "4", api_key_variable="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "abc")
    endpoint.key = "abc"
    assert judge(endpoint, "4", api_key_variable="JUDGE_KEY").outcome is Outcome.CORRECT


def test_requests_run_concurrently(endpoint: Endpoint) -> None:
    def slowly(path: str, body: dict) -> Reply:
        all_asked.wait(PATIENCE_S)
        return completion("VERDICT: CORRECT")

    all_asked = threading.Barrier(8)
    endpoint.answer = slowly
    kind = JudgeGrader(url=f"{endpoint.url}/v1", model="m")
    with GraderPool(1, PATIENCE_S) as pool:
        grades = pool.grade([GradeRequest(str(n), "four", kind=kind) for n in range(8)])
    assert {grade.outcome for grade in grades} == {Outcome.CORRECT}


def test_closing_the_pool_ends_a_queued_request(endpoint: Endpoint) -> None:
    endpoint.answer = always(DRIPS)
    kind = JudgeGrader(url=f"{endpoint.url}/v1", model="m", parallel=1, timeout_s=2.0, retries=0)
    pool = GraderPool(1, PATIENCE_S)
    threading.Timer(0.5, pool.close).start()
    with pytest.raises(LuffyError, match="closed"):
        pool.grade([GradeRequest(str(n), "four", kind=kind) for n in range(3)])
