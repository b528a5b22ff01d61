r"""Kinds of notation, and units, that graders read wrongly, each with look-alikes that stay wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.grading.checks import MATH, STRICT, run_check
from luffy.grading.equivalence.text import canonical_unit
from luffy.types import Outcome

NOTATION = [  # reference, right answers, wrong answers
    # zeros and alternatives
    ("0", [r"\cos\frac{\pi}{2}", r"\sin\pi", r"\sqrt2\cdot\sqrt2-2"], ["2^{-200}", "e^{-200}", "e^{-1000}"]),
    (r"33\frac13\%", [r"\frac13"], [r"\frac23"]),
    ("12:30", ["12{:}30"], ["12{:}31"]),
    ("42", ["42=42.0", "40+2=42", "x=40+2=42", r"42 \text{ or } 42.0", r"42\mod 43"], ["43=42", r"42 \text{ or 43}"]),
    # moments and ratios
    ("15:30", [r"3:30\text{ PM}"], [r"3:30\text{ AM}"]),
    ("3:30 PM", ["3:30"], ["3:40"]),
    ("3:4", [r"3\colon 4", r"3\text{ to }4"], []),
    ("1:2:3", ["2:4:6"], ["1:3:2"]),
    ("204_5", ["(204)_5"], ["(204)_6"]),
    # words
    ("10", [r"10 \text{ a.m.}"], [r"11 \text{ a.m.}"]),
    ("12:30", [r"12:30 \text{ PM}"], [r"1:30 \text{ PM}"]),
    (r"\text{dog}", ["dog"], [r"\text{god}"]),
    (r"\text{No}", [r"\text{no}", r"\text{No, it is not}"], [r"\text{Yes}"]),
    (r"\text{Yes}", [], [r"\text{Yes and no}", r"\text{Yes, or no}"]),
    (r"\text{does not exist}", ["DNE"], [r"\text{exists}"]),
    ("DNE", [r"\text{does not exist}", r"\text{Does not exist.}"], []),
    # percentages
    ("12.5", [r"12.5\%", r"12.5\text{ percent}"], [r"125\%", r"1.25\%"]),
    ("0.2", [r"20\%"], [r"0.2\%"]),
    # primes
    ("y'", [], ["y''", "y"]),
    ("y''=x", [r"y^{\prime\prime}=x"], ["y'''=x", r"y^{\prime}=x"]),
    ("y'=x", [r"y^{\prime}=x"], [r"y^{\prime\prime}=x"]),
    # derivatives
    (r"\frac{dy}{dx}=x", ["y'=x", "dy/dx = x"], ["y=x", "y''=x", r"\frac{dx}{dy}=x", r"\frac{dy}{dt}=x", r"\dot{y}=x"]),
    (r"\frac{dy}{dx}=x", [], ["y'=-x", "x'=y"]),
    ("y'=x", [r"\frac{dy}{dx}=x", r"\frac{\mathrm{d}y}{\mathrm{d}x}=x"], ["x'=y"]),
    (r"\frac{dy}{dx} = 2x+1", ["y' = 1+2x", r"y^{\prime} = 2x+1"], []),
    (r"\frac{d^2y}{dx^2}+y=0", ["y''+y=0"], ["y'+y=0", r"\left(\frac{dy}{dx}\right)^2+y=0"]),
    (r"\dot{x}", [r"\frac{dx}{dt}"], ["x", r"\ddot{x}", r"\dot{y}", r"\frac{dx}{dy}"]),
    (r"\ddot{x}", [r"\frac{d^2x}{dt^2}"], ["x'"]),
    ("y", [], [r"\dot{y}", "y'"]),
    ("f'(x)=2x", [r"\frac{df}{dx}=2x"], ["f(x)=2x"]),
    (r"\frac{df}{dx}=2x", ["f'(x)=2x", r"f^{\prime}(x)=2x"], ["f''(x)=2x"]),
    # money
    ("0.75", [r"75\text{ cents}", "75 cents"], [r"7.5\text{ cents}", r"75\text{ cm}", "75"]),
    (r"75\text{ cents}", [r"\$0.75", r"0.75\text{ dollars}"], ["0.75", r"\$75"]),
    (r"\$5", [r"500\text{ cents}"], [r"5\text{ cents}"]),
    (r"0.75\text{ m}", [], [r"75\text{ cents}", "75"]),
    ("18", ["€18", r"US\$18"], []),
    ("7.6", [r"7.6\text{ Z}"], [r"7.5\text{ Z}"]),
    # conditions
    ("x^2", [r"x^2 \text{ for } x>0"], [r"2x \text{ for } x>0"]),
    (r"x^2 \text{ for } x>0", ["x^2", "x^2, x>0", r"x^2 \text{ for } x>0"], [r"x^2 \text{ for } x<0"]),
    (r"x^2 \text{ for } x>0", [], [r"x^3 \text{ for } x>0", "x>0"]),
    ("f(x)=2x", [r"f(x)=2x \text{ for all } x\in\mathbb{R}"], [r"f(x)=2x \text{ for some } x\in\mathbb{R}"]),
    ("2x", [r"2x, \text{ where } x\in\mathbb{R}"], [r"x, \text{ where } x=2x", r"3x \text{ for all } x\in\mathbb{R}"]),
    ("42", [r"42, \text{ where } x=1"], [r"41, \text{ where } x=42", r"43, \text{ where } x=1"]),
    ("3", [], [r"5 \text{ when } n=3", r"x = 5 \text{ when } y = 3", r"f(x) = 5 \text{ when } x = 3"]),
    (r"x = 3 \text{ when } y = 5", ["3", r"3 \text{ for } y = 5"], [r"x = 3 \text{ when } y = 4", "5"]),
    # units
    (r"1.6\text{ eV}", ["1.6", "1.6 eV"], []),
    ("5000 G", [r"5000\text{ gauss}"], [r"5000\text{ T}"]),
    (r"5\ \mu m", [r"5\text{ µm}", r"5\text{ microns}"], [r"5\text{ mm}"]),
    ("9.8 m/s^2", [r"9.8\text{ m s}^{-2}"], [r"9.8\text{ m/s}"]),
    ("1.6", [], [r"-1.6\text{ eV}", r"1.6\times 10^{-19}\text{ C}"]),
    ("2", [], [r"2\mathrm{i}", "2pc", "2 p c"]),
    ("3", [], [r"3\mathrm{e}", "3 n^{-1}"]),
]
SAME = [  # reference, answer
    ("0.5", r"\frac12=0.5"), ("0.333", r"\frac13=0.333"), ("1,2", r"x=1 \text{ or } x=2"),
    (r"\pm 3", r"3 \text{ or } -3"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    ("10 a.m.", r"10:00\text{ AM}"), ("12:30 AM", "0:30"), ("3:11", "6:22"), ("204", r"\bf 204"),
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"), ("x^{2/3}", r"\sqrt[3]{x^2}"), (r"\text{Dog}", r"\text{dog}"),
    ("abc", "cab"), ("20", r"20\%"), (r"12.5\%", "0.125"), ("62.5", "62.5 percent"), ("f'(x)", r"f^\prime(x)"),
    (r"u_t = \frac{\partial^2 u}{\partial x^2}", r"u_t = \frac{\partial^{2} u}{\partial x^{2}}"),
    (r"\frac{dx}{dt}=-x", r"\dot{x}=-x"), (r"\dot{x}=-kx", "x'=-kx"), (r"\ddot{x}+x=0", "x''+x=0"),
    (r"\frac{d^{2}y}{dx^{2}}=0", "y''=0"), ("(uv)'=u'v+uv'", "(uv)'=uv'+u'v"), (r"\$0.75", r"75\text{ cents}"),
    (r"0.75\text{ dollars}", r"75\text{ cents}"), ("75", r"75\text{ cents}"), ("1.20", r"120\text{ cents}"),
    ("f(x)=x^2", r"f(x)=x^2 \text{ for } x>0"), ("x^2, x>0", r"x^2 \text{ for } x>0"),
    ("5", r"5 \text{ when } n = 3"), ("f(x)=x", r"f(x)=x \quad \forall x\in\mathbb{R}"),
    ("1.6e-19", r"1.6\times10^{-19}\text{ C}"), (r"5\text{ Hz}", r"5 \text{ hertz}"),
    (r"5\text{ kPa}", r"5\text{ kilopascals}"), (r"5\text{ m/s}", r"5\,\mathrm{m}\cdot\mathrm{s}^{-1}"),
    ("(1,2)", r"(1\text{ m}, 2\text{ m})"), ("10 pc", r"10\text{ parsecs}"), (r"100\ \Omega", "100 Ω"),
    ("9.8", r"9.8\,\frac{\text{m}}{\text{s}^2}"), ("4.18", r"4.18\text{ J/(g·K)}"), ("0.7", r"0.7\,M_{\odot}"),
    ("11000", r"11000\, kcal m^{-2} yr^{-1}"), ("28.8", r"28.8\, s^{-1}"),
]  # fmt: skip
LOOK_ALIKES = [
    ("0", r"\sin 10^{-50}"), ("42", r"42 \text{ or anything}"), ("41", r"42\mod 43"), ("12:30", "12/30"),
    ("2:00", "2"), ("2024-01-05", "2024-05-01"), ("1:2", "1:2:3"), (r"\sqrt{n}", r"-\sqrt{n}"),
    ("x", r"\sqrt{x^2}"), ("x^{1/2}", r"\sqrt{|x|}"), (r"\ln|x|", r"\ln x"), ("dog", "god"), ("ABC", "BCA"),
    (r"10 \text{ p.m.}", r"10 \text{ a.m.}"), (r"12:30\text{ AM}", r"12:30 \text{ PM}"),
    (r"\text{war}", r"\text{raw}"), (r"\text{stop}", r"\text{pots}"), (r"\text{Lee}", r"\text{eel}"),
    (r"50\%", r"0.5\%"), (r"20\%", "2"), ("-12.5", r"12.5\%"), ("x'+1", "x''+1"), (r"\ddot{x}", r"\dot{x}"),
    (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"),
    (r"\frac{\partial u}{\partial t}=\frac{\partial^2 u}{\partial x^2}",
     r"\frac{\partial u}{\partial x}=\frac{\partial^2 u}{\partial t^2}"),
    (r"\frac{a}{b}", r"\frac{da'}{db}"), ("f'(x)=x", "f'(x)=2x"), ("f'(2)=4", r"\frac{df}{dx}=4"),
    ("f'(t)=2t", r"\frac{df}{dx}=2x"), (r"\$75", r"75\text{ cents}"), (r"75\%", r"75\text{ cents}"),
    (r"\$18", "€18"), ("x>0", r"x^2 \text{ for } x>0"), ("2", r"1 \text{ where } x=2"), ("5", r"5\text{ or }6"),
    ("2x", r"2\text{ m}"), (r"2\text{ m}", "2x"), ("10", r"10\text{ dozen}"), (r"0.7 M_\odot", r"0.7 L_\odot"),
    (r"30^\circ", r"30\text{ radians}"), (r"5\text{ cm}, 3\text{ m}", r"5\text{ m}, 3\text{ cm}"),
]  # fmt: skip
BOTH_WAYS = [  # text, the same to both graders, the same to `math` alone, something else
    # numbers with nouns
    (r"3 \ \text{red apples}, \ 5 \ \text{green apples}",
     [r"3 \text{ red apples},\ 5 \text{ green apples}", r"5 \text{ green apples},\ 3 \text{ red apples}", "3, 5"], [],
     [r"3 \text{ red apples},\ 4 \text{ hard pears}", r"5 \text{ red apples},\ 3 \text{ green apples}", "3", "3, 4"]),
    (r"5 \text{ cats and } 3 \text{ dogs}", [r"\text{3 dogs and 5 cats}", r"5 \text{ cats}, 3 \text{ dogs}", "5, 3"],
     [r"5\text{ cats } 3\text{ dogs}"],
     ["5", "3", "3, 5", r"3 \text{ cats and } 5 \text{ dogs}", r"5 \text{ cats and } 4 \text{ dogs}", "15", "8"]),
    (
        r"5 \text{ cats and } 3 \text{ dogs}",
        [],
        [],
        [
            r"5 \text{ cats}",
            r"5 \text{ cats, } 3 \text{ dogs and } 1 \text{ cow}",
            r"5 \text{ cats and } 2 \text{ horses}",
        ],
    ),
    (r"5 \text{ cats } 3 \text{ dogs}", [], ["5 cats, 3 dogs"], [r"3 \text{ cats } 5 \text{ dogs}", "5", "15"]),
    (r"5\text{ feet }3\text{ inches}", ["5 feet 3 inches"], [], [r"3\text{ feet }5\text{ inches}", "15"]),
    (r"2 \text{ h } 30 \text{ min}", [], [], [r"2 \text{ h } 20 \text{ min}", r"30 \text{ h } 2 \text{ min}", "2"]),
    (r"\text{Ann: 5, Bob: 3}", [], [], [r"\text{Ann: 3, Bob: 5}", r"\text{Ann: 5, Bob: 4}", r"\text{Ann: 5}", "5"]),
    (r"(5 \text{ cats}, 3 \text{ dogs})", [], [],
     [r"(5 \text{ cats}, 4 \text{ dogs})", r"(3 \text{ cats}, 5 \text{ dogs})", "5"]),
    (r"\frac12 \text{ cup}, \frac13 \text{ spoon}", ["1/2, 1/3"], [], [r"\frac12 \text{ cup}, \frac14 \text{ spoon}"]),
    (r"x = 5 \text{ men}, y = 3 \text{ women}", ["x=5, y=3"], [], [r"x = 5 \text{ men}, y = 4 \text{ women}", "5"]),
    (r"2x \text{ apples}, 3x \text{ pears}", [], [], [r"2x \text{ apples}, 4x \text{ pears}", "2x"]),
    (r"\text{5 large and 3 small}", [], [], [r"\text{5 large and 2 small}", "5", "53"]),
    (r"5 \text{ out of } 7", ["5 out of 7"], [], [r"7 \text{ out of } 5", "5", "7"]),
    (r"x \text{ apples and } y \text{ pears}", [], [], [r"y \text{ apples and } x \text{ pears}", "x", "x y"]),
    (r"p \text{ is prime}", [], [], [r"p \text{ is even}", "p"]),
    (r"2x \text{ cm}", ["2x", r"x \cdot 2 \text{ cm}"], [r"2x \text{ centimeters}"],
     [r"2x \text{ m}", r"2y \text{ cm}"]),
    ("5", [r"5 \text{ apples each}", "5千克"], [r"x = 5 \text{ is the only solution}", r"5 \text{ or so}"], ["6千克"]),
    ("5", [], [r"5 \text{ (approximately } 5.1)"], [r"5.1 \text{ (approximately } 5)", r"5 \text{ or } 6", "5K"]),
    # several statements by their numbers in circles
    ("③⑤", ["3, 5", "③, ⑤", "③ ⑤", "❸❺", "5, 3"], [], ["35", "3", "③④", "3.5", "③⑤⑥"]),
    ("⑩⑪", ["10, 11"], [], ["1011", "10"]),
    ("③", ["3"], [], ["5"]),
    ("①②③", ["1,2,3"], [], ["123", "①②"]),
    # degrees
    (r"\frac{\pi}{12}", [r"\frac{\pi}{12} \text{ radians}"], [r"15^\circ", r"15 \text{ degrees}", "15°"],
     ["15", r"12^\circ", r"\frac{15\pi}{12}^\circ", r"15\pi", r"\frac{\pi}{12}^\circ"]),
    (r"180^\circ", ["180"], [r"\pi", r"\pi \text{ rad}"], [r"180\pi", r"2\pi", r"180 \text{ rad}"]),
    (r"\pi", [], [], ["180", r"1^\circ", r"\pi^\circ"]),
    (r"(45^\circ, 60^\circ)", [], [r"\left(\frac{\pi}{4}, \frac{\pi}{3}\right)"],
     [r"\left(\frac{\pi}{3}, \frac{\pi}{4}\right)"]),
    (r"30^\circ, 150^\circ", [], [r"\frac{\pi}{6}, \frac{5\pi}{6}"], [r"\frac{\pi}{6}, \frac{\pi}{3}"]),
    (r"x = 30^\circ + 180^\circ k", [], [r"x = \frac{\pi}{6} + k\pi"], [r"x = \frac{\pi}{6} + 2k\pi"]),
    # without an end
    (r"\text{infinitely many solutions}", [],
     [r"\infty", r"\text{infinitely many}", r"\text{There are infinitely many solutions}", r"\text{infinite}"],
     [r"-\infty", r"\text{finitely many solutions}", r"\text{no solutions}", "1"]),
    (r"\infty", [r"+\infty"], [r"\text{infinity}"], [r"-\infty", r"\text{many solutions}", r"\text{undefined}"]),
    # relations
    (
        r"b \leqslant -4 \text{ or } b = 3",
        [r"b \leq -4 \text{ or } b = 3", r"b \leqq -4 \text{ or } b = 3", "b ⩽ -4 or b = 3"],
        [r"(-\infty, -4] \cup \{3\}"],
        [
            r"(-\infty, -4) \cup \{3\}",
            r"(-\infty, -4]",
            r"b < -4 \text{ or } b = 3",
            r"b \geqslant -4 \text{ or } b = 3",
        ],
    ),
    (r"x \geqslant 2", [r"x \ge 2", r"x \geq 2", "x ≧ 2", r"x \geqq 2"], [r"[2, \infty)"],
     ["x > 2", r"x \leqslant 2", r"x \le 2"]),
    (r"x \to 2", [], [], [r"x \ne 2"]),
    # sets
    (
        r"\{t \mid t < 5/2\} - \{-1\}",
        [r"\{t \mid t < 5/2\}-\{-1\}"],
        [r"(-\infty,-1) \cup (-1, 5/2)", r"\{t \mid t < 5/2\} \setminus \{-1\}", r"\{t : t < 5/2, t \ne -1\}"],
        [
            r"(-\infty,-1) \cup (-1, 5/2]",
            r"(-\infty, 5/2)",
            r"\{t \mid t < 5/2\} - \{1\}",
            r"\{t \mid t < 5/2\} \cup \{-1\}",
        ],
    ),
    (r"\{x \mid x < 1\} \cup \{x \mid x > 2\}", [],
     [r"(-\infty,1) \cup (2,\infty)", r"x < 1 \text{ or } x > 2", r"\mathbb{R} \setminus [1,2]"],
     [r"(-\infty,1) \cap (2,\infty)", r"\{x \mid x < 1\}", r"(-\infty,1] \cup (2,\infty)"]),
    (r"\{x \mid x > 0\} \cap \{x \mid x < 2\}", [], ["(0,2)"], [r"(0,2]", r"(0,\infty)"]),
    (r"((0,1) \cup (2,3)) \cap (0,2)", [], ["(0,1)"], ["(0,2)", r"(0,1) \cup (2,3)"]),
    (r"\Big\{y \mid 0 < y < 7\Big\}", [r"\{y \mid 0 < y < 7\}"],
     [r"\left\{y \,\middle|\, 0 < y < 7\right\}", "(0,7)", r"\bigl(0, 7\bigr)"],
     ["[0,7]", r"\Big\{y \mid 0 < y \le 7\Big\}", "(0,8)", r"\Big\{0, 7\Big\}"]),
    (r"\Bigl[\frac12, 3\Bigr)", [r"\left[\frac12, 3\right)", r"\bigg[\frac12, 3\bigg)"], ["0.5 \\le x < 3"],
     [r"\Bigl(\frac12, 3\Bigr)"]),
    # maximum and minimum
    ("2,9", [], [r"\text{Largest} = 9, \text{Smallest} = 2", "Largest = 9, Smallest = 2"],
     ["Largest = 2, Smallest = 9", "9"]),
    ("9,2", [], ["Largest = 9, Smallest = 2", r"\min = 2, \max = 9"],
     [r"\text{maximum } 2, \text{minimum } 9", "Largest = 9"]),
    ("-3, 5", [], [r"\text{greatest } 5, \text{least } -3", "Highest value: 5, lowest value: -3"],
     [r"\max = -3, \min = 5"]),
    ("16, 3", [], ["w = 16, d = 3"], ["w = 3, d = 16"]),
    # names of functions
    (r"g(x) = \text{cos}\bigg(\frac{\pi}{3}x - \frac{\pi}{4}\bigg)",
     [r"g(x) = \cos\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)", r"\cos\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)"],
     [], [r"\sin\left(\frac{\pi}{3}x - \frac{\pi}{4}\right)", r"\text{sin}\bigg(\frac{\pi}{3}x - \frac{\pi}{4}\bigg)"]),
    (r"\text{cos}^2(x)(x+1)", [r"\cos^2(x)(x+1)", r"\mathrm{cos}^2(x)(x+1)"], [],
     [r"\text{sin}^2(x)(x+1)", r"\cos^2(x)"]),
    (r"2\operatorname{ln}(x)(x+1)", [r"2\ln(x)(x+1)"], [], [r"2\text{tan}(x)(x+1)", "2(x+1)", r"2\text{ln}(x)(x+2)"]),
    (r"30 \text{ sec}", ["30", "30 s"], [], [r"30 \text{ min}", r"31 \text{ sec}"]),
]  # fmt: skip
ADDED = r"\text{ eV}; \ \text{mol}; \ \mathrm{\Omega}; \,\Omega; \,\mu\mathrm{m}; \text{ \AA}; \text{ M}; \,\text{A}"
MORE = r"\text{ T}; \text{ pc}; \text{ dB}; \text{ ly}; \text{ u}; \text{ yr}; \text{ Da}; \text{ mM}; \text{ pm};  eV"
PRODUCTS = r"\ \mathrm{cm^{-1}}; \mathrm{~W}\,\mathrm{m}^{-2}; \,\text{N/kg}; \text{ N m}; ~\mathrm{km}/\mathrm{s}"
OTHERS = "MeV keV, GHz MHz, bar atm, mol mmol, MeV meV, mW MW, Mm mm, Pm pm, T G, A mA, C F, m/s m/s^2, cm^2 cm^3"


def is_right(answer: str, gold: str, check: str = MATH) -> bool:
    return run_check(check, answer, gold, "")[0] is Outcome.CORRECT


@pytest.mark.parametrize(("gold", "right", "wrong"), [
    *NOTATION, *((gold, [answer], []) for gold, answer in SAME), *((gold, [], [answer]) for gold, answer in LOOK_ALIKES)
])  # fmt: skip
def test_the_same_in_another_notation_is_right_and_a_look_alike_wrong(
    gold: str, right: list[str], wrong: list[str]
) -> None:
    assert [answer for answer in [*right, *wrong] if is_right(answer, gold)] == right
    assert not any(is_right(answer, gold, STRICT) for answer in wrong)


@pytest.mark.parametrize(("text", "same", "to_math", "other"), BOTH_WAYS)
def test_answer_and_reference_may_change_places(
    text: str, same: list[str], to_math: list[str], other: list[str]
) -> None:
    everything = [*same, *to_math, *other]
    for check, right in ((MATH, [*same, *to_math]), (STRICT, same)):
        assert [answer for answer in everything if is_right(answer, text, check)] == right
        assert [gold for gold in everything if is_right(text, gold, check)] == right


@pytest.mark.parametrize("unit", [unit.removeprefix(" ") for unit in f"{ADDED}; {MORE}; {PRODUCTS}".split(";")])
def test_a_unit_that_the_reference_leaves_out_is_no_part_of_the_number(unit: str) -> None:
    assert is_right(f"1.6{unit}", "1.6")
    assert not is_right(f"1.7{unit}", "1.6")


@pytest.mark.parametrize("pair", OTHERS.split(", "))
@pytest.mark.parametrize("check", [MATH, STRICT])
def test_the_same_number_of_another_unit_is_wrong(check: str, pair: str) -> None:
    one, other = (rf"5\text{{ {unit}}}" for unit in pair.split())
    assert is_right(one, one.replace("text", "mathrm"), check)
    assert not is_right(one, other, check)
    assert not is_right(other.replace("text", "mathrm"), one, check)


def test_spelling_and_notation_do_not_change_a_unit() -> None:
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
def test_counted_things_are_equal_with_all_their_numbers(counts: Counts, index: int, number: int, way, other, chance):
    reference, (old, noun) = way(counts), counts[index % len(counts)]
    counts_otherwise = [(number if each[1] == noun else each[0], each[1]) for each in counts]
    new = next(each for each in NOUNS if each not in {noun for _, noun in counts})
    wrong = [[*counts, (number, new)], [(number, new), *counts], *([counts_otherwise] if number != old else [])]
    wrong += [[count for count in counts if count[1] != noun]] if len(counts) > 1 else []
    for check in (MATH, STRICT):
        for changed in wrong:
            alone = ", ".join(str(each) for each, _ in changed)
            assert not is_right(other(changed), reference, check)
            assert not is_right(reference, other(changed), check)
            assert not is_right(alone, reference, check)
    assert is_right(other(counts), reference)
    assert is_right(other(chance.sample(counts, len(counts))), reference)
    assert is_right(", ".join(str(each) for each, _ in counts), reference)
