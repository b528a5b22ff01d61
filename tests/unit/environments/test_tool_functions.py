"""Functions as tools: their schemas, how arguments are checked, what is refused when a tool is loaded; the calculator.

The calculator is exact against fractions, and bounded against everything else.
"""

import functools
import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.refusals import refused
from synthetic import sample_tools
from synthetic.sample_tools import Unit
from transformers.utils import get_json_schema

from luffy.environments import EpisodeState
from luffy.environments.calculator import calculator
from luffy.environments.tool_functions import BUILT_IN_TOOLS, WrongArguments, load_tools, schema_of, tool_of

EVERY_TYPE = {
    "text": "a", "count": 3, "share": 0.5, "flag": True, "numbers": [1, 2], "names": {"a": ["b"]}, "unit": "km",
}  # fmt: skip


def load(name):
    return load_tools([f"synthetic.sample_tools:{name}"], "environment.tools")[name]


def area(width: float, names: list[str], exact: bool):
    """Area of a rectangle.

    Args:
        width: Width in metres.
        names: Labels: any number.
        exact: Whether to round.
    """
    return width**2


NESTED = functools.reduce(lambda inner, _: [inner], range(300), [])
REJECTED = [  # tool, arguments, how the refusal begins
    *(
        ("every_type", {**EVERY_TYPE, name: value}, f"`{name}`: ")
        for name, values in {
            "text": (3, "\ud800"), "count": ("3", 3.0, True, None), "share": ("0.5", True), "flag": (1, "true"),
            "numbers": ([1, "2"], {"a": 1}, NESTED), "names": ({"a": "b"},), "unit": ("metres", 1),
            "maybe": ("none",), "level": (3, "1"),
        }.items()
        for value in values
    ),
    ("remember", {"text": "a", "state": {}}, "unknown argument `state`"),
    ("echo", {f"{index}{'x' * 5000}": 1 for index in range(500)}, ""),
    ("weather", {"unit": "kelvin", "place": "Rome"}, "missing argument `location`; unknown argument `place`; "
     "`unit`: Input should be 'celsius' or 'fahrenheit' (it takes location, unit)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "reason"), REJECTED)
def test_every_argument_that_does_not_fit_is_named_at_once_and_in_bounded_length(name, arguments, reason):
    with pytest.raises(WrongArguments) as caught:
        load(name).read(arguments)
    assert str(caught.value).startswith(reason) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("signature", "body", "words"),
    [
        ("a, b: int", "'Add.'", "`a` has no type"),
        ("a: int", "return a", "no docstring"),
        ("pair: tuple[int, int]", "'Add.'", "tuple[int, int] is not supported; use str"),
        ("*numbers: int", "'Add.'", "`numbers` is variadic positional"),
        ("number: int = None", "'Double.'", "the default None is not of the annotated type"),
        ("state: EpisodeState", "'Takes the state where the policy could pass it.'", "has to be keyword-only"),
        ("number: Missing", "'Double.'", "name 'Missing' is not defined"),
        ("number: int", "'Count.'; yield number", "is a generator"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(signature, body, words):
    made = {"EpisodeState": EpisodeState}
    exec(f"from __future__ import annotations\ndef made({signature}): {body}", made)
    with refused("environment.tools: own:made", words):
        tool_of(made["made"], "made", "environment.tools: own:made")


def test_tools_are_built_in_or_imported_from_the_working_directory_each_name_once(tmp_path, monkeypatch):
    (tmp_path / "tools_of_this_directory.py").write_text('def add(a: int) -> int:\n    """Add."""\n    return a + 1\n')
    (tmp_path / "broken_tools_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert list(load_tools(["tools_of_this_directory:add"], "environment.tools")) == ["add"]
    assert list(load_tools(["calculator"], "environment.tools")) == list(BUILT_IN_TOOLS)
    for paths, words in (
        (["broken_tools_module:tool"], "broken_tools_module fails on import: ZeroDivisionError"),
        (["calcluator"], "no built-in tool 'calcluator'; there are: calculator; "),
        (["synthetic.sample_tools:echo"] * 2, "two tools are called echo"),
        (["synthetic.sample_tools:with_stale_docs"], "describes `numbre`, which is no parameter"),
        (["synthetic.sample_tools:NUMBER"], "environment.tools: synthetic.sample_tools:NUMBER is a int; a tool is"),
        (["synthetic.sample_tools:Unit"], "a tool is a function"),
        (["synthetic.sample_tools:no_such_thing"], "cannot be imported"),
    ):
        with refused(words):
            load_tools(paths, "environment.tools")


RESULTS = {
    "1+1": "2", "0.1 + 0.2": "0.3", "(3 + 4.5) * 2": "15", "2**100": "1267650600228229401496703205376",
    "2**-3": "0.125", "-7 // 2": "-4", "7 % -3": "-2", "10 - -2": "12", "1e3": "1000", "5 ÷ 2 × 3 − 1": "6.5",
    "1/3": "0.333333333333 (rounded)", "-2/3": "-0.666666666667 (rounded)",
    "10**20 + 1/3": "1.00000000000e20 (rounded)",
    "99999999999999/10**13 + 1/10**40": "10 (rounded)", "10**100": "1.00000000000e100 (rounded)",
    "1/10**30": "1.00000000000e-30 (rounded)", "0**0": "1",
}  # fmt: skip


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(lambda value: f"{value:f}")
SIGNED = st.sampled_from("+-*/")


@given(st.recursive(NUMBERS, lambda inner: st.tuples(inner, SIGNED, inner).map("(%s %s %s)".__mod__), max_leaves=16))
def test_every_expression_has_the_value_that_fractions_give_it(expression):
    try:
        value = eval(re.sub(r"[\d.]+", r"Fraction('\g<0>')", expression))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculator(expression)
        return
    text = calculator(expression)
    shown = Fraction(text.removesuffix(" (rounded)"))
    assert shown == value or (text.endswith("(rounded)") and abs(shown - value) <= abs(value) / 10**11)


TOO_LARGE = ("9**9**9", "9**99999999", "2**4097", "(1/3)**9999", "1e9999999999", "9" * 1001, "9**999 * " * 100 + "1")
UNDEFINED = ("1/0", "1//0", "1 % 0", "0**-1", "2**0.5")
TOO_LONG = ("(" * 900, "(" * 400 + "1" + ")" * 400, "-" * 999 + "1", "1+" * 499 + "1")
NO_ARITHMETIC = (
    *("", "   ", "()", "1 +", "1 2", "(1)(2)", "1,2", "3 ^ 2", "e", "0x10", "1_000", "1j", "1 if 1 else 2"),
    *("__import__('os').system('true')", "[1][0]", "1\x00", "\ud800", "１"),
)


def test_results_are_exact_where_they_are_short_and_what_is_no_short_arithmetic_is_refused_in_one_line():
    assert {expression: calculator(expression) for expression in RESULTS} == RESULTS
    for expression in (*TOO_LARGE, *UNDEFINED, *TOO_LONG, *NO_ARITHMETIC):
        with pytest.raises(ValueError, match=r"\A[^\n]{5,120}\Z"):
            pytest.fail(f"{expression!r} is {calculator(expression)}")


def test_transformers_and_pydantic_read_the_same_schema():
    ours = json.dumps(tool_of(area).schema, sort_keys=True)
    assert ours == json.dumps(get_json_schema(area), sort_keys=True)
    for annotation in (
        str, int, float, bool, list[int], list, dict[str, list[float]], int | None, str | int | None, Unit,
    ):  # fmt: skip
        expected = TypeAdapter(annotation).json_schema()
        expected.pop("title", None)
        assert schema_of(annotation) == expected


def test_arguments_become_what_the_annotations_say_also_of_decorated_functions_and_state_is_none():
    known = load("every_type").read({**EVERY_TYPE, "share": 2})
    assert known == {**EVERY_TYPE, "unit": Unit.KM, "share": 2.0} and type(known["share"]) is float
    for name in ("decorated", "cached"):
        assert load(name).schema["function"]["parameters"]["required"] == ["number"]
        assert load(name).read({"number": 2}) == {"number": 2}
    tool = load("remember")
    assert list(tool.parameters) == ["text"] and "state" not in json.dumps(tool.schema)

    @functools.wraps(sample_tools.echo)
    async def retried(*args, **kwargs):
        return sample_tools.echo(*args, **kwargs)

    assert load("slow_echo").is_async and tool_of(retried).is_async and not load("echo").is_async
