"""A script as a training function: each trial runs it with a configuration, as flags, environment variables or a file.

A `Script` is what `strata tune train.py` passes to `tune`. It runs inside the process of the trial, which was forked
from a warm one, and as `__main__`, as `python train.py` would. So it starts in milliseconds, and `strata.init()` in it
reports to the study and resumes from the checkpoint of the trial.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strata.errors import ConfigError
from strata.launch.environment import read_environment
from strata.launch.processes.imports import preloads
from strata.launch.processes.warm import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.tune.space.parameters import Config

CONFIG_FILE = "config.json"
DEFAULTS = {"flags": "--{name} {value}", "env": "{NAME}", "file": "--config {path}"}
"""How a configuration is passed, and the format of one parameter; of the path, for a file."""
_FIELDS = {"flags": ("name", "NAME", "na-me", "value"), "env": ("name", "NAME"), "file": ("path",)}
_EXAMPLES = {"flags": "'--{name}={value}' or '--{na-me} {value}'", "env": "'TUNE_{NAME}'", "file": "'--config {path}'"}
_FIELD = re.compile(r"\{([^{}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigStyle:
    """How a script receives its configuration."""

    how: Literal["flags", "env", "file"] = "flags"
    format: str = ""
    """Format of a parameter: `{name}`, `{NAME}` in upper case, `{na-me}` with dashes, `{value}`. Empty: the default."""
    has_switches: bool = False
    """Pass a boolean as `--name` or `--no-name`, without a value."""

    def __post_init__(self) -> None:
        if self.how not in DEFAULTS:
            raise ConfigError(f"--config-as {self.how!r} is unknown; use {', '.join(DEFAULTS)}", field="config_as")
        found, allowed = _FIELD.findall(self._format), _FIELDS[self.how]
        unknown = [each for each in found if each not in allowed]
        has_name = self.how == "file" or any(each in found for each in ("name", "NAME", "na-me"))
        is_whole = has_name and all(each in found for each in allowed if each in ("value", "path"))
        if unknown or not is_whole:
            why = f"{{{unknown[0]}}} is unknown there" if unknown else "it would not pass all of the configuration"
            raise ConfigError(
                f"--config-format {self._format!r} is invalid with --config-as {self.how}: {why}; write it as "
                f"{_EXAMPLES[self.how]}",
                field="config_format",
            )
        if self.has_switches and self.how != "flags":
            raise ConfigError(f"--switches needs --config-as flags, not {self.how}", field="switches")

    @property
    def _format(self) -> str:
        return self.format or DEFAULTS[self.how]

    def check(self, names: Mapping[str, Any]) -> None:
        """Check that all parameters of a space can be passed like this.

        Raises:
            ConfigError: The name of one cannot be a variable, or two are the same variable.
        """
        if self.how != "env":
            return
        found: dict[str, str] = {}
        for name in names:
            variable = self._filled(self._format, name)
            if not _VARIABLE.fullmatch(variable):
                raise ConfigError(
                    f"parameter {name!r} would be the variable {variable!r}, which is not a valid name; rename it, or "
                    "use --config-as file",
                    field="config_as",
                )
            if variable in found:
                raise ConfigError(
                    f"parameters {found[variable]!r} and {name!r} would both be the variable {variable!r}; use "
                    "--config-format '{name}'",
                    field="config_format",
                )
            found[variable] = name

    def flags(self, config: Config) -> list[str]:
        """Return the configuration as arguments."""
        return [word for name, value in config.items() for word in self._flag(name, value)]

    def _flag(self, name: str, value: Any) -> Iterator[str]:
        words = self._format.split()
        if self.has_switches and isinstance(value, bool):
            first = self._filled(words[0].partition("=")[0], name)
            yield first if value else re.sub(r"^(-*)", r"\1no-", first)
            return
        for word in words:
            yield self._filled(word, name, in_words(value))

    def variables(self, config: Config) -> dict[str, str]:
        """Return the configuration as environment variables."""
        return {self._filled(self._format, name): in_words(value) for name, value in config.items()}

    def file_arguments(self, path: Path) -> list[str]:
        """Return the arguments that pass a file."""
        return [word.replace("{path}", str(path)) for word in self._format.split()]

    @staticmethod
    def _filled(text: str, name: str, value: str = "") -> str:
        fields = {"name": name, "NAME": _upper(name), "na-me": name.replace("_", "-"), "value": value}
        return _FIELD.sub(lambda found: fields[found[1]], text)


def _upper(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name).upper()


def in_words(value: bool | float | str | None) -> str:
    """Return a value as a script reads it: `true`, `none`, `0.001`, text as it is."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def as_file(config: Config) -> str:
    """Return a configuration as JSON that readers of YAML 1.1 understand, too: for them, `1e-05` would be text."""
    lines = [f"  {json.dumps(name)}: {_json(value)}" for name, value in config.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    text = json.dumps(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training function that runs a script. It is pickled by reference to this class."""

    path: str
    """A file, or with `is_module` the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    style: ConfigStyle = field(default_factory=ConfigStyle)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of its processes, beside those of the caller."""
    preload: tuple[str, ...] = ()
    """Modules to import before processes are forked, beside those that the script imports."""

    @property
    def shown(self) -> str:
        """The command, for people."""
        name = ["-m", self.path] if self.is_module else [Path(self.path).name]
        return shlex.join(["tune", *name, *self.arguments])

    def imports(self) -> tuple[str, ...]:
        """Return the modules that a process needs for it."""
        return (*preloads(self.path, is_module=self.is_module, directory=str(Path.cwd())), *self.preload)

    def __call__(self, config: Config) -> None:
        arguments = [*self.arguments]
        match self.style.how:
            case "flags":
                arguments += self.style.flags(config)
            case "env":
                os.environ.update(self.style.variables(config))
            case "file":
                arguments += self.style.file_arguments(_written(config))
        run_script(self.path, arguments, is_module=self.is_module)


def _written(config: Config) -> Path:
    """Write the file of this trial, beside its checkpoints. Every rank of a trial may do so."""
    spec = read_environment(os.environ)
    assert spec is not None, "the process of a trial has the environment of a worker"
    directory = Path(spec.checkpoints).parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = directory / f".{CONFIG_FILE}.{os.getpid()}"
    draft.write_text(as_file(config), encoding="utf-8")
    return draft.replace(directory / CONFIG_FILE)
