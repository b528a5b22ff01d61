"""The budget: what is asked does not depend on how many questions are under way, and one answer at most exceeds it."""

from hypothesis import given
from hypothesis import strategies as st

from luffy.config.answers import PriceConfig, SpendingLimit
from luffy.stages.synthesis.ledger import Ledger, Usage

MOST = Usage(3, 10)


def asked(answers: list[int], limit: int, at_once: int, order: list[int]) -> tuple[int, int]:
    """Questions that are asked with up to `at_once` under way, which end in an order of their own; tokens used."""
    ledger, running, count = Ledger({"t": None}, SpendingLimit(max_tokens=limit)), list[int](), 0
    for number in range(len(answers)):
        while running and (len(running) >= at_once or ledger.may_be_spent):
            first = min(running, key=lambda each: order[each % len(order)])
            running.remove(first)
            ledger.settle("t", Usage(3, answers[first]), MOST)
        if ledger.is_spent:
            break
        ledger.reserve("t", MOST)
        running.append(number)
        count += 1
    for number in running:
        ledger.settle("t", Usage(3, answers[number]), MOST)
    return count, ledger.used["t"].total


@given(
    st.lists(st.integers(0, 10), min_size=1, max_size=30),
    st.integers(1, 200),
    st.integers(1, 8),
    st.permutations(range(8)),
)
def test_the_questions_asked_are_those_of_asking_one_by_one(answers, limit, at_once, order):
    count, used = asked(answers, limit, at_once, order)
    assert (count, used) == asked(answers, limit, 1, [0])
    assert used < limit + MOST.total
    assert count == len(answers) or used >= limit


def test_costs_follow_the_price_of_each_teacher_and_reach_the_limit():
    price = PriceConfig(prompt_per_million=1.0, completion_per_million=8.0)
    ledger = Ledger({"dear": price, "free": None}, SpendingLimit(max_cost=0.00003))
    ledger.settle("free", Usage(10**6, 10**6))
    ledger.settle("dear", Usage(6, 2))
    assert (ledger.cost("dear"), ledger.cost("free"), ledger.is_spent) == (2.2e-05, 0.0, False)
    ledger.reserve("dear", Usage(0, 1))
    assert (ledger.may_be_spent, ledger.is_spent) == (True, False)
    ledger.settle("dear", Usage(0, 1), Usage(0, 1))
    assert ledger.is_spent
