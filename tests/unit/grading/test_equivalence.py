r"""The rules of equivalence one by one: what needs no worker, what is not computed at all, classes of answers that are
written in another way than their reference, expressions by their values, and sets of numbers point by point."""

import random
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import PATIENCE_S
from sympy.core.facts import InconsistentAssumptions
from sympy.core.random import rng, seed
from synthetic.answer_pairs import BUILT_FOR, answer_pairs

from luffy.grading import checks
from luffy.grading.checks import CHECKS, MATH, STRICT, run_check
from luffy.grading.equivalence import alike as rules_of_sameness
from luffy.grading.equivalence import verify
from luffy.grading.equivalence.alike import alike, conflicting
from luffy.grading.equivalence.certain import MAX_ANSWER_CHARS, refusal, settle
from luffy.grading.equivalence.expression import UnreadableError, read
from luffy.grading.equivalence.numeric import close, constant_value, proportional, same
from luffy.grading.equivalence.regions import same_regions
from luffy.grading.equivalence.statement import statement
from luffy.grading.equivalence.text import repaired
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

POWER, FACTORIAL = "a power too large to write out", "a factorial too large to write out"
TERMS, LIST, NESTED = (
    "a sum or product with more than 10000 terms",
    "a list with too many elements",
    "nested deeper than 50",
)
CERTAIN, OPEN, UNPARSABLE = Outcome.CORRECT, None, Outcome.UNPARSABLE
PAIRS = answer_pairs(BUILT_FOR)
KNOWN_MISSES = {r"n = 3, 4, 5, \ldots"}

few_examples = settings(deadline=None, max_examples=60)
decimals = st.from_regex(r"[+-]?(0{0,2}[0-9]{1,6}(\.[0-9]{0,6})?|\.[0-9]{1,6})", fullmatch=True)
integers = st.integers(0, 30)


def longest(unit):
    return (unit * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]


@pytest.mark.parametrize(("answer", "truth", "settled"), [
    ("28 percent", "28\\%", CERTAIN), ("07", "7", CERTAIN), ("52.0", "52", CERTAIN), ("-0", "0", CERTAIN),
    (".5", "0.50", CERTAIN), ("+3", "3", CERTAIN), ("$\\dfrac{1}{2}$", "\\frac{1}{2}", CERTAIN), ("11.", "11", CERTAIN),
    ("6+9 i", "6+9i", CERTAIN), ("( 3, 4 )", "(3,4)", CERTAIN), ("\\text{C}", "C", CERTAIN),
    ("32\\!348", "32348", CERTAIN), ("1 1/2", "11/2", OPEN), ("1,234", "1234", OPEN), ("50\\%", "50", OPEN),
    ("\\sin x", "\\sinx", OPEN), ("x", "y", OPEN), ("", ".", OPEN), ("٣", "3", OPEN),
    *((bracket[0] * 101 + "1" + bracket[1] * 101, "x", UNPARSABLE) for bracket in ("()", "{}", "[]")),
    (f"{longest('9')}9", "1", UNPARSABLE), (f"{longest('9')}9", f"{longest('9')}9", CERTAIN),
])  # fmt: skip
def test_what_is_certain_needs_no_worker_and_endless_answers_are_unparsable(answer, truth, settled):
    assert settle(answer, truth) is settled


@given(decimals, decimals)
def test_plain_numbers_compare_as_decimals(answer, truth):
    equal = Decimal(answer.rstrip(".")) == Decimal(truth.rstrip("."))
    assert settle(answer, truth) is (Outcome.CORRECT if equal else Outcome.WRONG)


