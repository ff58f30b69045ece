"""Check the URL and the `storage_options` of an object store, and translate them for obstore.

Every wait gets a bound. S3 keys may also come from `~/.aws`, which obstore does not read. Only plain keys are taken
from there: a profile that names a role, single sign-on or a program is rejected with the command that turns it into
keys, because each of those is a separate protocol.
"""

from __future__ import annotations

import configparser
import dataclasses
import difflib
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from strata.errors import ConfigError
from strata.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

S3, GCS, AZURE = "S3", "Google Cloud Storage", "Azure"
KINDS = {"s3": S3, "s3a": S3, "gs": GCS, "az": AZURE, "azure": AZURE, "abfs": AZURE, "abfss": AZURE}

_CONFIG = {
    S3: (
        *("access_key_id", "secret_access_key", "session_token", "region", "endpoint", "skip_signature"),
        *("virtual_hosted_style_request", "unsigned_payload", "checksum_algorithm", "conditional_put"),
        *("server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled", "sse_customer_key_base64"),
        *("role_arn", "role_session_name", "web_identity_token_file", "sts_endpoint", "metadata_endpoint"),
        *("container_credentials_relative_uri", "container_credentials_full_uri", "container_authorization_token_file"),
        *("imdsv1_fallback", "request_payer", "s3_express", "disable_tagging", "disable_bulk_delete"),
    ),
    GCS: (
        *("service_account", "service_account_key", "application_credentials", "bearer_token"),
        *("base_url", "skip_signature"),
    ),
    AZURE: (
        *("account_name", "account_key", "sas_key", "token", "endpoint", "skip_signature", "use_emulator"),
        *("client_id", "client_secret", "tenant_id", "authority_host", "federated_token_file", "credential_type"),
        *("msi_endpoint", "msi_resource_id", "object_id", "use_azure_cli", "use_fabric_endpoint", "encryption_key"),
        "disable_tagging",
    ),
}
_CLIENT = (
    *("allow_http", "allow_invalid_certificates", "root_certificate", "user_agent", "default_headers"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes", "http1_only", "http2_only", "pool_idle_timeout"),
    *("pool_max_idle_per_host", "randomize_addresses"),
)
_ALIASES = {
    "key": "access_key_id",
    "aws_access_key_id": "access_key_id",
    "secret": "secret_access_key",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "anon": "skip_signature",
    "aws_region": "region",
    "region_name": "region",
    "endpoint_url": "endpoint",
    "endpoint_override": "endpoint",
    "timeout": "timeout_s",
    "connect_timeout": "connect_timeout_s",
    "retries": "max_retries",
    "max_concurrency": "concurrency",
}
"""Name in other libraries → name here."""
_SECRET = ("secret", "token", "key", "sas", "password")
_NO_SECRETS = (
    *("access_key_id", "sse_kms_key_id", "sse_bucket_key_enabled", "web_identity_token_file"),
    *("container_authorization_token_file", "federated_token_file"),
)
"""Names of keys and of files, which are not secret themselves."""
_NO_LIMIT = 1_000_000
"""Retries of one request; `retry_timeout_s` ends them long before."""
_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts, retries and concurrency of one store."""

    timeout_s: float = 60.0
    """For one request, including its body and the response."""
    connect_timeout_s: float = 5.0
    max_retries: int | None = None
    """Retries of one request; None: as many as begin within `retry_timeout_s`."""
    retry_timeout_s: float = 120.0
    """No retry begins later than this after the first attempt. Long enough for a server to restart."""
    concurrency: int = 8
    """Pieces of one transfer in flight at a time."""
    piece_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "retry_timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise _invalid(name, getattr(self, name), "use a number of seconds above 0, up to 3600")
        if self.max_retries is not None and not 0 <= self.max_retries <= 100:
            raise _invalid("max_retries", self.max_retries, "use 0 to 100, or leave it out")
        if not 1 <= self.concurrency <= 64:
            raise _invalid("concurrency", self.concurrency, "use 1 to 64")
        if not 5 << 20 <= self.piece_bytes <= 1 << 30:
            raise _invalid("piece_bytes", self.piece_bytes, "use 5 MiB (the minimum of S3) to 1 GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked configuration of one store. Its `repr` shows no secret."""

    kind: str
    bucket: str
    prefix: str | None
    limits: Limits
    credentials: str
    """Where the credentials come from, for messages."""
    config: dict[str, Any] = dataclasses.field(repr=False)
    client_options: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def retry_config(self) -> dict[str, Any]:
        max_retries = self.limits.max_retries
        return {
            "max_retries": _NO_LIMIT if max_retries is None else max_retries,
            "retry_timeout": timedelta(seconds=self.limits.retry_timeout_s),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
        }

    def secrets(self) -> list[str]:
        """Return the values that must never be printed."""
        named = {**os.environ, **{name: value for name, value in self.config.items() if isinstance(value, str)}}
        clouds = ("AWS_", "AZURE_", "GOOGLE_")
        return [
            value
            for name, value in named.items()
            if (name in self.config or name.startswith(clouds))
            and any(word in name.lower() for word in _SECRET)
            and name.lower().removeprefix("aws_") != "access_key_id"
            and len(value) >= 4
        ]


def is_secret(name: str) -> bool:
    """Return whether the option of this name is a secret that must not be stored."""
    return any(word in name.lower() for word in (*_SECRET, "headers")) and name not in _NO_SECRETS


def read_settings(url: str, storage_options: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Check a URL and its options.

    Raises:
        ConfigError: An option is unknown or invalid; the message lists the known ones.
    """
    kind, bucket, prefix, account = _parse(url)
    limits = {field.name for field in dataclasses.fields(Limits)}
    own = {"profile"} if kind == S3 else set()
    for name in storage_options:
        if name not in {*_CONFIG[kind], *_CLIENT, *limits, *own}:
            raise _unknown(name, kind, [*_CONFIG[kind], *_CLIENT, *sorted(limits), *own])
    given = {name: value for name, value in storage_options.items() if value is not None}
    config = {name: given[name] for name in _CONFIG[kind] if name in given}
    if account is not None:
        config.setdefault("account_name", account)
    credentials = "storage_options"
    if kind == S3:
        config, credentials = _with_aws(config, given.get("profile"), environment)
    elif not any(any(word in name for word in _SECRET) for name in config):
        credentials = "the environment or the identity of this machine"
    chosen = Limits(**{name: _number(name, given[name]) for name in limits if name in given})
    client = {name: given[name] for name in _CLIENT if name in given}
    if "allow_http" in client:
        client["allow_http"] = _switch("allow_http", client["allow_http"])
    elif environment.get("AWS_ALLOW_HTTP"):  # obstore reads it only if no client options are passed
        client["allow_http"] = _switch("AWS_ALLOW_HTTP", environment["AWS_ALLOW_HTTP"])
    _check_encrypted(config, client, kind, environment)
    client |= {
        "timeout": timedelta(seconds=chosen.timeout_s),
        "connect_timeout": timedelta(seconds=chosen.connect_timeout_s),
    }
    return Settings(
        kind=kind,
        bucket=bucket,
        prefix=prefix,
        limits=chosen,
        credentials=credentials,
        config=config,
        client_options=client,
    )


def _parse(url: str) -> tuple[str, str, str | None, str | None]:
    """Return kind, bucket, prefix, and for Azure the account if the URL names it."""
    parts = urlsplit(url)
    kind = KINDS[parts.scheme]
    bucket, at, host = parts.netloc.rpartition("@")
    if parts.query or parts.fragment or (at and (kind != AZURE or ":" in bucket)):
        # Do not print the URL: these parts are often secrets.
        raise ConfigError(
            f"a {parts.scheme}:// URL consists of a bucket and a path; pass keys and parameters as storage_options",
            field="storage_path",
        )
    bucket, account = (bucket, host.partition(".")[0]) if at else (host, None)
    prefix = unquote(parts.path).strip("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket; write it as {parts.scheme}://BUCKET/PATH", field="storage_path")
    return kind, bucket, check_key(prefix) if prefix else None, account


def _with_aws(
    config: dict[str, Any], profile: str | None, environment: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """Add the keys of the profile unless other credentials have precedence; return also where the keys come from."""
    if "access_key_id" in config or config.get("skip_signature"):
        return config, "storage_options"
    if profile is None:
        if environment.get("AWS_ACCESS_KEY_ID"):
            return config, "AWS_ACCESS_KEY_ID"
        if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") or "web_identity_token_file" in config:
            return config, "the web identity token"
    found = read_profile(profile, environment)
    if "AWS_REGION" in environment or "AWS_DEFAULT_REGION" in environment:
        found.pop("region", None)
    if "AWS_ENDPOINT_URL" in environment or "AWS_ENDPOINT_URL_S3" in environment or "AWS_ENDPOINT" in environment:
        found.pop("endpoint", None)
    source = "the profile in ~/.aws" if "access_key_id" in found else "the identity of this machine"
    return {**found, **config}, source


def _check_encrypted(
    config: Mapping[str, Any], client: Mapping[str, Any], kind: str, environment: Mapping[str, str]
) -> None:
    names = {S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), GCS: ("GOOGLE_BASE_URL",)}
    variables = names.get(kind, ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"))
    endpoint = config.get("endpoint") or config.get("base_url")
    endpoint = endpoint or next((environment[name] for name in variables if environment.get(name)), "")
    if str(endpoint).startswith("http://") and not client.get("allow_http"):
        raise ConfigError(
            f"the endpoint {str(endpoint).partition('?')[0]} is not encrypted; use https://, or pass "
            "storage_options={'allow_http': True} (or set AWS_ALLOW_HTTP=true) if anyone on the network may read and "
            "change your data",
            field="storage_options",
        )


def _number(name: str, value: Any) -> Any:
    """Return a number that may be text from the command line."""
    whole = name in ("max_retries", "concurrency", "piece_bytes")
    try:
        return int(value) if whole else float(value)
    except (TypeError, ValueError, OverflowError):
        raise _invalid(name, value, "use an integer" if whole else "use a number of seconds") from None


def _switch(name: str, value: object) -> bool:
    found = value if isinstance(value, bool) else _SWITCHES.get(str(value).lower())
    if found is None:
        raise _invalid(name, value, "use true or false")
    return found


def _unknown(name: str, kind: str, known: list[str]) -> ConfigError:
    near = [_ALIASES[name]] if _ALIASES.get(name) in known else difflib.get_close_matches(name, known, 1)
    cure = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
    return ConfigError(f"{name!r} is not a storage option for {kind}; {cure}", field="storage_options")


def _invalid(name: str, value: object, cure: str) -> ConfigError:
    return ConfigError(f"storage_options: {name}={value!r} is invalid; {cure}", field="storage_options")


# -- AWS profiles --------------------------------------------------------------------------------------------------


_PROFILE_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_PROTOCOLS = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")


def read_profile(name: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of an AWS profile under obstore's names.

    Without a name, AWS_PROFILE or `default` is read; `default` may be missing.

    Raises:
        ConfigError: The named profile does not exist or holds no keys, or a file cannot be read.
    """
    wanted = name or environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    profile = wanted or "default"
    home = Path(environment.get("HOME") or "~").expanduser() / ".aws"
    files = {
        Path(environment.get("AWS_CONFIG_FILE") or home / "config").expanduser(): (f"profile {profile}", profile),
        Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials").expanduser(): (profile,),
    }
    found: dict[str, str] = {}
    for path, sections in files.items():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, OSError, UnicodeDecodeError):
            # Without the parser's message: it quotes the line, which may hold a key.
            raise ConfigError(f"{path} cannot be read; check its syntax and permissions", field="profile") from None
        for section in sections:
            if parser.has_section(section):
                found |= dict(parser.items(section))
    if wanted and "aws_access_key_id" not in found:
        raise ConfigError(_without_keys(wanted, found, [str(path) for path in files]), field="profile")
    return {ours: found[theirs] for theirs, ours in _PROFILE_KEYS.items() if theirs in found}


def _without_keys(profile: str, found: Mapping[str, str], files: list[str]) -> str:
    protocols = [name for name in _PROTOCOLS if name in found]
    if not protocols:
        return f"profile {profile!r} has no aws_access_key_id in {' and '.join(files)}"
    return (
        f"profile {profile!r} gets its keys through {protocols[0]}, which is not supported; export keys with: "
        f'eval "$(aws configure export-credentials --profile {profile} --format env)"; unset AWS_PROFILE'
    )
