"""`storage_options`, the environment and ~/.aws are combined, and mistakes are rejected before anything is sent."""

from __future__ import annotations

import socket
import traceback
from pathlib import Path
from typing import Any

import pytest

from strata.errors import ConfigError, InvalidArgument, StorageUnavailable
from strata.storage import open_store
from strata.storage.object_options import AZURE, GCS, S3, Settings, read_settings

KEYS = {"access_key_id": "AKIA", "secret_access_key": "a-secret-of-mine"}
CREDENTIALS = """
[default]
aws_access_key_id = DEFAULT
aws_secret_access_key = default-secret
[lab]
aws_access_key_id = LAB
aws_secret_access_key = lab-secret
aws_session_token = lab-token
"""
CONFIG = """
[default]
region = eu-north-1
[profile lab]
region = eu-west-1
endpoint_url = https://s3.lab.example
[profile sso]
sso_session = company
"""


def settings_of(url: str, environment: dict[str, str] | None = None, **options: Any) -> Settings:
    return read_settings(url, options, environment or {"HOME": "/nowhere"})


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("url", "kind", "bucket", "prefix", "account"),
    [
        ("s3://bucket", S3, "bucket", None, None),
        ("s3://bucket/", S3, "bucket", None, None),
        ("s3a://bucket/a/b/", S3, "bucket", "a/b", None),
        ("s3://bucket/a%20b", S3, "bucket", "a b", None),
        ("gs://bucket/a", GCS, "bucket", "a", None),
        ("az://container/a", AZURE, "container", "a", None),
        ("abfs://container/a", AZURE, "container", "a", None),
        ("abfss://container@account.dfs.core.windows.net/a", AZURE, "container", "a", "account"),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(
    url: str, kind: str, bucket: str, prefix: str | None, account: str | None
) -> None:
    found = settings_of(url)
    assert (found.kind, found.bucket, found.prefix) == (kind, bucket, prefix)
    assert found.config.get("account_name") == account
    options = {S3: {"region": "us-east-1", **KEYS}, GCS: {"bearer_token": "t"}, AZURE: {"account_name": "a"}}
    store = open_store(url, options[kind])
    assert store.url == url.rstrip("/")
    store.close()


@pytest.mark.parametrize(
    "url", ["s3://key:pass-word@bucket/x", "s3://bucket/x?secret=pass-word", "az://c:pass-word@h/x"]
)
def test_a_url_with_credentials_is_rejected_and_not_printed(url: str) -> None:
    with pytest.raises(ConfigError, match="as storage_options") as caught:
        open_store(url)
    assert "pass-word" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["s3://", "s3:///a", "gs://"])
def test_a_url_without_a_bucket_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store(url)


def test_a_prefix_cannot_lead_out_of_itself() -> None:
    with pytest.raises(InvalidArgument, match="is not a valid key"):
        open_store("s3://bucket/a/../b")