@pytest.mark.parametrize(("reason", "answers"), [
    (POWER, ["9^{9^{9^9}}", "9^9^9^9", "9**9**9**9", "9^(9^(9^9))", r"7^{7^{7^7}} \bmod 10", "2^{10^9}"]),
    (POWER, [r"\gcd(9^{9^9},7)", longest("9^")]),
    (FACTORIAL, ["1000000000!", "(10^9)!", "((9!)!)!", "9!!!", longest("!)")]),
    ("a binomial coefficient too large to write out", [r"\binom{10^9}{5\cdot 10^8}"]),
    (TERMS, [r"\sum_{k=1}^{10^9} k^k", r"\prod_{k=1}^{10000000} k"]),
    ("a number with more than 1000 digits", ["x" + "9" * 1001]),
    (LIST, ["{" + ",".join(f"x_{{{n}}}" for n in range(200)) + "}", longest(",")]),
    (LIST, [r"\cup".join(f"({n},{n + 1})" for n in range(0, 200, 2))]),
    ("a determinant too large to expand", [r"\begin{vmatrix}" + r"\\".join("&".join("abcdefgh") for _ in range(8))]),
    ("longer than 4096 characters", ["x" * 5000]), (NESTED, ["(" * 200, longest("9^{"), longest(r"\binom{")]),
    (None, ["2^{2004}", "2^{2^{3}}", "(10^{10})^{10}", "1^{9^{9^9}}", "x^{2}", "e^{x^2}"]),
    (None, [r"\sum_{k=1}^{100} k", "10,000,000", "n! + 2^n", "9" * 1000, r"\binom{100000}{2}"]),
    (None, ["100!", "100!!", r"\frac{2008!}{3}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"]),
    (None, [longest(unit) for unit in ("9 ", r"\sum_", "1!", "&", r"\sum")]),
])  # fmt: skip
def test_answers_that_would_never_finish_are_refused_and_those_like_real_references_are_not(reason, answers):
    assert [refusal(answer) for answer in answers] == [reason] * len(answers)


def test_a_refused_answer_and_a_long_response_cost_no_worker_and_the_refusal_says_why():
    with GraderPool(1, PATIENCE_S) as pool:
        long = pool.grade([GradeRequest("word " * 200_000 + f"\\boxed{{{n}}}", "52") for n in (52, 53)])
        grade = pool.grade_one(r"\boxed{9^{9^{9^9}}}", "3")
        reference = pool.grade_one(r"\boxed{3}", "9^{9^{9^9}}")
        assert pool.grade_one(r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}").outcome is Outcome.CORRECT
        assert pool.worker_pids() == []
    assert [each.outcome for each in long] == [Outcome.CORRECT, Outcome.WRONG]
    assert (grade.outcome, grade.reason) == (UNPARSABLE, POWER)
    assert reference.reason == f"the reference: {POWER}"


@pytest.mark.parametrize(
    "unit", ["9 a", "a ", "x=", "1,", "(", "\\pm ", "and ", "k\\in", "}", "9^", "x<", "=1,", "\\cup(0,1)"]
)
def test_the_longest_answers_are_compared(unit):
    for gold in (r"x>2", "7, 4", r"\frac{\pi}{6}+k\pi, k\in\mathbb{Z}"):
        assert not alike(longest(unit), gold)
        assert not conflicting(longest(unit), gold)


@pytest.mark.parametrize("subject", sorted({pair.subject for pair in PAIRS}))
def test_right_answers_of_a_class_are_found_and_look_alikes_are_not(subject):
    pairs = [pair for pair in PAIRS if pair.subject == subject and not (pair.right and pair.answer in KNOWN_MISSES)]
    assert {pair.right for pair in pairs} == {True, False}
    assert [pair for pair in pairs if alike(pair.answer, pair.gold) != pair.right] == []


@pytest.mark.parametrize(("gold", "answer", "differ"), [
    ("7, 4", r"4 \text{ goats and } 7 \text{ helicopters}", True), ("16, 3", "w=3, d=16", True),
    (r"40 \text{ km/h}", r"40 \text{ m/s}", True), (r"3:30 \text{ p.m.}", r"3:30 \text{ a.m.}", True),
    ("3", r"3 \text{ dozen}", True), ("5", r"\text{at most } 5", True),
    # On one side only they do not.
    ("5", r"\text{the least value is } 5", False), ("13", "AM = 13", False), ("16, 3", "w=16, d=3", False),
    ("5", "5 cm", False),
])  # fmt: skip
def test_different_names_units_and_words_distinguish_equal_numbers(gold, answer, differ):
    assert conflicting(answer, gold) is differ


@few_examples
@given(st.integers(1, 7), st.integers(-20, 20), st.integers(-3, 3), st.integers(1, 3))
def test_a_family_is_its_shifts_and_its_parts(period, offset, shift, parts):
    family = rf"{period}k{offset:+d}, k\in\mathbb{{Z}}"
    pieces = ", ".join(f"{period * parts}n{offset + period * (shift + index):+d}" for index in range(parts))
    assert alike(rf"{pieces}, n\in\mathbb{{Z}}", family)
    assert not alike(rf"{pieces}, {period * parts}n{offset}.5, n\in\mathbb{{Z}}", family)
    assert not alike(rf"{2 * period}n{offset:+d}, n\in\mathbb{{Z}}", family)


