"""Refusals name the setting, what was expected, what was found and what to do."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strata import config
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.errors import ConfigError

WRONG_TYPE: dict[Any, object] = {str: 7, int: "seven", float: "soon"}


def load(values: dict[str, Any]) -> CoordinatorConfig:
    return config.load(CoordinatorConfig, values, source="coordinator.yaml")


def refusal(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(values)
    return caught.value


def leaves(cls: type[Any], path: str = "") -> list[tuple[str, Any]]:
    types = typing.get_type_hints(cls)
    return [
        leaf
        for field in dataclasses.fields(cls)
        for leaf in (
            leaves(types[field.name], f"{path}{field.name}.")
            if dataclasses.is_dataclass(types[field.name])
            else [(path + field.name, types[field.name])]
        )
    ]


def nested(path: str, value: object) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def test_nothing_given_means_all_defaults() -> None:
    assert load({}) == CoordinatorConfig()


def test_nested_sections_are_read_and_whole_numbers_serve_as_numbers() -> None:
    loaded = load({"listen": "127.0.0.1:0", "lease": {"lease_s": 8, "heartbeat_s": 2}})

    assert (loaded.listen, loaded.lease) == ("127.0.0.1:0", LeaseConfig(lease_s=8.0, heartbeat_s=2.0))
    assert isinstance(loaded.lease.lease_s, float)


def test_a_section_with_nothing_in_it_means_its_defaults() -> None:
    assert load({"lease": None}).lease == LeaseConfig()


def test_an_unknown_setting_is_refused_with_the_nearest_known_one() -> None:
    error = refusal({"lease": {"lease_sec": 5.0}})

    assert error.field == "lease.lease_sec"
    assert str(error) == "coordinator.yaml: unknown setting lease.lease_sec; did you mean lease.lease_s?"


def test_an_unknown_setting_that_resembles_none_is_refused_with_the_list() -> None:
    assert "known here: timeout_s, max_timeout_s" in str(refusal({"barrier": {"quux": 1}}))


def test_a_value_where_a_section_belongs_is_refused() -> None:
    error = refusal({"lease": 5})

    assert error.field == "lease"
    assert "lease is a section of settings, found a whole number (5)" in str(error)


@pytest.mark.parametrize(("path", "kind"), leaves(CoordinatorConfig))
def test_every_setting_refuses_a_value_of_another_type(path: str, kind: Any) -> None:
    error = refusal(nested(path, WRONG_TYPE.get(kind, 7)))

    assert error.field == path
    assert f"coordinator.yaml: {path} must be " in str(error)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((path, 0) for path, kind in leaves(CoordinatorConfig) if path.startswith("limits.")),
        ("lease.heartbeat_s", 0),
        ("lease.suspicion_s", -1.0),
        ("lease.suspicion_s", 60.0),
        ("lease.lease_s", 0.0),
        ("lease.lease_s", 1.5),
        ("lease.tick_s", 0),
        ("lease.tick_s", float("nan")),
        ("lease.step_timeout_s", 1.0),
        ("lease.step_timeout_s", float("nan")),
        ("barrier.timeout_s", 0.0),
        ("journal.snapshot_every", 0),
        ("journal.history_events", -1),
        ("journal.max_batch", 0),
        ("network.transport", "rdma"),
        ("network.transport", "udp"),
        ("network.port", 0),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_the_name_of_its_field(path: str, value: object) -> None:
    assert refusal(nested(path, value)).field == path


def test_a_bool_is_not_a_number() -> None:
    assert "must be a number, found true or false (True)" in str(refusal({"lease": {"lease_s": True}}))


def test_a_choice_that_does_not_exist_is_refused_with_the_choices() -> None:
    error = refusal({"network": {"transport": "rmda"}})

    assert "must be one of 'tcp', 'shm', 'rdma', found text ('rmda'); did you mean 'rdma'?" in str(error)


def test_the_rdma_section_is_understood_and_its_transport_refused_with_the_cure() -> None:
    error = refusal({"network": {"transport": "rdma", "device": "mlx5_0", "port": 1}})

    assert error.field == "network.transport"
    assert "is not available yet; use 'tcp'" in str(error)
    assert load({"network": {"transport": "tcp", "device": "mlx5_0", "port": 1}}).network.device == "mlx5_0"


def test_a_setting_without_default_must_be_given() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        path: str
        retries: int = 3

    with pytest.raises(ConfigError, match=r"job\.yaml: path is required") as caught:
        config.load(Needy, {"retries": 1}, source="job.yaml")
    assert caught.value.field == "path"


def test_flags_win_over_the_file_and_flags_that_were_not_given_do_not() -> None:
    file = {"listen": "a:1", "state": "x", "lease": {"lease_s": 9.0, "tick_s": 0.2}}
    merged = config.merge(file, {"listen": "b:2", "state": None, "lease": {"lease_s": 7.0}, "barrier": {}})

    assert merged == {"listen": "b:2", "state": "x", "lease": {"lease_s": 7.0, "tick_s": 0.2}, "barrier": {}}
    assert file["listen"] == "a:1"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "coordinator.yaml"
    path.write_text(text)
    return path


def test_yaml_is_read_as_people_expect(tmp_path: Path) -> None:
    path = write(tmp_path, "http: off\nlisten: 127.0.0.1:0\nlease:\n  tick_s: 5e-2\nlimits:\n  # max_jobs: 1\n")

    loaded = config.load_yaml(CoordinatorConfig, path)

    assert (loaded.http, loaded.lease.tick_s, loaded.limits.max_jobs) == ("off", 0.05, 1_000)


def test_an_empty_file_means_all_defaults(tmp_path: Path) -> None:
    assert config.load_yaml(CoordinatorConfig, write(tmp_path, "# nothing yet\n")) == CoordinatorConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lease: {", "invalid YAML: line 1, column 9"),
        ("- a\n- b\n", "must contain settings as `name: value` lines, found list"),
        ("listen: a:1\nhttp: b:1\nlisten: c:1\n", "invalid YAML: line 3, column 1: duplicate key 'listen'"),
        ("state: !!python/object/apply:os.getcwd []\n", "invalid YAML: line 1, column 8"),
        ("lease: {lease_s: .nan}\n", "lease.lease_s must be a number, found nan"),
        ("leese: {}\n", "unknown setting leese; did you mean lease?"),
    ],
)
def test_an_error_about_an_invalid_file_names_the_place_and_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        config.load_yaml(CoordinatorConfig, path)
    assert f"{path}: {message}" in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file; check the path"):
        config.load_yaml(CoordinatorConfig, tmp_path / "absent.yaml")


def test_a_directory_in_place_of_a_file_and_binary_in_place_of_text_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with pytest.raises(ConfigError, match="cannot read it"):
            config.load_yaml(CoordinatorConfig, path)
