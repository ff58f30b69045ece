"""Translate `storage_options` to the arguments of pyarrow's file systems, with every option checked and wait bounded.

The names are those of checkpoints (`strata.storage`), so that one dict serves both; pyarrow's own names work as well.
Options for writing are accepted and have no effect. Options that pyarrow does not support are rejected.

The client libraries look up credentials that are not passed, and renew them. Credentials that are passed are never
renewed, nor are those of a profile: pyarrow does not accept a profile name, so the profile's keys are read here, once.
A profile without keys (a role, single sign-on) is rejected.
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from strata.data.source.source import TIMEOUT_S
from strata.errors import ConfigError
from strata.storage.object_options import AZURE, GCS, S3, read_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 4
GCS_RETRY_S = 4.0
"""Google's client takes up to twice as long, and has no other limit."""
_NEVER = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
"""The expiry of a token that is passed; the server decides when it really expires."""

_EVERYWHERE = ("allow_http", "timeout_s", "connect_timeout_s", "max_retries", "retry_timeout_s")
_TAKEN: dict[str, dict[str, str]] = {
    S3: {
        "access_key_id": "access_key",
        "secret_access_key": "secret_key",
        "session_token": "session_token",
        "region": "region",
        "endpoint": "endpoint_override",
        "skip_signature": "anonymous",
        "virtual_hosted_style_request": "force_virtual_addressing",
        "role_arn": "role_arn",
        "role_session_name": "session_name",
        "external_id": "external_id",
        "load_frequency": "load_frequency",
        "proxy_url": "proxy_options",
        "root_certificate": "tls_ca_file_path",
        "timeout_s": "request_timeout",
        "connect_timeout_s": "connect_timeout",
        "scheme": "scheme",
        "profile": "profile",
    },
    GCS: {
        "bearer_token": "access_token",
        "base_url": "endpoint_override",
        "skip_signature": "anonymous",
        "target_service_account": "target_service_account",
        "credential_token_expiration": "credential_token_expiration",
        "retry_timeout_s": "retry_time_limit",
        "project_id": "project_id",
        "scheme": "scheme",
    },
    AZURE: {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_key": "sas_token",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "tenant_id": "tenant_id",
        "endpoint": "endpoint",
        "use_emulator": "use_emulator",
        "blob_storage_authority": "blob_storage_authority",
        "blob_storage_scheme": "blob_storage_scheme",
        "dfs_storage_authority": "dfs_storage_authority",
        "dfs_storage_scheme": "dfs_storage_scheme",
    },
}
"""Strata's names → pyarrow's names, which are accepted too."""
_FOR_WRITING = frozenset(
    (
        *("concurrency", "piece_bytes", "unsigned_payload", "checksum_algorithm", "conditional_put", "disable_tagging"),
        *("server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled", "disable_bulk_delete"),
        *("user_agent", "http1_only", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host"),
        *("randomize_addresses", "background_writes", "default_metadata", "allow_bucket_creation"),
        *("allow_bucket_deletion", "check_directory_existence_before_creation", "default_bucket_location"),
    )
)
"""Options for writing, or for the connections of the client that writes checkpoints."""
_BY_ENVIRONMENT = {
    "web_identity_token_file": "AWS_WEB_IDENTITY_TOKEN_FILE",
    "metadata_endpoint": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "container_credentials_relative_uri": "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "container_credentials_full_uri": "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "container_authorization_token_file": "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "service_account": "GOOGLE_APPLICATION_CREDENTIALS",
    "application_credentials": "GOOGLE_APPLICATION_CREDENTIALS",
    "authority_host": "AZURE_AUTHORITY_HOST",
    "federated_token_file": "AZURE_FEDERATED_TOKEN_FILE",
}
"""Settings that pyarrow reads only from the environment."""
_REFUSED = frozenset(
    (
        *("allow_invalid_certificates", "root_certificate", "default_headers", "proxy_url", "proxy_ca_certificate"),
        *("proxy_excludes", "sse_customer_key_base64", "sts_endpoint", "imdsv1_fallback", "request_payer"),
        *(
            "s3_express",
            "service_account_key",
            "token",
            "skip_signature",
            "anonymous",
            "credential_type",
            "msi_endpoint",
        ),
        *("msi_resource_id", "object_id", "use_azure_cli", "use_fabric_endpoint", "encryption_key"),
    )
)
"""Options that pyarrow does not support for at least one store."""
_ELSEWHERE = {
    "key": "access_key_id",
    "aws_access_key_id": "access_key_id",
    "secret": "secret_access_key",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "anon": "skip_signature",
    "aws_region": "region",
    "region_name": "region",
    "endpoint_url": "endpoint",
    "token": "bearer_token",
    "timeout": "timeout_s",
    "retries": "max_retries",
}
"""Names in other libraries → Strata's names."""
_SWITCHES = ("anonymous", "force_virtual_addressing", "use_emulator")
_EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "endpoint": "http://127.0.0.1:10000",
}
"""The public account and key of Azurite, from Microsoft's documentation."""


