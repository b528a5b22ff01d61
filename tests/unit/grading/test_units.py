"""Upright letters after a number are its unit: equal where the reference names none, different where another."""

import json
import re

import pytest
from support.installed import DATASETS, needs_datasets

from luffy.grading.checks import MATH, STRICT, run_check
from luffy.grading.equivalence.text import canonical_unit
from luffy.grading.extract import last_box
from luffy.types import Outcome

MINERVA = DATASETS / "minerva_math" / "test.jsonl"
ADDED = r"\text{ eV}; \ \text{mol}; \ \mathrm{\Omega}; \,\Omega; \,\mu\mathrm{m}; \text{ \AA}; \text{ M}; \,\text{A}"
MORE = r"\text{ T}; \text{ pc}; \text{ dB}; \text{ ly}; \text{ u}; \text{ yr}; \text{ Da}; \text{ mM}; \text{ pm};  eV"
PRODUCTS = r"\ \mathrm{cm^{-1}}; \mathrm{~W}\,\mathrm{m}^{-2}; \,\text{N/kg}; \text{ N m}; ~\mathrm{km}/\mathrm{s}"
OTHERS = "MeV keV, GHz MHz, bar atm, mol mmol, MeV meV, mW MW, Mm mm, Pm pm, T G, A mA, C F, m/s m/s^2, cm^2 cm^3"
SAME = [
    ("1.6e-19", r"1.6\times10^{-19}\text{ C}"),
    (r"1.6\text{ eV}", "1.6"),
    (r"1.6\text{ eV}", "1.6 eV"),
    (r"5\text{ Hz}", r"5 \text{ hertz}"),
    (r"5\text{ kPa}", r"5\text{ kilopascals}"),
    (r"5\text{ m/s}", r"5\,\mathrm{m}\cdot\mathrm{s}^{-1}"),
    ("(1,2)", r"(1\text{ m}, 2\text{ m})"),
    ("5000 G", r"5000\text{ gauss}"),
    ("10 pc", r"10\text{ parsecs}"),
    (r"5\ \mu m", r"5\text{ µm}"),
    (r"5\ \mu m", r"5\text{ microns}"),
    (r"100\ \Omega", "100 Ω"),
    ("9.8 m/s^2", r"9.8\text{ m s}^{-2}"),
    ("9.8", r"9.8\,\frac{\text{m}}{\text{s}^2}"),
    ("4.18", r"4.18\text{ J/(g·K)}"),
    ("0.7", r"0.7\,M_{\odot}"),
    ("11000", r"11000\, kcal m^{-2} yr^{-1}"),
    ("28.8", r"28.8\, s^{-1}"),
]
DIFFERENT = [
    ("1.6", r"-1.6\text{ eV}"),
    ("1.6", r"1.6\times 10^{-19}\text{ C}"),
    ("2", r"2\mathrm{i}"),
    ("3", r"3\mathrm{e}"),
    ("2", "2pc"),
    ("2", "2 p c"),
    ("5", r"5\text{ or }6"),
    ("2x", r"2\text{ m}"),
    (r"2\text{ m}", "2x"),
    ("10", r"10\text{ dozen}"),
    (r"\$5", r"5\text{ cents}"),
    ("5000 G", r"5000\text{ T}"),
    (r"5\ \mu m", r"5\text{ mm}"),
    ("9.8 m/s^2", r"9.8\text{ m/s}"),
    (r"0.7 M_\odot", r"0.7 L_\odot"),
    (r"30^\circ", r"30\text{ radians}"),
    ("3", "3 n^{-1}"),
    (r"5\text{ cm}, 3\text{ m}", r"5\text{ m}, 3\text{ cm}"),
]


@pytest.mark.parametrize("unit", [unit.removeprefix(" ") for unit in f"{ADDED}; {MORE}; {PRODUCTS}".split(";")])
def test_a_unit_that_the_reference_leaves_out_is_no_part_of_the_number(unit: str) -> None:
    assert run_check(MATH, f"1.6{unit}", "1.6", "")[0] is Outcome.CORRECT
    assert run_check(MATH, f"1.7{unit}", "1.6", "")[0] is not Outcome.CORRECT


@pytest.mark.parametrize("pair", OTHERS.split(", "))
@pytest.mark.parametrize("check", [MATH, STRICT])
def test_the_same_number_of_another_unit_is_wrong(check: str, pair: str) -> None:
    one, other = (rf"5\text{{ {unit}}}" for unit in pair.split())
    assert run_check(check, one, one.replace("text", "mathrm"), "")[0] is Outcome.CORRECT
    assert run_check(check, one, other, "")[0] is not Outcome.CORRECT
    assert run_check(check, other.replace("text", "mathrm"), one, "")[0] is not Outcome.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer", "same"), [*((*pair, True) for pair in SAME), *((*pair, False) for pair in DIFFERENT)]
)
def test_units_are_compared_and_what_only_looks_like_one_stays_wrong(gold: str, answer: str, same: bool) -> None:
    assert (run_check(MATH, answer, gold, "")[0] is Outcome.CORRECT) is same


def test_spelling_and_notation_do_not_change_a_unit() -> None:
    for one, other in (("km/h", "kilometers per hour"), ("MeV", "megaelectronvolts"), ("m s^{-1}", "m/s")):
        assert canonical_unit(one) == canonical_unit(other)


@needs_datasets
def test_numbers_of_minerva_with_the_unit_that_their_solutions_name() -> None:
    named = 0
    for problem in map(json.loads, MINERVA.read_text(encoding="utf-8").splitlines()):
        gold = last_box(problem["solution"]) or ""
        unit = re.search(
            re.escape(gold) + r"\}\s*(\\(?:mathrm|text)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?)", problem["solution"]
        )
        if not re.fullmatch("-?[0-9.e]+", gold) or unit is None:
            continue
        named += 1
        assert run_check(MATH, f"{gold} {unit[1]}", gold, "")[0] is Outcome.CORRECT, (gold, unit[1])
    assert named >= 30
