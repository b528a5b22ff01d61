"""Functions as tools: their schemas, how arguments are checked, and what is refused when a tool is loaded."""

import functools
import json

import pytest
from pydantic import TypeAdapter
from synthetic import sample_tools
from synthetic.sample_tools import Unit
from transformers.utils import get_json_schema

from luffy.environments.tool_functions import BUILT_IN_TOOLS, WrongArguments, load_tools, schema_of, tool_of
from luffy.errors import ConfigError

EVERY_TYPE = {
    "text": "a",
    "count": 3,
    "share": 0.5,
    "flag": True,
    "numbers": [1, 2],
    "names": {"a": ["b"]},
    "unit": "km",
}


def load(name):
    return load_tools([f"synthetic.sample_tools:{name}"], "environment.tools")[name]


def rejection(name, arguments):
    with pytest.raises(WrongArguments) as caught:
        load(name).read(arguments)
    return str(caught.value)


def test_the_schema_is_the_one_that_chat_templates_are_given():
    tool = load("weather")
    properties = {
        "location": {"type": "string", "description": "City and country."},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Unit of the temperature."},
    }
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather at a place.",
            "parameters": {"type": "object", "properties": properties, "required": ["location"]},
        },
    }


def area(width: float, height: float, names: list[str], unit: str, exact: bool):
    """Area of a rectangle.

    Args:
        width: Width in metres.
        height: Height in metres.
        names: Labels: any number.
        unit: A unit.
        exact: Whether to round.
    """
    return width * height


def test_transformers_reads_the_same_schema_from_a_function():
    ours = json.dumps(tool_of(area).schema, sort_keys=True)
    assert ours == json.dumps(get_json_schema(area), sort_keys=True)


@pytest.mark.parametrize(
    "annotation", [str, int, float, bool, list[int], list, dict[str, list[float]], int | None, str | int | None, Unit]
)
def test_pydantic_reads_the_same_schema_from_an_annotation(annotation):
    expected = TypeAdapter(annotation).json_schema()
    expected.pop("title", None)
    assert schema_of(annotation) == expected


def test_arguments_become_what_the_annotations_say():
    known = load("every_type").read(EVERY_TYPE)
    assert known == {**EVERY_TYPE, "unit": Unit.KM}
    assert type(load("every_type").read({**EVERY_TYPE, "share": 2})["share"]) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", 3),
        ("count", "3"),
        ("count", 3.0),
        ("count", True),
        ("count", None),
        ("share", "0.5"),
        ("share", True),
        ("flag", 1),
        ("flag", "true"),
        ("numbers", [1, "2"]),
        ("numbers", {"a": 1}),
        ("names", {"a": "b"}),
        ("unit", "metres"),
        ("unit", 1),
        ("maybe", "none"),
        ("level", 3),
        ("level", "1"),
        ("text", "\ud800"),
        ("numbers", functools.reduce(lambda inner, _: [inner], range(300), [])),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value):
    assert rejection("every_type", {**EVERY_TYPE, name: value}).startswith(f"`{name}`: ")


def test_every_argument_that_does_not_fit_is_named_at_once():
    message = rejection("weather", {"unit": "kelvin", "place": "Rome"})
    assert message == (
        "missing argument `location`; unknown argument `place`; `unit`: Input should be 'celsius' or 'fahrenheit' "
        "(it takes location, unit)"
    )


def test_many_or_long_unknown_arguments_do_not_make_a_long_message():
    assert len(rejection("echo", {f"{index}{'x' * 5000}": 1 for index in range(500)})) < 500


def test_the_state_is_no_argument():
    tool = load("remember")
    assert list(tool.parameters) == ["text"]
    assert "state" not in json.dumps(tool.schema)
    assert "unknown argument `state`" in rejection("remember", {"text": "a", "state": {}})


@pytest.mark.parametrize("name", ["decorated", "cached"])
def test_a_decorated_function_keeps_its_parameters(name):
    assert load(name).schema["function"]["parameters"]["required"] == ["number"]
    assert load(name).read({"number": 2}) == {"number": 2}


def test_an_asynchronous_function_is_known_as_one_also_if_a_decorator_made_it_so():
    @functools.wraps(sample_tools.echo)
    async def retried(*args, **kwargs):
        return sample_tools.echo(*args, **kwargs)

    assert load("slow_echo").is_async and tool_of(retried).is_async
    assert not load("echo").is_async


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without_type", "`a` has no type"),
        ("without_docstring", "no docstring"),
        ("of_a_tuple", "tuple[int, int] is not supported; use str"),
        ("with_rest", "`numbers` is variadic positional"),
        ("with_wrong_default", "the default None is not of the annotated type"),
        ("with_stale_docs", "describes `numbre`, which is no parameter"),
        ("with_positional_state", "has to be keyword-only"),
        ("of_a_missing_type", "name 'Missing' is not defined"),
        ("in_steps", "is a generator"),
        ("NUMBER", "is a int; a tool is a function"),
        ("Unit", "a tool is a function"),
        ("no_such_thing", "cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(name, words):
    with pytest.raises(ConfigError) as caught:
        load(name)
    message = str(caught.value)
    assert words in message and "\n" not in message
    assert message.startswith(f"environment.tools: synthetic.sample_tools:{name}") or name == "no_such_thing"


def test_a_tool_is_imported_from_the_working_directory_and_a_module_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "tools_of_this_directory.py").write_text('def add(a: int) -> int:\n    """Add."""\n    return a + 1\n')
    (tmp_path / "broken_tools_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert list(load_tools(["tools_of_this_directory:add"], "environment.tools")) == ["add"]
    with pytest.raises(ConfigError, match="broken_tools_module fails on import: ZeroDivisionError"):
        load_tools(["broken_tools_module:tool"], "environment.tools")


def test_built_in_tools_are_loaded_by_name_and_two_of_one_name_are_refused():
    assert list(load_tools(["calculator"], "environment.tools")) == list(BUILT_IN_TOOLS)
    with pytest.raises(ConfigError, match=r"no built-in tool 'calcluator'; there are: calculator; .*module:function"):
        load_tools(["calcluator"], "environment.tools")
    with pytest.raises(ConfigError, match="two tools are called echo"):
        load_tools(["synthetic.sample_tools:echo"] * 2, "environment.tools")
