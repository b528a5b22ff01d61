r"""What this grader says where graders disagree, and why; `math` and `math_strict` side by side.

Wrong accepted by the references: number bases, tiny numbers (they round to six decimals), kinds of bracket, units,
prose that shares a number, `R` for `r`, primes, repeated elements. Right refused by them: layout and Unicode, decimals
that the reference has rounded, inequalities for intervals.

An exact reference wants an exact answer, or one that is right to six decimals; decimals beside a decimal count as they
stand, and two digits say too little of what was rounded. A reference in another base wants the numeral. Words for
numbers are not read. A list without brackets has no order. `math` alone takes 50 \% for 50 (references to "what
percentage" leave the sign out more often than not), a numeral without the base that stands in the question, an exact
value for a rounded reference, and a degree beside \pi for \pi/180. `5m` is a length; after 2 the letters of 2ab are
variables.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.config.grading import MathGrader, StrictMathGrader
from luffy.grading import checks
from luffy.grading.checks import run_check
from luffy.grading.equivalence.certain import by_label
from luffy.grading.equivalence.text import canonical_unit, unadorned
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

SAME = [  # a reference, and answers that both accept
    # values, layout, lists
    ("1200", "1,200 people"), (r"\sqrt{17}", "sqrt{17}"),
    ("5", "5 🎉", "5\x00", "5 cm", "**5", "**5** cm", r"5 \text{ men}", r"5\text{ m}"), (r"\infty", "∞"),
    ("2^{100}", r"2^{99} \cdot 2"), ("2 m, 3 cm", "2 m,3 cm"), (r"\pi(R^2-r^2)", r"\pi(R-r)(R+r)"),
    ("3", "３", "٣", "3\u200b", "x=3"), ("5,5,6", "6,5,5"), (r"10\text{ N}", "10"), ("1,2,3", "3,2,1"),
    ("70000", "70,000 dollars"), ("1200 books", "1,200 books"), (r"\frac{\sqrt{17}}{2}", "frac{sqrt{17}}{2}"),
    ("6+9i", "6+9 i"), ("11", "11."), (r"1\,234", "1234"), (r"(3,\frac{\pi}{2})", "(3,pi/2)"), (r"\sqrt{2}\pi", "√2π"),
    ("120000", "1.2e5"), ("73", "**73**"), ("11111111100", r"11,\! 111,\! 111,\! 100"), (r"\sqrt{2}", "sqrt(2)"),
    ("(7,11),(11,7)", "(11,7) or (7,11)"), ("x^2", "x²"), (r"\frac12", "½"), ("30", r"30^\circ"), ("1.5", r"1\frac12"),
    ("10000", "10^4"), (r"\frac{1}{2}", "0.5"), ("12.25", r"\frac{49}{4}"), ("8", "2**3"),
    ("x^2+y^3", "x ** 2 + y ** 3"), ("x^{-1}", "x**-1"), ("x^{n+1}", "x**(n+1)"), ("7", "x = **7**"),
    ("1,000", "1,000 cm"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1 \\ 2\end{pmatrix}"),
    (r"5\text{ cm}", r"5\ \text{cm}"), ("-1", r"e^{i\pi}"), (r"e^{i\pi}", "-1"), (r"\frac{Mm}{M+m}", r"\frac{mM}{m+M}"),
    (r"\text{Red}", r"\text{red}"), ("12", r"12 \text{ sq ft}"), (r"\sin 30^\circ", r"\frac12"),
    (r"\sum_{i=1}^{10} i", "55"), ("033", "33"), ("27", "27.0"), ("45", r"45 \text{ minutes}"), ("$69$,$84$", "84, 69"),
    ("1,3,5", "5, 3, 1"), ("$(6,3),(9,3)$", "(9,3),(6,3)"),
    # zeros and alternatives
    ("0", r"\cos\frac{\pi}{2}", r"\sin\pi", r"\sqrt2\cdot\sqrt2-2"), (r"33\frac13\%", r"\frac13"), ("12:30", "12{:}30"),
    ("42", r"42\mod 43"),
    # labels of options
    ("C", r"\text{(C) }12", r"\textbf{(C)}\ 12", r"\textbf{(C) \frac{1}{2}}", "C: 12"),
    (r"\text{(C)}", "C. 12", "C) 12", r"(C)\ \frac{1}{2}", r"\text{Option C}", "C"),
    (r"\textbf{(C)}\ 12", "C", "(C)", "12", r"\text{(C) }12", r"\frac{24}{2}"),
    ("12", "A) 12", "C. 12", "C: 12", r"\textbf{(C)}\ 12", r"\textbf{(C) } 12", r"\textbf{(C) 12}", r"\text{(C) }12",
     r"\mathrm{(E)}\ 12"),
    (r"\textbf{(C) }12", "12"), (r"\mathrm{(C)}\ 12", "12"), (r"(C)\ 12", "12"), ("C. 12", "12"),
    (r"\textbf{(C)}\ \frac{1}{2}", "0.5"), (r"\textbf{(C)} -12", "-12"), (r"\frac12", r"\textbf{(A)}\ \frac{1}{2}"),
    ("-12", r"\textbf{(A)}\ -12"),
    # moments and ratios
    ("204_5", "(204)_5"), ("3:11", "6:22"),
    # words
    (r"\text{dog}", "dog"), (r"\text{Dog}", r"\text{dog}"), ("abc", "cab"),
    # percentages
    ("0.2", r"20\%"), (r"12.5\%", "0.125"),
    # derivatives
    ("y''=x", r"y^{\prime\prime}=x"),
    ("y'=x", r"y^{\prime}=x", r"\frac{dy}{dx}=x", r"\frac{\mathrm{d}y}{\mathrm{d}x}=x"),
    (r"\frac{dy}{dx}=x", "y'=x", "dy/dx = x"), (r"\frac{dy}{dx} = 2x+1", r"y^{\prime} = 2x+1"),
    (r"\frac{d^2y}{dx^2}+y=0", "y''+y=0"), (r"\dot{x}", r"\frac{dx}{dt}"), (r"\ddot{x}", r"\frac{d^2x}{dt^2}"),
    ("f'(x)=2x", r"\frac{df}{dx}=2x"), (r"\frac{df}{dx}=2x", "f'(x)=2x", r"f^{\prime}(x)=2x"),
    ("f'(x)", r"f^\prime(x)"),
    (r"u_t = \frac{\partial^2 u}{\partial x^2}", r"u_t = \frac{\partial^{2} u}{\partial x^{2}}"),
    (r"\frac{dx}{dt}=-x", r"\dot{x}=-x"), (r"\dot{x}=-kx", "x'=-kx"), (r"\ddot{x}+x=0", "x''+x=0"),
    (r"\frac{d^{2}y}{dx^{2}}=0", "y''=0"),
    # money
    ("18", "€18", r"US\$18"), ("7.6", r"7.6\text{ Z}"), ("75", r"75\text{ cents}"),
    # conditions
    (r"x^2 \text{ for } x>0", r"x^2 \text{ for } x>0"),
    # units
    (r"1.6\text{ eV}", "1.6", "1.6 eV"), ("5000 G", r"5000\text{ gauss}"),
    (r"5\ \mu m", r"5\text{ µm}", r"5\text{ microns}"), ("9.8 m/s^2", r"9.8\text{ m s}^{-2}"),
    ("1.6e-19", r"1.6\times10^{-19}\text{ C}"), (r"5\text{ Hz}", r"5 \text{ hertz}"),
    (r"5\text{ kPa}", r"5\text{ kilopascals}"), (r"5\text{ m/s}", r"5\,\mathrm{m}\cdot\mathrm{s}^{-1}"),
    ("(1,2)", r"(1\text{ m}, 2\text{ m})"), ("10 pc", r"10\text{ parsecs}"), (r"100\ \Omega", "100 Ω"),
    ("9.8", r"9.8\,\frac{\text{m}}{\text{s}^2}"), ("4.18", r"4.18\text{ J/(g·K)}"), ("0.7", r"0.7\,M_{\odot}"),
    ("28.8", r"28.8\, s^{-1}"),
]  # fmt: skip
SAME_TO_MATH = [  # a reference, and answers that `math` alone accepts
    # values, layout, lists
    ("50", r"50\%"), ("52_8", "52"), ("(0,1)", "0,1"), (r"\frac13", "0.333333"), (r"\frac{\pi}{2}", r"90^\circ"),
    ("30.52", r"\frac{1587}{52}"), (r"(2,\infty)", "x>2"), ("(2,3)", "2<x<3"), ("16, 3", "w=16, d=3"),
    ("5 hours", "5 hour"), ("3 feet", "3 ft"), ("5", "5m"), ("A", "a"), (r"\text{even}", r"n \text{ is even}"),
    (r"7\text{ a.m.}", r"7 \text{ AM}"), (r"n = 2^k, k\ge 0", "2^k"),
    # zeros and alternatives
    ("42", "42=42.0", "40+2=42", "x=40+2=42", r"42 \text{ or } 42.0"), ("0.5", r"\frac12=0.5"),
    ("0.333", r"\frac13=0.333"), ("1,2", r"x=1 \text{ or } x=2"), (r"\pm 3", r"3 \text{ or } -3"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"), ("204", r"\bf 204"), (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"),
    ("x^{2/3}", r"\sqrt[3]{x^2}"),
    # presentation
    ("36", r"\textcolor{red}{36}", r"\color{red}{36}", r"\color{blue}36", r"\large 36", r"{\Large 36}",
     r"\textcolor{red}{\large{36}}", r"\underline{36}", r"36 \checkmark", r"\color{green}{36}\ \checkmark"),
    ("0.5", r"\textcolor{red}{\frac{1}{2}}"),
    # moments and ratios
    ("15:30", r"3:30\text{ PM}"), ("3:30 PM", "3:30"), ("3:4", r"3\colon 4", r"3\text{ to }4"), ("1:2:3", "2:4:6"),
    ("10 a.m.", r"10:00\text{ AM}"), ("12:30 AM", "0:30"),
    # words
    ("10", r"10 \text{ a.m.}"), ("12:30", r"12:30 \text{ PM}"), (r"\text{No}", r"\text{no}", r"\text{No, it is not}"),
    (r"\text{does not exist}", "DNE"), ("DNE", r"\text{does not exist}", r"\text{Does not exist.}"),
    # percentages
    ("12.5", r"12.5\%", r"12.5\text{ percent}"), ("20", r"20\%"), ("62.5", "62.5 percent"),
    # derivatives
    (r"\frac{dy}{dx} = 2x+1", "y' = 1+2x"), ("(uv)'=u'v+uv'", "(uv)'=uv'+u'v"),
    # money
    ("0.75", r"75\text{ cents}", "75 cents"), (r"75\text{ cents}", r"\$0.75", r"0.75\text{ dollars}"),
    (r"\$5", r"500\text{ cents}"), (r"\$0.75", r"75\text{ cents}"), (r"0.75\text{ dollars}", r"75\text{ cents}"),
    ("1.20", r"120\text{ cents}"),
    # conditions
    ("x^2", r"x^2 \text{ for } x>0"), (r"x^2 \text{ for } x>0", "x^2", "x^2, x>0"),
    ("f(x)=2x", r"f(x)=2x \text{ for all } x\in\mathbb{R}"), ("2x", r"2x, \text{ where } x\in\mathbb{R}"),
    ("42", r"42, \text{ where } x=1"), (r"x = 3 \text{ when } y = 5", "3", r"3 \text{ for } y = 5"),
    ("f(x)=x^2", r"f(x)=x^2 \text{ for } x>0"), ("x^2, x>0", r"x^2 \text{ for } x>0"), ("5", r"5 \text{ when } n = 3"),
    ("f(x)=x", r"f(x)=x \quad \forall x\in\mathbb{R}"),
    # units
    ("11000", r"11000\, kcal m^{-2} yr^{-1}"),
]  # fmt: skip
OTHER = [  # a reference, and answers that both refuse
    # values, layout, lists
    (r"\frac{dy}{dx}=x", r"\frac{dx}{dy}=x", r"\frac{dy}{dt}=x"), ("1200", "1,300 people", "1,200 million"),
    (r"\sqrt{17}", "sqrt{19}"), ("(0,1)", r"\{0,1\}", "(1,0)", "[0,1]"), (r"\frac13", "0.333"), ("0.50", "0.501"),
    ("1.2", r"\frac{7}{6}"), ("1010_2", "10"), ("5", r"\infty", r"\{\}"), (r"\infty", "5"), ("2^{100}", "2^{100}+1"),
    ("2 m, 3 cm", "3 m, 2 cm"), (r"\pi(R^2-r^2)", "0", r"\pi(r^2-R^2)"), ("3", "3xyz"), ("5,5,6", "5,6,6"),
    (r"5\text{ feet } 3\text{ inches}", r"5\text{ feet } 4\text{ inches}", "5"), (r"10\text{ N}", r"10\text{ J}"),
    (r"\text{three}", "3"), (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"), ("52_8", "528"),
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
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"), (r"p \land q", r"p \lor q"),
    (r"2\text{ hours and }30\text{ minutes}", r"30\text{ minutes and }2\text{ minutes}"), (r"\$5", r"5\text{ cents}"),
    (r"100^\circ\text{C}", r"100^\circ\text{F}"), (r"\text{point A}", r"\text{point B}"),
    (r"\text{line } m", r"\text{line } n"), (r"\text{A is taller}", r"\text{C is taller}"), ("033", "330"),
    ("$69$,$84$", "69"), ("1,3,5", "1,3"), ("$(6,3),(9,3)$", "(3,6),(3,9)"),
    # zeros and alternatives
    ("0", "2^{-200}", "e^{-200}", "e^{-1000}", r"\sin 10^{-50}"), (r"33\frac13\%", r"\frac23"), ("12:30", "12{:}31"),
    ("42", "43=42", r"42 \text{ or 43}", r"42 \text{ or anything}"), ("41", r"42\mod 43"), (r"\sqrt{n}", r"-\sqrt{n}"),
    ("x", r"\sqrt{x^2}"), ("x^{1/2}", r"\sqrt{|x|}"), (r"\ln|x|", r"\ln x"), ("5", r"5\text{ or }6"),
    # labels of options
    ("C", "B. 12", "A, C", r"\text{A or C}", r"(C)\ 12 \text{ or } (D)\ 13", "C-12", "(C) + 12", "(C) - 12", "C(12)",
     "12C", "C:12", r"(C) \cup (D)", "C_1"),
    (r"\text{(C)}", "12", "D", r"\text{(C) is wrong}", r"\text{not (C)}", "A. B. C"),
    (r"\textbf{(C)}\ 12", "B", "13", r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 13", "c+12", r"\textbf{(D)}\ 12"),
    ("12", "A) 13", "F. 12", "A. 12 or 13", "C", r"\textbf{(C)}\ 13", r"\textbf{(C)}\ -12", r"\textbf{(C)} + 12",
     r"\textbf{(C)} or 12", r"\textbf{(C)} \text{ or } 12", r"\textbf{(C)} \cdot 12",
     r"\textbf{(C)}\ 12, \textbf{(D)}\ 13", r"\textbf{(C)}", r"\textbf{(F)}\ 12"),
    ("(A)x+1", "A"), ("(A) + 1", "A"), ("A:5", "A"), ("A", "(B)"), ("2", r"\textbf{(C)}^2"),
    # presentation
    ("36", r"\textcolor{red}{-}36", r"\underline{36}5", r"\checkmark", r"\large"),
    ("3", r"\textcolor{red}{3}\textcolor{blue}{6}", r"\textcolor{red}{3}6"), ("abc", r"\underline{abc}"),
    ("63", r"\checkmark 36"),
    # moments and ratios
    ("15:30", r"3:30\text{ AM}"), ("3:30 PM", "3:40"), ("1:2:3", "1:3:2"), ("204_5", "(204)_6"), ("12:30", "12/30"),
    ("2:00", "2"), ("2024-01-05", "2024-05-01"), ("1:2", "1:2:3"), (r"10 \text{ p.m.}", r"10 \text{ a.m.}"),
    (r"12:30\text{ AM}", r"12:30 \text{ PM}"),
    # words
    ("10", r"11 \text{ a.m.}"), ("12:30", r"1:30 \text{ PM}"), (r"\text{dog}", r"\text{god}"),
    (r"\text{No}", r"\text{Yes}"), (r"\text{Yes}", r"\text{Yes and no}", r"\text{Yes, or no}"),
    (r"\text{does not exist}", r"\text{exists}"), ("dog", "god"), ("ABC", "BCA"), (r"\text{war}", r"\text{raw}"),
    (r"\text{stop}", r"\text{pots}"), (r"\text{Lee}", r"\text{eel}"),
    # percentages
    ("12.5", r"125\%", r"1.25\%"), ("0.2", r"0.2\%"), (r"50\%", r"0.5\%"), (r"20\%", "2"), ("-12.5", r"12.5\%"),
    # derivatives
    ("y'", "y''", "y"), ("y''=x", "y'''=x", r"y^{\prime}=x"), ("y'=x", r"y^{\prime\prime}=x", "x'=y"),
    (r"\frac{dy}{dx}=x", "y=x", "y''=x", r"\dot{y}=x", "y'=-x", "x'=y"),
    (r"\frac{d^2y}{dx^2}+y=0", "y'+y=0", r"\left(\frac{dy}{dx}\right)^2+y=0"),
    (r"\dot{x}", "x", r"\ddot{x}", r"\dot{y}", r"\frac{dx}{dy}"), (r"\ddot{x}", "x'", r"\dot{x}"),
    ("y", r"\dot{y}", "y'"), ("f'(x)=2x", "f(x)=2x"), (r"\frac{df}{dx}=2x", "f''(x)=2x"), ("x'+1", "x''+1"),
    (r"\frac{\partial u}{\partial t}=\frac{\partial^2 u}{\partial x^2}",
     r"\frac{\partial u}{\partial x}=\frac{\partial^2 u}{\partial t^2}"),
    (r"\frac{a}{b}", r"\frac{da'}{db}"), ("f'(x)=x", "f'(x)=2x"), ("f'(2)=4", r"\frac{df}{dx}=4"),
    ("f'(t)=2t", r"\frac{df}{dx}=2x"),
    # money
    ("0.75", r"7.5\text{ cents}", r"75\text{ cm}", "75"), (r"75\text{ cents}", "0.75", r"\$75"),
    (r"0.75\text{ m}", r"75\text{ cents}", "75"), ("7.6", r"7.5\text{ Z}"), (r"\$75", r"75\text{ cents}"),
    (r"75\%", r"75\text{ cents}"), (r"\$18", "€18"),
    # conditions
    ("x^2", r"2x \text{ for } x>0"), (r"x^2 \text{ for } x>0", r"x^2 \text{ for } x<0", r"x^3 \text{ for } x>0", "x>0"),
    ("f(x)=2x", r"f(x)=2x \text{ for some } x\in\mathbb{R}"),
    ("2x", r"x, \text{ where } x=2x", r"3x \text{ for all } x\in\mathbb{R}"),
    ("42", r"41, \text{ where } x=42", r"43, \text{ where } x=1"),
    ("3", r"5 \text{ when } n=3", r"x = 5 \text{ when } y = 3", r"f(x) = 5 \text{ when } x = 3"),
    (r"x = 3 \text{ when } y = 5", r"x = 3 \text{ when } y = 4", "5"), ("x>0", r"x^2 \text{ for } x>0"),
    ("2", r"1 \text{ where } x=2"),
    # units
    ("5000 G", r"5000\text{ T}"), (r"5\ \mu m", r"5\text{ mm}"), ("9.8 m/s^2", r"9.8\text{ m/s}"),
    ("1.6", r"-1.6\text{ eV}", r"1.6\times 10^{-19}\text{ C}"), ("2", r"2\mathrm{i}", "2pc", "2 p c"),
    ("3", r"3\mathrm{e}", "3 n^{-1}"), ("2x", r"2\text{ m}"), (r"2\text{ m}", "2x"), ("10", r"10\text{ dozen}"),
    (r"0.7 M_\odot", r"0.7 L_\odot"), (r"30^\circ", r"30\text{ radians}"),
    (r"5\text{ cm}, 3\text{ m}", r"5\text{ m}, 3\text{ cm}"),
]  # fmt: skip
BOTH_WAYS = [  # text, the same to both graders, the same to `math` alone, something else
    # numbers with nouns
    (r"3 \ \text{red apples}, \ 5 \ \text{green apples}", [r"3 \text{ red apples},\ 5 \text{ green apples}",
     r"5 \text{ green apples},\ 3 \text{ red apples}", "3, 5"], [], [r"3 \text{ red apples},\ 4 \text{ hard pears}",
     r"5 \text{ red apples},\ 3 \text{ green apples}", "3", "3, 4"]),
    (r"5 \text{ cats and } 3 \text{ dogs}", [r"\text{3 dogs and 5 cats}", r"5 \text{ cats}, 3 \text{ dogs}", "5, 3"],
     [r"5\text{ cats } 3\text{ dogs}"], ["5", "3", "3, 5", r"3 \text{ cats and } 5 \text{ dogs}",
     r"5 \text{ cats and } 4 \text{ dogs}", "15", "8"]),
    (r"5 \text{ cats and } 3 \text{ dogs}", [], [], [r"5 \text{ cats}",
     r"5 \text{ cats, } 3 \text{ dogs and } 1 \text{ cow}", r"5 \text{ cats and } 2 \text{ horses}"]),
    (r"5 \text{ cats } 3 \text{ dogs}", [], ["5 cats, 3 dogs"], [r"3 \text{ cats } 5 \text{ dogs}", "5", "15"]),
    (r"5\text{ feet }3\text{ inches}", ["5 feet 3 inches"], [], [r"3\text{ feet }5\text{ inches}", "15"]),
    (r"2 \text{ h } 30 \text{ min}", [], [], [r"2 \text{ h } 20 \text{ min}", r"30 \text{ h } 2 \text{ min}", "2"]),
    (r"\text{Ann: 5, Bob: 3}", [], [], [r"\text{Ann: 3, Bob: 5}", r"\text{Ann: 5, Bob: 4}", r"\text{Ann: 5}", "5"]),
    (r"(5 \text{ cats}, 3 \text{ dogs})", [], [], [r"(5 \text{ cats}, 4 \text{ dogs})",
     r"(3 \text{ cats}, 5 \text{ dogs})", "5"]),
    (r"\frac12 \text{ cup}, \frac13 \text{ spoon}", ["1/2, 1/3"], [], [r"\frac12 \text{ cup}, \frac14 \text{ spoon}"]),
    (r"x = 5 \text{ men}, y = 3 \text{ women}", ["x=5, y=3"], [], [r"x = 5 \text{ men}, y = 4 \text{ women}", "5"]),
    (r"2x \text{ apples}, 3x \text{ pears}", [], [], [r"2x \text{ apples}, 4x \text{ pears}", "2x"]),
    (r"\text{5 large and 3 small}", [], [], [r"\text{5 large and 2 small}", "5", "53"]),
    (r"5 \text{ out of } 7", ["5 out of 7"], [], [r"7 \text{ out of } 5", "5", "7"]),
    (r"x \text{ apples and } y \text{ pears}", [], [], [r"y \text{ apples and } x \text{ pears}", "x", "x y"]),
    (r"p \text{ is prime}", [], [], [r"p \text{ is even}", "p"]),
    (r"2x \text{ cm}", ["2x", r"x \cdot 2 \text{ cm}"], [r"2x \text{ centimeters}"], [r"2x \text{ m}",
     r"2y \text{ cm}"]),
    ("5", [r"5 \text{ apples each}", "5千克"], [r"x = 5 \text{ is the only solution}", r"5 \text{ or so}"], ["6千克"]),
    ("5", [], [r"5 \text{ (approximately } 5.1)"], [r"5.1 \text{ (approximately } 5)", r"5 \text{ or } 6", "5K"]),
    # several statements by their numbers in circles
    ("③⑤", ["3, 5", "③, ⑤", "③ ⑤", "❸❺", "5, 3"], [], ["35", "3", "③④", "3.5", "③⑤⑥"]),
    ("⑩⑪", ["10, 11"], [], ["1011", "10"]),
    ("③", ["3"], [], ["5"]),
    ("①②③", ["1,2,3"], [], ["123", "①②"]),
    # degrees
    (r"\frac{\pi}{12}", [r"\frac{\pi}{12} \text{ radians}"], [r"15^\circ", r"15 \text{ degrees}", "15°"], ["15",
     r"12^\circ", r"\frac{15\pi}{12}^\circ", r"15\pi", r"\frac{\pi}{12}^\circ"]),
    (r"180^\circ", ["180"], [r"\pi", r"\pi \text{ rad}"], [r"180\pi", r"2\pi", r"180 \text{ rad}"]),
    (r"\pi", [], [], ["180", r"1^\circ", r"\pi^\circ"]),
    (r"(45^\circ, 60^\circ)", [], [r"\left(\frac{\pi}{4}, \frac{\pi}{3}\right)"],
     [r"\left(\frac{\pi}{3}, \frac{\pi}{4}\right)"]),
    (r"30^\circ, 150^\circ", [], [r"\frac{\pi}{6}, \frac{5\pi}{6}"], [r"\frac{\pi}{6}, \frac{\pi}{3}"]),
    (r"x = 30^\circ + 180^\circ k", [], [r"x = \frac{\pi}{6} + k\pi"], [r"x = \frac{\pi}{6} + 2k\pi"]),
    # without an end
    (r"\text{infinitely many solutions}", [], [r"\infty", r"\text{infinitely many}",
     r"\text{There are infinitely many solutions}", r"\text{infinite}"], [r"-\infty", r"\text{finitely many solutions}",
     r"\text{no solutions}", "1"]),
    (r"\infty", [r"+\infty"], [r"\text{infinity}"], [r"-\infty", r"\text{many solutions}", r"\text{undefined}"]),
    # relations
    (r"b \leqslant -4 \text{ or } b = 3", [r"b \leq -4 \text{ or } b = 3", r"b \leqq -4 \text{ or } b = 3",
     "b ⩽ -4 or b = 3"], [r"(-\infty, -4] \cup \{3\}"], [r"(-\infty, -4) \cup \{3\}", r"(-\infty, -4]",
     r"b < -4 \text{ or } b = 3", r"b \geqslant -4 \text{ or } b = 3"]),
    (r"x \geqslant 2", [r"x \ge 2", r"x \geq 2", "x ≧ 2", r"x \geqq 2"], [r"[2, \infty)"], ["x > 2", r"x \leqslant 2",
     r"x \le 2"]),
    (r"x \to 2", [], [], [r"x \ne 2"]),
    # sets
    (r"\{t \mid t < 5/2\} - \{-1\}", [r"\{t \mid t < 5/2\}-\{-1\}"], [r"(-\infty,-1) \cup (-1, 5/2)",
     r"\{t \mid t < 5/2\} \setminus \{-1\}", r"\{t : t < 5/2, t \ne -1\}"], [r"(-\infty,-1) \cup (-1, 5/2]",
     r"(-\infty, 5/2)", r"\{t \mid t < 5/2\} - \{1\}", r"\{t \mid t < 5/2\} \cup \{-1\}"]),
    (r"\{x \mid x < 1\} \cup \{x \mid x > 2\}", [], [r"(-\infty,1) \cup (2,\infty)", r"x < 1 \text{ or } x > 2",
     r"\mathbb{R} \setminus [1,2]"], [r"(-\infty,1) \cap (2,\infty)", r"\{x \mid x < 1\}",
     r"(-\infty,1] \cup (2,\infty)"]),
    (r"\{x \mid x > 0\} \cap \{x \mid x < 2\}", [], ["(0,2)"], ["(0,2]", r"(0,\infty)"]),
    (r"((0,1) \cup (2,3)) \cap (0,2)", [], ["(0,1)"], ["(0,2)", r"(0,1) \cup (2,3)"]),
    (r"\Big\{y \mid 0 < y < 7\Big\}", [r"\{y \mid 0 < y < 7\}"], [r"\left\{y \,\middle|\, 0 < y < 7\right\}", "(0,7)",
     r"\bigl(0, 7\bigr)"], ["[0,7]", r"\Big\{y \mid 0 < y \le 7\Big\}", "(0,8)", r"\Big\{0, 7\Big\}"]),
    (r"\Bigl[\frac12, 3\Bigr)", [r"\left[\frac12, 3\right)", r"\bigg[\frac12, 3\bigg)"], [r"0.5 \le x < 3"],
     [r"\Bigl(\frac12, 3\Bigr)"]),
    # maximum and minimum
    ("2,9", [], [r"\text{Largest} = 9, \text{Smallest} = 2", "Largest = 9, Smallest = 2"], ["Largest = 2, Smallest = 9",
     "9"]),
    ("9,2", [], ["Largest = 9, Smallest = 2", r"\min = 2, \max = 9"], [r"\text{maximum } 2, \text{minimum } 9",
     "Largest = 9"]),
    ("-3, 5", [], [r"\text{greatest } 5, \text{least } -3", "Highest value: 5, lowest value: -3"],
     [r"\max = -3, \min = 5"]),
    ("16, 3", [], ["w = 16, d = 3"], ["w = 3, d = 16"]),
    # names of functions
    (r"g(x) = \text{cos}\bigg(\frac{\pi}{3}x - \frac{\pi}{4}\bigg)",
     [r"g(x) = \cos\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)", r"\cos\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)"],
     [], [r"\sin\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)", r"\text{sin}\bigg(\frac{\pi}{3}x - \frac{\pi}{4}\bigg)"]),
    (r"\text{cos}^2(x)(x+1)", [r"\cos^2(x)(x+1)", r"\mathrm{cos}^2(x)(x+1)"], [], [r"\text{sin}^2(x)(x+1)",
     r"\cos^2(x)"]),
    (r"2\operatorname{ln}(x)(x+1)", [r"2\ln(x)(x+1)"], [], [r"2\text{tan}(x)(x+1)", "2(x+1)", r"2\text{ln}(x)(x+2)"]),
    (r"30 \text{ sec}", ["30", "30 s"], [], [r"30 \text{ min}", r"31 \text{ sec}"]),
]  # fmt: skip
MATH, STRICT = MathGrader(), StrictMathGrader()


@pytest.mark.parametrize("kind", [MATH, STRICT], ids=lambda kind: kind.kind)
@pytest.mark.parametrize(("kinds", "gold", "answers"), [
    (kinds, gold, answers)
    for kinds, rows in (([MATH, STRICT], SAME), ([MATH], SAME_TO_MATH), ([], OTHER)) for gold, *answers in rows
])  # fmt: skip
def test_each_answer_has_its_verdict(pool, kind, kinds, gold, answers):
    grades = pool.grade([GradeRequest(f"\\boxed{{{answer}}}", gold, kind=kind) for answer in answers])
    assert not {Outcome.TIMED_OUT, Outcome.CRASHED} & {grade.outcome for grade in grades}
    assert [grade.extracted for grade in grades] == answers
    accepted = [grade.extracted for grade in grades if grade.outcome is Outcome.CORRECT]
    assert accepted == (answers if kind in kinds else [])


def is_right(answer, gold, check=checks.MATH):
    return run_check(check, answer, gold, "")[0] is Outcome.CORRECT


@pytest.mark.parametrize(("text", "same", "to_math", "other"), BOTH_WAYS)
def test_answer_and_reference_may_change_places(text, same, to_math, other):
    everything = [*same, *to_math, *other]
    for check, right in ((checks.MATH, [*same, *to_math]), (checks.STRICT, same)):
        assert [answer for answer in everything if is_right(answer, text, check)] == right
        assert [gold for gold in everything if is_right(text, gold, check)] == right


ADDED = r"\text{ eV}; \ \text{mol}; \ \mathrm{\Omega}; \,\Omega; \,\mu\mathrm{m}; \text{ \AA}; \text{ M}; \,\text{A}"
MORE = r"\text{ T}; \text{ pc}; \text{ dB}; \text{ ly}; \text{ u}; \text{ yr}; \text{ Da}; \text{ mM}; \text{ pm};  eV"
PRODUCTS = r"\ \mathrm{cm^{-1}}; \mathrm{~W}\,\mathrm{m}^{-2}; \,\text{N/kg}; \text{ N m}; ~\mathrm{km}/\mathrm{s}"
OTHERS = "MeV keV, GHz MHz, bar atm, mol mmol, MeV meV, mW MW, Mm mm, Pm pm, T G, A mA, C F, m/s m/s^2, cm^2 cm^3"


@pytest.mark.parametrize("unit", [unit.removeprefix(" ") for unit in f"{ADDED}; {MORE}; {PRODUCTS}".split(";")])
def test_a_unit_that_the_reference_leaves_out_is_no_part_of_the_number(unit):
    assert is_right(f"1.6{unit}", "1.6")
    assert not is_right(f"1.7{unit}", "1.6")


@pytest.mark.parametrize("pair", OTHERS.split(", "))
@pytest.mark.parametrize("check", [checks.MATH, checks.STRICT])
def test_the_same_number_of_another_unit_is_wrong(check, pair):
    one, other = (rf"5\text{{ {unit}}}" for unit in pair.split())
    assert is_right(one, one.replace("text", "mathrm"), check)
    assert not is_right(one, other, check)
    assert not is_right(other.replace("text", "mathrm"), one, check)


def test_spelling_and_notation_do_not_change_a_unit():
    for one, other in (("km/h", "kilometers per hour"), ("MeV", "megaelectronvolts"), ("m s^{-1}", "m/s")):
        assert canonical_unit(one) == canonical_unit(other)


NOUNS = "cats", "red apples", "green apples", "boxes", "metal rods", "pieces of cake"
Counts = list[tuple[int, str]]
WAYS = [
    lambda counts: r", ".join(rf"{number} \text{{ {noun}}}" for number, noun in counts),
    lambda counts: r",\ ".join(rf"{number}\ \text{{{noun}}}" for number, noun in counts),
    lambda counts: r" \text{ and } ".join(rf"{number}\mathrm{{~{noun.replace(' ', '~')}}}" for number, noun in counts),
    lambda counts: rf"\text{{{', '.join(f'{number} {noun}' for number, noun in counts)}}}",
    lambda counts: " and ".join(f"{number} {noun}" for number, noun in counts),
]
ways, numbers = st.sampled_from(WAYS), st.integers(1, 4) | st.integers(1, 999)
counted = st.lists(st.tuples(numbers, st.sampled_from(NOUNS)), min_size=1, max_size=4, unique_by=lambda count: count[1])


@settings(deadline=None, max_examples=25)
@given(counted, st.integers(0, 3), numbers, ways, ways, st.randoms(use_true_random=False))
def test_counted_things_are_equal_with_all_their_numbers(counts, index, number, way, other, chance):
    reference, (old, noun) = way(counts), counts[index % len(counts)]
    counts_otherwise = [(number if each[1] == noun else each[0], each[1]) for each in counts]
    new = next(each for each in NOUNS if each not in {noun for _, noun in counts})
    wrong = [[*counts, (number, new)], [(number, new), *counts], *([counts_otherwise] if number != old else [])]
    wrong += [[count for count in counts if count[1] != noun]] if len(counts) > 1 else []
    for check in (checks.MATH, checks.STRICT):
        for changed in wrong:
            alone = ", ".join(str(each) for each, _ in changed)
            assert not is_right(other(changed), reference, check)
            assert not is_right(reference, other(changed), check)
            assert not is_right(alone, reference, check)
    assert is_right(other(counts), reference)
    assert is_right(other(chance.sample(counts, len(counts))), reference)
    assert is_right(", ".join(str(each) for each, _ in counts), reference)


@pytest.mark.parametrize("answer", ["12", r"\frac{1}{2}", "(C)", r"\{1, 2\}", "{1}+{2}", r"x \le 2", r"\text{(A, B)}"])
def test_an_answer_without_presentation_is_left_as_it_is(answer):
    assert unadorned(answer) == answer


@pytest.mark.parametrize("unit", ["{", r"\ ", r"\textcolor{a}{", r"\checkmark ", r"\large ", r"\textbf{(C)}\ ", " "])
def test_a_million_characters_are_unadorned(unit):
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    side = unit * (500_000 // len(unit))
    assert len(unadorned(side + side)) <= 2 * len(side)
    assert "x" in unadorned(side + "x" + side)


@pytest.mark.parametrize("pair", [("A", "B"), ("x", "C"), ("C", "x"), ("(2,3)", "C"), ("5 C", "C"), ("{" * 40, "C")])
def test_letters_without_a_label_are_left_to_the_grader(pair):
    assert by_label(*pair) == pair