@few_examples
@given(st.permutations(range(4)))
def test_named_lists_are_matched_by_name(order):
    items = [f"{name}={index + 2}" for index, name in enumerate("pqrs")]
    assert alike(", ".join(items[index] for index in order), ", ".join(items))
    assert alike(", ".join(str(index + 2) for index in order), ", ".join(items)) == (order == [0, 1, 2, 3])


BROKEN = (
    "\frac{1}{2}",
    "x \neq 3",
    "\right)",
    "2\theta",
    "\binom{5}{2}",
    "60^{\textcirc}",
    "\bar{x}",
    "\varphi",
    "\alpha",
)
WHOLE = "a\tb", "5\n", "text", "the next one", "race{", r"\frac{1}{2}", "1\nno"


def test_broken_commands_are_whole_again_and_layout_and_words_stay():
    mended = [repaired(text) for text in BROKEN]
    assert [text for text in mended if "\\" not in text or any(ord(character) < 32 for character in text)] == []
    assert [repaired(text) for text in WHOLE] == [*WHOLE]


def test_a_text_with_a_qualifying_word_states_nothing():
    texts = r"\text{more than } 15", r"\text{not } 15", "3 and half", r"\text{between 3 and 5}"
    assert [text for text in texts if statement(text) is not None] == []


@pytest.mark.parametrize(("text", "value"), [
    (r"2\frac{3}{4}", Fraction(11, 4)), ("1 1/2", Fraction(3, 2)), (r"0.1\overline{6}", Fraction(1, 6)),
    (r"\frac12", Fraction(1, 2)), (r"\binom{5}{2}", 10), ("C_{5}^{2}", 10), ("5!!", 15),
    (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)), (r"\sqrt[3]{-8}", -2), ("-3^2", -9), (r"\lfloor -\frac12 \rfloor", -1),
    (r"\gcd(12, 18)", 6), (r"\log_4 8", Fraction(3, 2)), (r"\sin 30^\circ", Fraction(1, 2)), (r"\tan^{-1} 0", 0),
    # What would take long has none.
    *((text, None) for text in (r"\sin 10^{1000}", "9^{9^{9}}", "(10^{6})!", r"\binom{10^9}{10^8}", "e^{10^{10}}")),
])  # fmt: skip
def test_constants_have_their_value(text, value):
    found = constant_value(read(text))
    assert (found is None) == (value is None)
    assert found is None or close(found, Fraction(value)) or abs(complex(found) - float(value)) == 0


AMBIGUOUS = "1/2x", r"\sin 2x/3", "3 4", r"2\frac{5}{4}", "1/2/3", r"\log_28", "x^y^z"
INVALID = "52_8", "f(x)", "a'", "x =", "", "5 apples"


@pytest.mark.parametrize("text", [*AMBIGUOUS, *INVALID])
def test_ambiguous_or_invalid_expressions_are_not_read(text):
    with pytest.raises(UnreadableError):
        read(text)


@pytest.mark.parametrize(("left", "right", "equal"), [
    (r"\cos 2x", r"1-2\sin^2 x", True), (r"\frac{(2n)!}{n!(n+1)!}", r"\frac{1}{n+1}\binom{2n}{n}", True),
    (r"\sqrt{4+2\sqrt3}", r"1+\sqrt3", True), ("e^{x+2}", "e^2e^x", True), (r"|x|^2", "x^2", True),
    (r"\gcd(n, 2n)", "n", True), (r"\sqrt{x^2}", "x", False), ("10^{40}+1", "10^{40}", False),
    ("10^{1000}+1", "10^{1000}", False), (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
    ("0.333333", r"\frac13", False), ("x+y", "x+z", False), (r"\lfloor\frac n2\rfloor", r"\lceil\frac n2\rceil", False),
    ("3.141592653589793238462643383279", r"\pi", False),
])  # fmt: skip
def test_equal_expressions_are_the_same_and_different_ones_are_not(left, right, equal):
    assert same(read(left), read(right)) is equal


@few_examples
@given(integers, integers, integers, st.integers(1, 30))
def test_arithmetic_is_exact(a, b, c, d):
    written = rf"\frac{{{a}-{b}\cdot {c}}}{{{d}}}+({a}-{c})^2-{b}/{d}"
    assert constant_value(read(written)) == Fraction(a - b * c, d) + (a - c) ** 2 - Fraction(b, d)


@few_examples
@given(integers, integers, st.integers(1, 5))
def test_polynomials_are_the_same_only_with_equal_coefficients(a, b, c):
    factors, expanded = read(f"(x+{a})(x-{b})"), read(f"x^2+{a}x-{b}x-{a * b}")
    assert same(factors, expanded)
    assert not same(factors, read(f"x^2+{a}x-{b}x-{a * b}+{c}"))
    assert proportional(read(f"{c}(x+{a}y)"), read(f"{c + 1}(x+{a}y)"))


intervals = st.tuples(st.integers(-9, 9), st.integers(1, 9), st.booleans(), st.booleans()).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])  # ends, and whether each belongs to it
)


