"""Spaces as plain values and as YAML:

    parameters:
      learning_rate: {type: float, min: 1e-5, max: 1e-2, log: true, default: 1e-3}
      batch_size: {type: int, values: [32, 64, 128]}
      optimizer: {type: categorical, choices: [sgd, adam]}
      momentum: {type: float, min: 0, max: 0.99, when: {optimizer: sgd}}
    constraints: ["batch_size * learning_rate <= 1"]
    enqueue: [{learning_rate: 3e-4, batch_size: 64}]

The keys are the arguments of the methods of `SearchSpace`, which also check the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from strata.config import read_yaml
from strata.errors import ConfigError
from strata.tune.space.space import SearchSpace

if TYPE_CHECKING:
    import os

SECTIONS = ("parameters", "constraints", "enqueue")
KINDS = ("float", "int", "categorical", "bool", "fixed")


def write_yaml(space: SearchSpace) -> str:
    return yaml.safe_dump(space.to_dict(), sort_keys=False, allow_unicode=True)


def read_yaml_space(path: str | os.PathLike[str]) -> SearchSpace:
    source = str(path)
    return read_space(read_yaml(source), source=source)


def read_space(values: Mapping[str, Any], *, source: str) -> SearchSpace:
    """
    Raises:
        ConfigError: A part is missing, unknown or invalid; the message starts with `source`.
    """
    space = SearchSpace()
    try:
        _check_sections(values)
        for name, entry in _mapping(values.get("parameters"), "parameters").items():
            _add(space, name, _mapping(entry, f"parameter {name!r}"))
        for text in _sequence(values.get("constraints"), "constraints"):
            space.add_constraint(text)
        for point in _sequence(values.get("enqueue"), "enqueue"):
            space.enqueue(_mapping(point, "enqueue"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}", field=error.field) from error
    return space


def _check_sections(values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in SECTIONS:
            raise ConfigError(f"unknown section {key!r}; use {', '.join(SECTIONS)}", field=str(key))


def _add(space: SearchSpace, name: str, entry: Mapping[str, Any]) -> None:
    kind = entry.get("type")
    if kind not in KINDS:
        raise ConfigError(f"parameter {name!r}: type={kind!r} is unknown; use {', '.join(KINDS)}", field=str(name))
    method = getattr(space, f"add_{kind}")
    options = [each for each in inspect.signature(method).parameters if each != "name"]
    arguments = {key: value for key, value in entry.items() if key != "type"}
    for key in arguments:
        if key not in options:
            known = ", ".join(options)
            raise ConfigError(f"parameter {name!r}: {key!r} is not an option of {kind}; use {known}", field=str(name))
    for required in ("choices", "value"):
        if required in options and required not in arguments:
            raise ConfigError(f"parameter {name!r}: {required} is missing; add it", field=str(name))
    method(name, **arguments)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping, found {value!r:.60}", field=what)
    return value


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{what} must be a list, found {value!r:.60}", field=what)
    return value