def s3_arguments(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `pyarrow.fs.S3FileSystem`, with `max_attempts` instead of a retry strategy.

    Raises:
        ConfigError: An option is unknown or has an invalid value.
    """
    given = _renamed(options, S3)
    if (profile := given.pop("profile", None)) is not None:
        given = {_TAKEN[S3][name]: value for name, value in read_profile(profile, environment).items()} | given
    endpoint = given.pop("endpoint_override", None) or _first(
        environment, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
    )
    if endpoint:
        allowed = _switch("allow_http", options.get("allow_http") or environment.get("AWS_ALLOW_HTTP") or False)
        given["scheme"], given["endpoint_override"] = _endpoint(endpoint, given.get("scheme"), allowed)
    if "tls_ca_file_path" in given:
        given["tls_ca_file_path"] = _certificate_file(str(given["tls_ca_file_path"]))
    given["connect_timeout"] = _seconds("connect_timeout_s", given.get("connect_timeout", CONNECT_TIMEOUT_S))
    given["request_timeout"] = _seconds("timeout_s", given.get("request_timeout", TIMEOUT_S))
    given["max_attempts"] = _attempts(options)
    return given


def gcs_arguments(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `pyarrow.fs.GcsFileSystem`.

    Raises:
        ConfigError: An option is unknown or has an invalid value.
    """
    given = _renamed(options, GCS)
    if endpoint := given.pop("endpoint_override", None) or _first(environment, "GOOGLE_BASE_URL"):
        allowed = _switch("allow_http", options.get("allow_http") or False)
        given["scheme"], given["endpoint_override"] = _endpoint(endpoint, given.get("scheme"), allowed)
    if "access_token" in given:
        given.setdefault("credential_token_expiration", _NEVER)
    limit = given.get("retry_time_limit", GCS_RETRY_S)
    limit = limit.total_seconds() if isinstance(limit, dt.timedelta) else limit
    given["retry_time_limit"] = dt.timedelta(seconds=_seconds("retry_timeout_s", limit))
    return given


def azure_arguments(options: Mapping[str, Any], environment: Mapping[str, str], host: str = "") -> dict[str, Any]:
    """Return the arguments of `pyarrow.fs.AzureFileSystem`.

    `host` is the part of a URL after the @, such as ACCOUNT.dfs.core.windows.net.

    Raises:
        ConfigError: An option is unknown or has an invalid value, or the account is missing.
    """
    given = _renamed(options, AZURE)
    allowed = _switch("allow_http", options.get("allow_http") or False)
    if given.pop("use_emulator", False):
        given, allowed = {**_EMULATOR, **given}, True
    account, _, domain = host.partition(".")
    account = given.setdefault(
        "account_name", account or _first(environment, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    )
    if not account:
        raise ConfigError(
            "the Azure account is missing; pass storage_options={'account_name': …}, set AZURE_STORAGE_ACCOUNT_NAME, "
            "or write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
            field="storage_options",
        )
    if not {"account_key", "sas_token", "client_id", "client_secret"} & given.keys():
        key = _first(environment, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
        given |= {"account_key": key} if key else {}
    endpoint = given.pop("endpoint", None) or _first(environment, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if not endpoint and domain and not domain.endswith("core.windows.net"):
        endpoint = f"https://{host}"
    if endpoint:
        scheme, authority = _endpoint(endpoint, None, allowed)
        authority = authority.removeprefix(account) if authority.startswith(f"{account}.") else authority
        for kind in ("blob", "dfs"):
            given.setdefault(f"{kind}_storage_scheme", scheme)
            own = authority.replace(".dfs.", f".{kind}.", 1).replace(".blob.", f".{kind}.", 1)
            given.setdefault(f"{kind}_storage_authority", own)
    return given


def metadata_timeout_s(options: Mapping[str, Any]) -> float:
    """Return the deadline for metadata of one file, retries included."""
    return _seconds("timeout_s", options.get("timeout_s", options.get("request_timeout", TIMEOUT_S)))


def _renamed(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the options under pyarrow's names, without those for writing and those common to all stores."""
    taken = _TAKEN[kind]
    theirs = set(taken.values())
    found: dict[str, tuple[str, Any]] = {}
    for name, value in options.items():
        _check_known(name, kind, value)
        known = taken.get(name) or (name if name in theirs else None)
        if known is None or value is None:
            continue
        if known in found:
            raise ConfigError(
                f"storage_options: {found[known][0]} and {name} are the same option; pass one of them",
                field="storage_options",
            )
        found[known] = name, _switch(name, value) if known in _SWITCHES else value
    return {known: value for known, (_, value) in found.items()}


def _check_known(name: str, kind: str, value: object) -> None:
    taken = {*_TAKEN[kind], *_TAKEN[kind].values(), *_EVERYWHERE}
    if name in taken or name in _FOR_WRITING:
        return
    if name in _BY_ENVIRONMENT:
        cure = f"set {_BY_ENVIRONMENT[name]} in the environment, where pyarrow reads it"
    elif name in _REFUSED and _ELSEWHERE.get(name) not in taken:
        if value is None or value is False:
            return
        cure = "pass an fsspec or pyarrow file system that supports it as filesystem="
    else:
        known = [*_TAKEN[kind], *_EVERYWHERE, *sorted({*_TAKEN[kind].values()} - _TAKEN[kind].keys())]
        near = [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in known else difflib.get_close_matches(name, known, 1)
        cure = f"did you mean {near[0]}?" if near else f"known options are: {', '.join(known)}"
        raise ConfigError(f"storage_options for {kind} have no option {name!r}; {cure}", field="storage_options")
    raise ConfigError(
        f"storage_options: pyarrow, which reads data from {kind}, does not support {name}; {cure}",
        field="storage_options",
    )


def _endpoint(endpoint: object, scheme: object, allow_http: bool) -> tuple[str, str]:
    """Return the scheme and HOST:PORT of an endpoint.

    Raises:
        ConfigError: The endpoint is malformed, or unencrypted without `allow_http`.
    """
    found, separator, rest = str(endpoint).partition("://")
    chosen, address = (found, rest) if separator else (str(scheme or "https"), str(endpoint))
    address = address.partition("?")[0].partition("/")[0]
    if chosen == "http" and not allow_http:
        raise ConfigError(
            f"the endpoint http://{address} is not encrypted; use https://, or pass "
            "storage_options={'allow_http': True} if others on the network may read and change your data",
            field="storage_options",
        )
    if chosen not in ("http", "https") or not address or "@" in address:
        raise ConfigError(
            "the endpoint is malformed; write it as https://HOST:PORT, without keys", field="storage_options"
        )
    return chosen, address


def _certificate_file(certificate: str) -> str:
    """Return the path of a certificate file. Text is written to a file named by its hash, shared by all processes."""
    if "-----BEGIN" not in certificate:
        return certificate
    directory = Path(platformdirs.user_cache_dir("strata")) / "certificates"
    path = directory / f"{hashlib.sha256(certificate.encode()).hexdigest()}.pem"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            file.write(certificate)
        Path(file.name).replace(path)
    return str(path)


def _attempts(options: Mapping[str, Any]) -> int:
    value = options.get("max_retries")
    if value is None:
        return MAX_ATTEMPTS
    try:
        retries = int(value)
    except (TypeError, ValueError):
        retries = -1
    if not 0 <= retries <= 100:
        raise ConfigError(f"storage_options: max_retries={value!r} is invalid; pass 0 to 100", field="storage_options")
    return retries + 1


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise ConfigError(
            f"storage_options: {name}={value!r} is invalid; pass seconds, above 0 and up to 3600",
            field="storage_options",
        )
    return seconds


def _switch(name: str, value: object) -> bool:
    """Return a boolean from a bool, or from text on the command line or in the environment."""
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in ("true", "false", "1", "0"):
        raise ConfigError(f"storage_options: {name}={value!r} is invalid; pass True or False", field="storage_options")
    return text in ("true", "1")


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