@pytest.mark.parametrize(
    ("url", "name", "cure"),
    [
        ("s3://b", "acess_key_id", "did you mean access_key_id?"),
        ("s3://b", "endpoint_url", "did you mean endpoint?"),
        ("s3://b", "key", "did you mean access_key_id?"),
        ("s3://b", "timeout", "did you mean timeout_s?"),
        ("s3://b", "wholly_unknown", "known options: access_key_id, secret_access_key, "),
        ("gs://b", "profile", "known options: service_account, "),
        ("az://b", "account", "did you mean account_"),
    ],
)
def test_an_unknown_option_is_rejected_with_a_suggestion(url: str, name: str, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, {name: "a-secret-of-mine"})
    assert f"{name!r} is not a storage option" in str(caught.value)
    assert cure in str(caught.value)
    assert "a-secret-of-mine" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("timeout_s", 0), ("timeout_s", 1e9), ("max_retries", -1), ("max_retries", 1_000), ("concurrency", 0)),
        *(("piece_bytes", 1 << 20), ("retry_timeout_s", -1.0), ("connect_timeout_s", 0)),
    ],
)
def test_every_wait_is_bounded(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* is invalid; use "):
        settings_of("s3://bucket", **{name: value})


def test_numbers_and_switches_may_be_text_from_the_command_line() -> None:
    found = settings_of("s3://b", retry_timeout_s="7.5", max_retries="3", concurrency="2", allow_http="false")
    assert (found.limits.retry_timeout_s, found.limits.max_retries, found.limits.concurrency) == (7.5, 3, 2)
    assert found.client_options["allow_http"] is False
    for name, value in (("retry_timeout_s", "soon"), ("max_retries", "2.5"), ("allow_http", "perhaps")):
        with pytest.raises(ConfigError, match=rf"{name}='{value}' is invalid; use "):
            settings_of("s3://b", **{name: value})
    with pytest.raises(ConfigError, match="not encrypted"):
        settings_of("s3://b", endpoint="http://10.0.0.1:9000", allow_http="false")


def test_an_unencrypted_endpoint_must_be_allowed_explicitly() -> None:
    for url, name in (("s3://b", "endpoint"), ("az://b", "endpoint"), ("gs://b", "base_url")):
        with pytest.raises(ConfigError, match=r"not encrypted; use https://, or pass .*allow_http"):
            settings_of(url, **{name: "http://10.0.0.1:9000"})
        settings_of(url, **{name: "http://10.0.0.1:9000"}, allow_http=True)
        settings_of(url, **{name: "https://10.0.0.1:9000"})
    variables = {"HOME": "/nowhere", "AWS_ENDPOINT_URL": "http://10.0.0.1:9000"}
    with pytest.raises(ConfigError, match="not encrypted"):
        settings_of("s3://b", variables)
    settings_of("s3://b", {**variables, "AWS_ALLOW_HTTP": "true"})
    with pytest.raises(ConfigError, match="AWS_ALLOW_HTTP=true"):
        settings_of("s3://b", {**variables, "AWS_ALLOW_HTTP": "false"})


def test_keys_come_from_the_options_then_the_environment_then_the_profile(home: dict[str, str]) -> None:
    variables = {**home, "AWS_ACCESS_KEY_ID": "ENVIRONMENT"}
    given = settings_of("s3://b", variables, **KEYS)
    assert (given.config["access_key_id"], given.credentials) == ("AKIA", "storage_options")
    found = settings_of("s3://b", variables)
    assert (found.config.get("access_key_id"), found.credentials) == (None, "AWS_ACCESS_KEY_ID")  # obstore reads them
    found = settings_of("s3://b", home)
    assert found.config["access_key_id"] == "DEFAULT"
    assert found.config["region"] == "eu-north-1"
    assert found.credentials == "the profile in ~/.aws"
    found = settings_of("s3://b", {"HOME": "/nowhere"})
    assert (found.config, found.credentials) == ({}, "the identity of this machine")
    found = settings_of("s3://b", {**home, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"})
    assert (found.config, found.credentials) == ({}, "the web identity token")
    assert settings_of("s3://b", home, skip_signature=True).config == {"skip_signature": True}


def test_a_profile_can_be_named_by_option_and_by_variable(home: dict[str, str]) -> None:
    lab = {
        "access_key_id": "LAB",
        "secret_access_key": "lab-secret",
        "session_token": "lab-token",
        "region": "eu-west-1",
        "endpoint": "https://s3.lab.example",
    }
    assert settings_of("s3://b", home, profile="lab").config == lab
    assert settings_of("s3://b", {**home, "AWS_PROFILE": "lab"}).config == lab
    assert settings_of("s3://b", home, profile="lab", region="here").config == {**lab, "region": "here"}
    with_region = settings_of("s3://b", {**home, "AWS_REGION": "there"}, profile="lab").config
    assert with_region == {name: value for name, value in lab.items() if name != "region"}


def test_the_profile_files_can_be_elsewhere(home: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("[default]\naws_access_key_id = OTHER\naws_secret_access_key = other\n")
    found = settings_of("s3://b", {**home, "AWS_SHARED_CREDENTIALS_FILE": str(other)})
    assert found.config["access_key_id"] == "OTHER"


def test_an_unsupported_profile_is_rejected_with_the_cure(home: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'nobody' has no aws_access_key_id in .*config and .*credentials"):
        settings_of("s3://b", home, profile="nobody")
    with pytest.raises(ConfigError, match=r"sso_session.*aws configure export-credentials --profile sso"):
        settings_of("s3://b", home, profile="sso")


def test_a_broken_profile_file_is_named_and_not_quoted(home: dict[str, str]) -> None:
    path = Path(home["HOME"], ".aws", "credentials")
    path.write_text("[default\naws_secret_access_key = quoted-by-the-parser")
    with pytest.raises(ConfigError, match="credentials cannot be read") as caught:
        settings_of("s3://b", home)
    assert "quoted-by-the-parser" not in "".join(traceback.format_exception(caught.value))


def test_the_repr_of_settings_holds_no_secret() -> None:
    found = settings_of("s3://b", **KEYS, session_token="another-secret")
    assert "a-secret-of-mine" not in repr(found)
    assert {"a-secret-of-mine", "another-secret"} <= set(found.secrets())
    assert "AKIA" not in found.secrets()


def test_a_signature_in_an_address_is_not_printed() -> None:
    """Azure puts its signature into the URL of every request."""
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        endpoint = "http://{}:{}/account".format(*closed.getsockname())
        options = {"account_name": "account", "sas_key": "sv=2021-12-02&sig=a-secret-of-mine", "max_retries": 0}
        store = open_store("az://container/a", {**options, "endpoint": endpoint, "allow_http": True})
        with pytest.raises(StorageUnavailable, match=r"az://container/a/b: .*check the endpoint") as caught:
            store.put("b", b"1")
        store.close()
    assert "a-secret-of-mine" not in "".join(traceback.format_exception(caught.value))


def test_an_option_that_obstore_rejects_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="rejects these storage_options") as caught:
        open_store("s3://b", {**KEYS, "unsigned_payload": "perhaps"})
    assert "a-secret-of-mine" not in "".join(traceback.format_exception(caught.value))