def in_brackets(low, high, left, right):
    return f"{'[' if left else '('}{low},{high}{']' if right else ')'}"


def as_inequality(low, high, left, right):
    below, above = (r"\le" if closed else "<" for closed in (left, right))
    return f"{low} {below} x {above} {high}"


def holds(interval, point):
    low, high, left, right = interval
    return low < point < high or (left and point == low) or (right and point == high)


@few_examples
@given(st.lists(intervals, min_size=1, max_size=3), st.lists(intervals, min_size=1, max_size=3))
def test_unions_of_the_same_points_are_equal(one, other):
    points = [Fraction(number, 2) for number in range(-40, 41)]
    equal = all(any(holds(a, point) for a in one) == any(holds(b, point) for b in other) for point in points)
    left = "\\cup".join(in_brackets(*interval) for interval in one)
    right = " \\text{ or } ".join(as_inequality(*interval) for interval in other)
    assert same_regions(left, right) is equal


OUTSIDE = "(-\\infty,%d)\\cup(%d,\\infty)", "x<%d \\text{ or } x>%d", "\\{x \\mid x<%d \\text{ or } %d<x\\}"


@pytest.mark.parametrize(("left", "right", "same"), [
    *((one % (-1, 2), other % (-1, high), high == 2) for one in OUTSIDE for other in OUTSIDE for high in (2, 3)),
    (r"\mathbb{R}\setminus\{0,1\}", r"(-\infty,0)\cup(0,1)\cup(1,\infty)", True),
    (r"\text{all real numbers except } 2", r"x \ne 2", True), (r"\mathbb{R}^{+}", r"(0,\infty)", True),
    (r"[\sqrt2, 3)", r"3 > x \ge 2^{1/2}", True), (r"\{n\in\mathbb{Z} : 1\le n\le 3\}", r"\{3,1,2\}", True),
    ("[a, 2a)", r"a \le x < a+a", True),
    # Not clearly sets.
    ("(2,3)", "(2,3)", None), ("2, 3", "x > 2", None), ("x > 2, x < 5", "(2,5)", None), ("x^2 > 4", r"x>2", None),
    ("e < 3", "x<3", None),
])  # fmt: skip
def test_equal_sets_are_told_from_texts_that_are_left_undecided(left, right, same):
    assert same_regions(left, right) is same


def test_a_contradiction_of_sympys_is_deduced_again_in_another_order_and_one_that_stays_is_raised(monkeypatch):
    """Its deductions run in a random order, some of which contradict themselves: no verdict hangs on the order."""

    def check(answer, gold, context):
        if contradictions:
            raise contradictions.pop()
        return Outcome.WRONG, str(rng.random()), None

    monkeypatch.setitem(CHECKS, "math", check)
    drawn = []
    for times in (0, 0, 2):
        contradictions = [InconsistentAssumptions({}, "even", True)] * times
        seed(random.randrange(1 << 30))  # whatever was graded before
        outcome, reason, _ = run_check("math", "2\n0", "47", "")
        assert outcome is Outcome.WRONG
        drawn.append(reason)
    assert drawn[0] == drawn[1] != drawn[2]
    contradictions = [InconsistentAssumptions({}, "even", True)] * 100
    with pytest.raises(InconsistentAssumptions):
        run_check("math", "2\n0", "47", "")


