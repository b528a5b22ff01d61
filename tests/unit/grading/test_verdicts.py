r"""What this grader says where graders disagree, and why; `math` and `math_strict` side by side.

Wrong accepted by the references: number bases, tiny numbers (they round to six decimals), kinds of bracket, units,
prose that shares a number, `R` for `r`, primes, repeated elements. Right refused by them: layout and Unicode, decimals
that the reference has rounded, inequalities for intervals.
"""

import pytest

from luffy.config.grading import MathGrader, StrictMathGrader
from luffy.types import Outcome

WRONG = [
    # gold, answer
    ("1200", "1,300 people"),
    ("1200", "1,200 million"),
    (r"\sqrt{17}", "sqrt{19}"),
    ("52_8", "528"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("2^{-99}", "2^{-98}"),
    ("0.0000001", "0.0000002"),
    ("1e-9", "2e-9"),
    ("(0,1)", r"\{0,1\}"),
    (r"\{0,1\}", "(0,1)"),
    ("(0,1)", "(1,0)"),
    ("(0,1)", "[0,1]"),
    ("5 cm", "5 km"),
    ("a+c", "d+h"),
    ("(1,234)", "1234"),
    ("25", r"25 \text{ or } 26"),
    (r"\text{40 chocolate, 60 lollipop}", r"\text{40 chocolate, 50 hard}"),
    (r"3^x \ge x^2", r"3^x \ge x"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("4", r"4\sqrt(2)"),
    ("1-1/e", "1+1/e"),
    (r"\frac13", "0.333"),  # an exact reference wants an exact answer, or one that is right to six decimals
    (r"\pi", "3.14159"),
    ("0.50", "0.501"),  # decimals against a decimal: as they stand
    ("1.2", r"\frac{7}{6}"),  # two digits say too little of what was rounded
    (r"\frac{\pi}{2}", r"90^\circ"),  # a length of arc is no angle; problems that take both say so in the reference
    ("1010_2", "10"),  # a value for a numeral: the problem asked for one of them
    ("101_2", "101_3"),
    ("5", r"\infty"),
    (r"\infty", "5"),
    (r"-\infty", r"\infty"),
    ("2^{100}", "2^{100}+1"),
    ("10^{40}+1", "10^{40}"),
    ("23", "2**3"),
    ("24", "2**(3(4))"),
    ("64", "2**3**2"),
    ("2 m, 3 cm", "3 m, 2 cm"),
    (r"\text{2 m, 3 cm}", r"\text{3 m, 2 cm}"),
    (r"\begin{pmatrix}1 \\ 2\end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}"),
    ("5 hours", "5 minutes"),
    ("3 feet", "3 inches"),
    (r"3 \text{ feet}", r"3 \text{ inches}"),
    ("5 cm^2", "5 km^2"),
    ("5", r"\{\}"),
    (r"\{\}", r"\{1, 2\}"),
    (r"\pi(R^2-r^2)", "0"),
    (r"\pi(R^2-r^2)", r"\pi(r^2-R^2)"),
    (r"\frac{R+r}{2}", "r"),
    ("2R", "2r"),
    (r"\lambda+\Lambda", r"2\lambda"),
    ("a'-a", "0"),
    ("y''+y=0", "2y=0"),
    ("2ab", "2"),
    ("3", "3xyz"),
    ("x^2 yz", "x^2"),
    ("2 m n", "2"),
    (r"2\pi h", r"2\pi"),
    ("ABCD", "DCBA"),
    ("ABC", "ACB"),
    (r"\sin 1", r"\sin 1^\circ"),
    (r"3\left(\frac12\right)+0", r"3\frac12"),
    ("5,5,6", "5,6,6"),
    ("x > 2, x < 5", "x > 2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (r"p \land q", r"p \lor q"),
    (r"5\text{ feet } 3\text{ inches}", r"5\text{ feet } 4\text{ inches}"),
    (r"5\text{ feet } 3\text{ inches}", "5"),
    (r"2\text{ hours and }30\text{ minutes}", r"30\text{ minutes and }2\text{ minutes}"),
    (r"\$5", r"5\text{ cents}"),
    (r"10\text{ N}", r"10\text{ J}"),
    (r"100^\circ\text{C}", r"100^\circ\text{F}"),
    (r"\text{point A}", r"\text{point B}"),
    (r"\text{line } m", r"\text{line } n"),
    (r"\text{A is taller}", r"\text{C is taller}"),
]
RIGHT = [
    ("1200", "1,200 people"),
    ("70000", "70,000 dollars"),
    ("1200 books", "1,200 books"),
    (r"\sqrt{17}", "sqrt{17}"),
    (r"\frac{\sqrt{17}}{2}", r"frac{sqrt{17}}{2}"),
    ("6+9i", "6+9 i"),
    ("11", "11."),
    (r"1\,234", "1234"),
    ("3", "３"),
    ("3", "٣"),
    ("3", "3\u200b"),
    (r"(3,\frac{\pi}{2})", "(3,pi/2)"),
    (r"\sqrt{2}\pi", "√2π"),
    ("120000", "1.2e5"),
    ("73", "**73**"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"\sqrt{2}", "sqrt(2)"),
    ("(7,11),(11,7)", "(11,7) or (7,11)"),
    ("5", "5 🎉"),
    ("5", "5\x00"),
    ("x^2", "x²"),
    (r"\frac12", "½"),
    ("5", "5 cm"),
    ("30", r"30^\circ"),
    ("1.5", r"1\frac12"),
    ("3", "x=3"),
    ("10000", "10^4"),
    (r"\frac{1}{2}", "0.5"),
    ("1,2,3", "3,2,1"),  # without brackets it is a list of solutions, in any order
    ("12.25", r"\frac{49}{4}"),
    ("2^{100}", "2^{99} \\cdot 2"),
    (r"\infty", "∞"),
    ("8", "2**3"),
    ("x^2+y^3", "x ** 2 + y ** 3"),
    ("x^{-1}", "x**-1"),
    ("x^{n+1}", "x**(n+1)"),
    ("5", "**5"),
    ("5", "**5** cm"),
    ("7", "x = **7**"),
    ("1,000", "1,000 cm"),
    ("2 m, 3 cm", "2 m,3 cm"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1 \\ 2\end{pmatrix}"),
    (r"5\text{ cm}", r"5\ \text{cm}"),
    ("-1", r"e^{i\pi}"),
    (r"e^{i\pi}", "-1"),
    (r"\pi(R^2-r^2)", r"\pi(R-r)(R+r)"),
    (r"\frac{Mm}{M+m}", r"\frac{mM}{m+M}"),
    (r"\text{Red}", r"\text{red}"),
    ("5", r"5 \text{ men}"),
    ("5", r"5\text{ m}"),
    (r"10\text{ N}", "10"),
    ("12", r"12 \text{ sq ft}"),
    ("5,5,6", "6,5,5"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\sum_{i=1}^{10} i", "55"),
]
MATH_ACCEPTS = [
    ("50", r"50\%"),  # references to "what percentage" leave the sign out more often than not
    ("52_8", "52"),  # the base stands in the question
    ("(0,1)", "0,1"),
    (r"\frac13", "0.333333"),
    ("30.52", r"\frac{1587}{52}"),  # the reference has been rounded, the answer has not
    (r"(2,\infty)", "x>2"),
    ("(2,3)", "2<x<3"),
    ("16, 3", "w=16, d=3"),
    ("5 hours", "5 hour"),
    ("3 feet", "3 ft"),
    ("5", "5m"),  # a length; after 2 the letters of 2ab are variables
    ("A", "a"),  # an option's label
    (r"\text{even}", r"n \text{ is even}"),
    (r"7\text{ a.m.}", r"7 \text{ AM}"),
    (r"n = 2^k, k\ge 0", "2^k"),
]


@pytest.mark.parametrize(
    ("gold", "answer", "by_math", "by_strict"),
    [
        *((*pair, False, False) for pair in [*WRONG, (r"\text{three}", "3")]),  # words for numbers are not read
        *((*pair, True, True) for pair in RIGHT),
        *((*pair, True, False) for pair in MATH_ACCEPTS),
    ],
)
def test_both_refuse_both_accept_or_only_math_accepts(pool, gold, answer, by_math, by_strict):
    kinds = (MathGrader(), StrictMathGrader())
    grades = [pool.grade_one(f"\\boxed{{{answer}}}", gold, kind=kind) for kind in kinds]
    assert all(grade.outcome not in (Outcome.TIMED_OUT, Outcome.CRASHED) for grade in grades), grades
    assert [grade.outcome is Outcome.CORRECT for grade in grades] == [by_math, by_strict]
