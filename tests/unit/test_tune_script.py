"""How a configuration reaches a script: flags, environment variables, a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from strata.errors import ConfigError
from strata.tune.script import ConfigStyle, Script, as_file

CONFIG = {"learning_rate": 1e-05, "layers": 3, "optimizer": "sgd nesterov", "use_bias": False, "schedule": None}


def test_flags_carry_exact_values_and_one_argument_per_value() -> None:
    assert ConfigStyle().flags(CONFIG) == [
        *("--learning_rate", "1e-05", "--layers", "3", "--optimizer", "sgd nesterov"),
        *("--use_bias", "false", "--schedule", "none"),
    ]


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("--{name}={value}", ["--learning_rate=1e-05"]),
        ("--{na-me} {value}", ["--learning-rate", "1e-05"]),
        ("{name}={value}", ["learning_rate=1e-05"]),
        ("--set {NAME} {value}", ["--set", "LEARNING_RATE", "1e-05"]),
    ],
)
def test_the_spelling_of_flags_can_be_chosen(pattern: str, flags: list[str]) -> None:
    assert ConfigStyle(format=pattern).flags({"learning_rate": 1e-05}) == flags


def test_a_value_with_braces_is_passed_as_it_is() -> None:
    assert ConfigStyle().flags({"a": "{name}"}) == ["--a", "{name}"]
    assert ConfigStyle(format="--{name}={value}").flags({"a": "{value} {path}"}) == ["--a={value} {path}"]


def test_switches_have_no_values() -> None:
    style = ConfigStyle(has_switches=True)
    assert style.flags({"use_bias": True, "layers": 2}) == ["--use_bias", "--layers", "2"]
    assert style.flags({"use_bias": False}) == ["--no-use_bias"]
    dashed = ConfigStyle(format="--{na-me}={value}", has_switches=True)
    assert dashed.flags({"use_bias": False}) == ["--no-use-bias"]


def test_variables_have_upper_case_names() -> None:
    assert ConfigStyle(how="env").variables({"learning_rate": 0.5, "adam.beta": 1}) == {
        "LEARNING_RATE": "0.5",
        "ADAM_BETA": "1",
    }
    assert ConfigStyle(how="env", format="TUNE_{name}").variables({"x": True}) == {"TUNE_x": "true"}


def test_a_file_means_the_same_to_readers_of_json_and_of_yaml() -> None:
    text = as_file(CONFIG | {"large": 1e22, "negative": -1e-07, "text": "1e5"})

    assert json.loads(text) == CONFIG | {"large": 1e22, "negative": -1e-07, "text": "1e5"}
    assert yaml.safe_load(text) == json.loads(text)
    assert json.loads(as_file({})) == {}


def test_the_path_of_a_file_is_one_argument() -> None:
    assert ConfigStyle(how="file").file_arguments(Path("/a b/c.json")) == ["--config", "/a b/c.json"]
    assert ConfigStyle(how="file", format="--config={path}").file_arguments(Path("/c")) == ["--config=/c"]


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ({"how": "yaml"}, "--config-as 'yaml' is unknown; use flags, env, file"),
        ({"format": "--{nmae} {value}"}, r"{nmae} is unknown there; write it as '--{name}={value}'"),
        ({"format": "--{name}"}, "it would not pass all of the configuration"),
        ({"format": "--x {value}"}, "it would not pass all of the configuration"),
        ({"how": "env", "format": "LEARNING_RATE"}, "it would not pass all"),
        ({"how": "file", "format": "--config"}, "it would not pass all"),
        ({"how": "env", "has_switches": True}, "--switches needs --config-as flags, not env"),
    ],
)
def test_an_invalid_style_is_refused_with_the_cure(style: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConfigStyle(**style)  # type: ignore[arg-type]


def test_parameters_that_would_share_a_variable_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a.b' and 'a_b' would both be the variable 'A_B'; use"):
        ConfigStyle(how="env").check({"a.b": 1, "a_b": 2})
    with pytest.raises(ConfigError, match=r"parameter '1st' would be the variable '1ST'"):
        ConfigStyle(how="env").check({"1st": 1})
    ConfigStyle().check({"1st": 1, "a.b": 1, "a_b": 2})


def test_the_command_of_a_script_is_shown_without_its_directory() -> None:
    assert Script(path="/home/me/train.py", arguments=("--epochs", "3")).shown == "tune train.py --epochs 3"
    assert Script(path="pkg.train", is_module=True).shown == "tune -m pkg.train"