TABLES = {
    "RULES": (rules_of_sameness, rules_of_sameness.RULES),
    "CONFLICTS": (rules_of_sameness, rules_of_sameness.CONFLICTS),
    "GUARDS": (verify, verify.GUARDS),
}
STEPS = {  # in the place of a step
    "by_label": lambda *pair: pair,
    "unadorned": lambda text: text,
    "_by_money": lambda *pair: None,
    "currencies_differ": lambda *pair: False,
    "without_upright_units": lambda *pair: pair,
    "with_primes": lambda *pair: pair,
    "_without_unit_letter": lambda *pair: pair,
    "_by_text": lambda *pair: None,
    "_are_small_and_apart": lambda *parsed: False,
    "_are_other_words": lambda *pair: False,
    "same_phrases": lambda *pair: False,
    "same_families": lambda *stated: None,
    "same_statements": lambda *stated: False,
}
DECIDED = [  # rule, grader, reference, answer, whether it is right
    ("RULES._junctions_agree", MATH, r"p \land q", r"p \lor q", False),
    ("RULES.same_moments", MATH, "15:30", r"3:30\text{ PM}", True),
    ("RULES._ratios", MATH, "3:4", r"3\text{ to }4", True),
    ("RULES.same_cases", MATH, r"\begin{cases} 1 & x > 0 \\ 0 & x \le 0 \end{cases}",
     r"\begin{cases} 0, & x \leq 0, \\ 1, & x > 0. \end{cases}", True),
    ("RULES.same_regions", MATH, r"b \leqslant -4 \text{ or } b = 3", r"(-\infty, -4] \cup \{3\}", True),
    ("RULES.same_residues", MATH, r"n \equiv 1 \pmod 3", "n=3k+1", True),
    ("RULES._phrases", MATH, r"\text{infinitely many solutions}", r"\infty", True),
    ("RULES._statements", MATH, "5", "5 cm", True),
    ("CONFLICTS.currencies_differ", STRICT, r"\$5", r"5\text{ cents}", False),
    ("CONFLICTS._are_at_other_times", MATH, "2024-01-05", "2024-05-01", False),
    ("CONFLICTS._are_other_ratios", MATH, "1:2:3", "1:3:2", False),
    ("CONFLICTS._are_qualified", STRICT, "5", r"5 \text{ less}", False),
    ("CONFLICTS._are_told_otherwise", MATH, r"5 \text{ out of } 7", r"7 \text{ out of } 5", False),
    ("CONFLICTS._are_other_words", MATH, "ABC", "BCA", False),
    ("CONFLICTS._is_wrong_arithmetic", MATH, "42", "43=42", False),
    ("CONFLICTS._statements_contradict", MATH, "5,5,6", "5,6,6", False),
    ("GUARDS._brackets_differ", MATH, "(0,1)", r"\{0,1\}", False),
    ("GUARDS._bases_differ", MATH, "101_2", "101_3", False),
    ("GUARDS._primes_differ", MATH, "y'", "y''", False),
    ("GUARDS._symbols_differ", MATH, "2R", "2r", False),
    ("by_label", MATH, r"\text{(C)}", "C. 12", True),
    ("unadorned", MATH, "36", r"\textcolor{red}{36}", True),
    ("_by_money", MATH, "0.75", r"75\text{ cents}", True),
    ("currencies_differ", MATH, r"\$18", "€18", False),
    ("without_upright_units", MATH, "7.6", r"7.6\text{ Z}", True),
    ("with_primes", MATH, r"\frac{dy}{dx}=x", "y'=x", True),
    ("_without_unit_letter", MATH, "5", "5m", True),
    ("_by_text", MATH, "12.5", r"12.5\%", True),
    ("_are_small_and_apart", MATH, r"\prod_{k=1}^{20} \frac{1}{k}", r"\prod_{k=1}^{21} \frac{1}{k}", False),
    ("_are_other_words", MATH, "dog", "god", False),
    ("same_phrases", MATH, r"\varnothing", r"\text{No solutions exist}", True),
    ("same_families", MATH, r"\frac{\pi}{6} + k\pi", r"-\frac{5\pi}{6} + n\pi", True),
    ("same_statements", MATH, "f(x) = 2x + 1", "f(n) = 2n + 1", True),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "check", "gold", "answer", "is_right"), DECIDED, ids=[row[0] for row in DECIDED])
def test_each_rule_and_guard_decides_a_pair_that_no_other_does(monkeypatch, rule, check, gold, answer, is_right):
    assert (run_check(check, answer, gold, "")[0] is Outcome.CORRECT) is is_right
    table, _, name = rule.rpartition(".")
    if table:
        module, rules = TABLES[table]
        monkeypatch.setattr(module, table, tuple(each for each in rules if each.__name__ != name))
    else:
        for module in (checks, verify, rules_of_sameness):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, STEPS[name])
    assert (run_check(check, answer, gold, "")[0] is Outcome.CORRECT) is not is_right


def test_no_rule_is_without_such_a_pair():
    in_tables = {f"{name}.{rule.__name__}" for name, (_, rules) in TABLES.items() for rule in rules}
    assert {rule for rule, *_ in DECIDED} == in_tables | set(STEPS)
