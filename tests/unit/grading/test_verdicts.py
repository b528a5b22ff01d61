r"""What this grader says where graders disagree, and why; `math` and `math_strict` side by side.

Wrong accepted by the references: number bases, tiny numbers (they round to six decimals), kinds of bracket, units,
prose that shares a number, `R` for `r`, primes, repeated elements. Right refused by them: layout and Unicode, decimals
that the reference has rounded, inequalities for intervals.
"""

import pytest

from luffy.config.grading import GraderKind, MathGrader, StrictMathGrader
from luffy.grading.equivalence.certain import by_label
from luffy.grading.equivalence.text import unadorned
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

MATH, STRICT = MathGrader(), StrictMathGrader()
VERDICTS = [  # reference, answers that both accept, answers that both refuse
    (r"\frac{dy}{dx}=x", [], [r"\frac{dx}{dy}=x", r"\frac{dy}{dt}=x"]),
    ("1200", ["1,200 people"], ["1,300 people", "1,200 million"]),
    (r"\sqrt{17}", ["sqrt{17}"], ["sqrt{19}"]),
    ("(0,1)", [], [r"\{0,1\}", "(1,0)", "[0,1]"]),
    (r"\frac13", [], ["0.333"]),  # an exact reference wants an exact answer, or one that is right to six decimals
    ("0.50", [], ["0.501"]),  # decimals against a decimal: as they stand
    ("1.2", [], [r"\frac{7}{6}"]),  # two digits say too little of what was rounded
    ("1010_2", [], ["10"]),  # a value for a numeral: the problem asked for one of them
    ("5", ["5 🎉", "5\x00", "5 cm", "**5", "**5** cm", r"5 \text{ men}", r"5\text{ m}"], [r"\infty", r"\{\}"]),
    (r"\infty", ["∞"], ["5"]),
    ("2^{100}", [r"2^{99} \cdot 2"], ["2^{100}+1"]),
    ("2 m, 3 cm", ["2 m,3 cm"], ["3 m, 2 cm"]),
    (r"\pi(R^2-r^2)", [r"\pi(R-r)(R+r)"], ["0", r"\pi(r^2-R^2)"]),
    ("3", ["３", "٣", "3\u200b", "x=3"], ["3xyz"]),
    ("5,5,6", ["6,5,5"], ["5,6,6"]),
    (r"5\text{ feet } 3\text{ inches}", [], [r"5\text{ feet } 4\text{ inches}", "5"]),
    (r"10\text{ N}", ["10"], [r"10\text{ J}"]),
    (r"\text{three}", [], ["3"]),  # words for numbers are not read
    ("1,2,3", ["3,2,1"], []),  # without brackets it is a list of solutions, in any order
    # labels of options
    ("C", [r"\text{(C) }12", r"\textbf{(C)}\ 12", r"\textbf{(C) \frac{1}{2}}", "C: 12"], ["B. 12", "A, C"]),
    ("C", [], [r"\text{A or C}", r"(C)\ 12 \text{ or } (D)\ 13", "C-12", "(C) + 12", "(C) - 12", "C(12)", "12C"]),
    ("C", [], ["C:12", r"(C) \cup (D)", "C_1"]),
    (r"\text{(C)}", ["C. 12", "C) 12", r"(C)\ \frac{1}{2}", r"\text{Option C}", "C"], ["12", "D"]),
    (r"\text{(C)}", [], [r"\text{(C) is wrong}", r"\text{not (C)}", "A. B. C"]),
    (r"\textbf{(C)}\ 12", ["C", "(C)", "12", r"\text{(C) }12", r"\frac{24}{2}"], ["B", "13", r"\textbf{(B)}\ 12"]),
    (r"\textbf{(C)}\ 12", [], [r"\textbf{(C)}\ 13", "c+12"]),
    ("12", ["A) 12", "C. 12", "C: 12", r"\textbf{(C)}\ 12"], ["A) 13", "F. 12", "A. 12 or 13", "C"]),
]
SAME = [  # reference, answer
    ("70000", "70,000 dollars"), ("1200 books", "1,200 books"), (r"\frac{\sqrt{17}}{2}", "frac{sqrt{17}}{2}"),
    ("6+9i", "6+9 i"), ("11", "11."), (r"1\,234", "1234"), (r"(3,\frac{\pi}{2})", "(3,pi/2)"),
    (r"\sqrt{2}\pi", "√2π"), ("120000", "1.2e5"), ("73", "**73**"), ("11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"\sqrt{2}", "sqrt(2)"), ("(7,11),(11,7)", "(11,7) or (7,11)"), ("x^2", "x²"), (r"\frac12", "½"),
    ("30", r"30^\circ"), ("1.5", r"1\frac12"), ("10000", "10^4"), (r"\frac{1}{2}", "0.5"),
    ("12.25", r"\frac{49}{4}"), ("8", "2**3"), ("x^2+y^3", "x ** 2 + y ** 3"), ("x^{-1}", "x**-1"),
    ("x^{n+1}", "x**(n+1)"), ("7", "x = **7**"), ("1,000", "1,000 cm"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1 \\ 2\end{pmatrix}"),
    (r"5\text{ cm}", r"5\ \text{cm}"), ("-1", r"e^{i\pi}"), (r"e^{i\pi}", "-1"),
    (r"\frac{Mm}{M+m}", r"\frac{mM}{m+M}"), (r"\text{Red}", r"\text{red}"), ("12", r"12 \text{ sq ft}"),
    (r"\sin 30^\circ", r"\frac12"), (r"\sum_{i=1}^{10} i", "55"), (r"\textbf{(C) }12", "12"),
    (r"\mathrm{(C)}\ 12", "12"), (r"(C)\ 12", "12"), ("C. 12", "12"), (r"\textbf{(C)}\ \frac{1}{2}", "0.5"),
    (r"\textbf{(C)} -12", "-12"),
]  # fmt: skip
OTHER = [
    (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"), ("52_8", "528"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("2^{-99}", "2^{-98}"), ("0.0000001", "0.0000002"), ("1e-9", "2e-9"),
    (r"\{0,1\}", "(0,1)"), ("5 cm", "5 km"), ("a+c", "d+h"), ("(1,234)", "1234"), ("25", r"25 \text{ or } 26"),
    (r"\text{40 chocolate, 60 lollipop}", r"\text{40 chocolate, 50 hard}"), (r"3^x \ge x^2", r"3^x \ge x"),
    ("3x-y+13=0", "3x+4y+14=0"), ("4", r"4\sqrt(2)"), ("1-1/e", "1+1/e"), (r"\pi", "3.14159"), ("101_2", "101_3"),
    (r"-\infty", r"\infty"), ("10^{40}+1", "10^{40}"), ("23", "2**3"), ("24", "2**(3(4))"), ("64", "2**3**2"),
    (r"\text{2 m, 3 cm}", r"\text{3 m, 2 cm}"),
    (r"\begin{pmatrix}1 \\ 2\end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}"), ("5 hours", "5 minutes"),
    ("3 feet", "3 inches"), (r"3 \text{ feet}", r"3 \text{ inches}"), ("5 cm^2", "5 km^2"), (r"\{\}", r"\{1, 2\}"),
    (r"\frac{R+r}{2}", "r"), ("2R", "2r"), (r"\lambda+\Lambda", r"2\lambda"), ("a'-a", "0"), ("y''+y=0", "2y=0"),
    ("2ab", "2"), ("x^2 yz", "x^2"), ("2 m n", "2"), (r"2\pi h", r"2\pi"), ("ABCD", "DCBA"), ("ABC", "ACB"),
    (r"\sin 1", r"\sin 1^\circ"), (r"3\left(\frac12\right)+0", r"3\frac12"), ("x > 2, x < 5", "x > 2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (r"p \land q", r"p \lor q"),
    (r"2\text{ hours and }30\text{ minutes}", r"30\text{ minutes and }2\text{ minutes}"),
    (r"\$5", r"5\text{ cents}"), (r"100^\circ\text{C}", r"100^\circ\text{F}"),
    (r"\text{point A}", r"\text{point B}"), (r"\text{line } m", r"\text{line } n"),
    (r"\text{A is taller}", r"\text{C is taller}"), ("(A)x+1", "A"), ("(A) + 1", "A"), ("A:5", "A"), ("A", "(B)"),
]  # fmt: skip
OF_MATH_ALONE = [  # reference, answers that `math_strict` refuses
    ("50", [r"50\%"], []),  # references to "what percentage" leave the sign out more often than not
    ("52_8", ["52"], []),  # the base stands in the question
    ("(0,1)", ["0,1"], []),
    (r"\frac13", ["0.333333"], []),
    (r"\frac{\pi}{2}", [r"90^\circ"], []),  # beside pi a degree is pi/180
    ("30.52", [r"\frac{1587}{52}"], []),  # the reference has been rounded, the answer has not
    (r"(2,\infty)", ["x>2"], []),
    ("(2,3)", ["2<x<3"], []),
    ("16, 3", ["w=16, d=3"], []),
    ("5 hours", ["5 hour"], []),
    ("3 feet", ["3 ft"], []),
    ("5", ["5m"], []),  # a length; after 2 the letters of 2ab are variables
    ("A", ["a"], []),  # an option's label
    (r"\text{even}", [r"n \text{ is even}"], []),
    (r"7\text{ a.m.}", [r"7 \text{ AM}"], []),
    (r"n = 2^k, k\ge 0", ["2^k"], []),
]
PRESENTATION = [  # reference, answers that `math` accepts, answers that it refuses
    ("12", [r"\textbf{(C)}\ 12", r"\textbf{(C) } 12", r"\textbf{(C) 12}", r"\text{(C) }12", r"\mathrm{(E)}\ 12"], []),
    ("12", [], [r"\textbf{(C)}\ 13", r"\textbf{(C)}\ -12", r"\textbf{(C)} + 12", r"\textbf{(C)} or 12"]),
    ("12", [], [r"\textbf{(C)} \text{ or } 12", r"\textbf{(C)} \cdot 12", r"\textbf{(C)}\ 12, \textbf{(D)}\ 13"]),
    ("12", [], [r"\textbf{(C)}", r"\textbf{(F)}\ 12"]),
    (r"\frac12", [r"\textbf{(A)}\ \frac{1}{2}"], []),
    ("-12", [r"\textbf{(A)}\ -12"], []),
    ("36", [r"\textcolor{red}{36}", r"\color{red}{36}", r"\color{blue}36", r"\large 36", r"{\Large 36}"], []),
    ("36", [r"\textcolor{red}{\large{36}}", r"\underline{36}", r"36 \checkmark", r"\color{green}{36}\ \checkmark"], []),
    ("36", [], [r"\textcolor{red}{-}36", r"\underline{36}5", r"\checkmark", r"\large"]),
    ("0.5", [r"\textcolor{red}{\frac{1}{2}}"], []),
    ("2", [], [r"\textbf{(C)}^2"]),
    (r"\textbf{(C)}\ 12", [], [r"\textbf{(D)}\ 12"]),
    ("3", [], [r"\textcolor{red}{3}\textcolor{blue}{6}", r"\textcolor{red}{3}6"]),
    ("abc", [], [r"\underline{abc}"]),
    ("63", [], [r"\checkmark 36"]),
]


def accepted(pool: GraderPool, kind: GraderKind, gold: str, answers: list[str]) -> list[str]:
    grades = pool.grade([GradeRequest(f"\\boxed{{{answer}}}", gold, kind=kind) for answer in answers])
    assert not {Outcome.TIMED_OUT, Outcome.CRASHED} & {grade.outcome for grade in grades}
    assert [grade.extracted for grade in grades] == answers
    return [answer for answer, grade in zip(answers, grades, strict=True) if grade.outcome is Outcome.CORRECT]


@pytest.mark.parametrize("kind", [MATH, STRICT], ids=lambda kind: kind.kind)
@pytest.mark.parametrize(("gold", "right", "wrong"), [
    *VERDICTS, *((gold, [answer], []) for gold, answer in SAME), *((gold, [], [answer]) for gold, answer in OTHER)
])  # fmt: skip
def test_both_accept_or_both_refuse(pool, kind, gold, right, wrong):
    assert accepted(pool, kind, gold, [*right, *wrong]) == right


@pytest.mark.parametrize(("gold", "right", "wrong"), [*OF_MATH_ALONE, *PRESENTATION])
def test_what_math_accepts_where_the_strict_grader_is_not_to_follow(pool, gold, right, wrong):
    assert accepted(pool, MATH, gold, [*right, *wrong]) == right
    if (gold, right, wrong) in OF_MATH_ALONE:
        assert accepted(pool, STRICT, gold, right) == []


@pytest.mark.parametrize("answer", ["12", r"\frac{1}{2}", "(C)", r"\{1, 2\}", "{1}+{2}", r"x \le 2", r"\text{(A, B)}"])
def test_an_answer_without_presentation_is_left_as_it_is(answer: str) -> None:
    assert unadorned(answer) == answer


@pytest.mark.parametrize("unit", ["{", r"\ ", r"\textcolor{a}{", r"\checkmark ", r"\large ", r"\textbf{(C)}\ ", " "])
def test_a_million_characters_are_unadorned(unit: str) -> None:
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    side = unit * (500_000 // len(unit))
    assert len(unadorned(side + side)) <= 2 * len(side)
    assert "x" in unadorned(side + "x" + side)


@pytest.mark.parametrize("pair", [("A", "B"), ("x", "C"), ("C", "x"), ("(2,3)", "C"), ("5 C", "C"), ("{" * 40, "C")])
def test_letters_without_a_label_are_left_to_the_grader(pair: tuple[str, str]) -> None:
    assert by_label(*pair) == pair
