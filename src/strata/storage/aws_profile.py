"""Keys from `~/.aws/credentials` and `~/.aws/config`, which obstore does not read.

Only keys that stand in these files: a profile that names a role, single sign-on or a program is refused with the
command that turns it into keys, since each of those is a protocol of its own.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import TYPE_CHECKING

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OURS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_PROTOCOLS = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")


def read_profile(name: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """What the profile says, under obstore's names. Without a name: AWS_PROFILE's, or `default`, which may be missing.

    Raises:
        ConfigError: A profile that was named is not there, holds no keys, or a file cannot be read.
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
            # Not what the parser says: it quotes the line, which may hold a key.
            raise ConfigError(f"{path} cannot be read; check its form and its rights", field="profile") from None
        for section in sections:
            if parser.has_section(section):
                found |= dict(parser.items(section))
    if wanted and "aws_access_key_id" not in found:
        raise ConfigError(_without_keys(wanted, found, [str(path) for path in files]), field="profile")
    return {ours: found[theirs] for theirs, ours in _OURS.items() if theirs in found}


def _without_keys(profile: str, found: Mapping[str, str], files: list[str]) -> str:
    protocols = [name for name in _PROTOCOLS if name in found]
    if not protocols:
        return f"profile {profile!r} has no aws_access_key_id in {' and '.join(files)}"
    return (
        f"profile {profile!r} gets its keys by {protocols[0]}, which is not supported here; turn it into keys with: "
        f'eval "$(aws configure export-credentials --profile {profile} --format env)"; unset AWS_PROFILE'
    )
