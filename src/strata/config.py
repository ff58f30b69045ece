"""Load configs from YAML files and mappings.

Configs are frozen dataclasses that live beside their owners and validate their own values. This module only passes
values to them: it walks the dataclass and the mapping side by side, so that every error names the dotted path of the
setting (`lease.lease_s`), the expected type and the value found.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

from strata.errors import ConfigError, InvalidArgument

T = TypeVar("T")
MAX_BYTES = 2**40
_FACTORS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def load(cls: type[T], values: Mapping[str, Any], *, source: str) -> T:
    """Build the dataclass `cls` from `values`; `source` names their origin in error messages."""
    return typing.cast("T", _build(cls, values, source=source, path=""))


def load_yaml(cls: type[T], path: str | Path) -> T:
    """Build the dataclass `cls` from a YAML file; an empty file gives the defaults."""
    return load(cls, read_yaml(path), source=str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}") from error
    try:
        found = yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML: {_place(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must contain settings as `name: value` lines, found {_found(found)}")
    return found


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `overrides` applied, section by section. An override of None changes nothing."""
    merged = dict(values)
    for key, override in overrides.items():
        if isinstance(override, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, override)
        elif override is not None:
            merged[key] = override
    return merged


def _build(cls: type[Any], values: object, *, source: str, path: str) -> object:
    if values is None:  # a section whose lines are all commented out
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {path} is a section of settings, found {_found(values)}", field=path)
    types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            raise _unknown(str(key), known=list(fields), source=source, path=path)
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{source}: {_join(path, name)} is required; set it", field=_join(path, name))
    return cls(
        **{name: _convert(types[name], value, source=source, path=_join(path, name)) for name, value in values.items()}
    )


def _convert(kind: Any, value: object, *, source: str, path: str) -> object:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value, source=source, path=path)
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        expected, found = _expected(kind), _found(value) + _nearest_choice(kind, value)
        raise ConfigError(f"{source}: {path} must be {expected}, found {found}", field=path) from None
    if isinstance(converted, float) and math.isnan(converted):
        # NaN compares false with every bound, so it could slip past the owner's checks.
        raise ConfigError(f"{source}: {path} must be a number, found nan", field=path)
    return converted


def _unknown(key: str, *, known: list[str], source: str, path: str) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1)
    cure = f"did you mean {_join(path, near[0])}?" if near else f"known here: {', '.join(known)}"
    return ConfigError(f"{source}: unknown setting {_join(path, key)}; {cure}", field=_join(path, key))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_WORDS: dict[Any, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return _WORDS.get(kind, str(kind))


def _found(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str) and len(value) > 40:
        value = value[:40] + "…"
    return f"{_WORDS.get(type(value), type(value).__name__)} ({value!r})"


def _nearest_choice(kind: Any, value: object) -> str:
    if typing.get_origin(kind) is not Literal or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, [str(choice) for choice in typing.get_args(kind)], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class _Loader(yaml.SafeLoader):
    """A SafeLoader with the scalars of YAML 1.2.

    PyYAML follows YAML 1.1, which reads `http: off` as the boolean false and `1e-3` as text. This loader reads text and
    a number, and rejects duplicate keys.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^([-+]?(\.[0-9]+|[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _place(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"


def parse_bytes(size: object, *, field: str = "split_bytes") -> int:
    """Parse a size: 128MiB, 1GB, 1.5 GiB or a number of bytes.

    Raises:
        InvalidArgument: The size has another form, or is not between 1 byte and 1 TiB.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidArgument(f"{field} is {size!r}; pass a number of bytes or text such as '128MiB'", field=field)
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?) *([a-z]*)", str(size).strip(), re.ASCII | re.IGNORECASE)
    unit = found[2].lower() if found else ""
    if found and unit in ("k", "m", "g", "t"):
        raise InvalidArgument(
            f"{field} is {size!r}; the unit is ambiguous; write {found[1]}{found[2].upper()}iB (powers of 1024) or "
            f"{found[1]}{found[2].upper()}B (powers of 1000)",
            field=field,
        )
    if not found or unit not in _FACTORS:
        raise InvalidArgument(f"{field} is {size!r}; write it as 128MiB, 1GB or a number of bytes", field=field)
    num_bytes = int(float(found[1]) * _FACTORS[unit]) if "." in found[1] else int(found[1]) * _FACTORS[unit]
    if not 1 <= num_bytes <= MAX_BYTES:
        raise InvalidArgument(f"{field} is {size!r}; it must be between 1 byte and 1TiB", field=field)
    return num_bytes
