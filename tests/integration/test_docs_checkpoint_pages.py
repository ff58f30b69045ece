"""The pages on policies and object stores: their examples run on real servers, and their tables are complete.

`test_docs_snippets.py` runs the examples that need no server, as on every page.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from azure_blob import ACCOUNT, CONTAINER, KEY, AzureServer, azure
from documents import ROOT, blocks
from s3 import ADMIN, BUCKET, S3Server, s3

from strata.checkpoint import policy, retention
from strata.errors import ConfigError
from strata.storage import object_options
from strata.storage.object_options import Limits, read_settings

__all__ = ["azure", "s3"]  # fixtures

STORES = ROOT / "docs" / "object-stores.md"
POLICIES = ROOT / "docs" / "checkpoint-policies.md"
TIMEOUT_S = 50
CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")


def shown(page: Path, *, of: str) -> str:
    """Return the `no-run` blocks that name a location of this kind; they need a server."""
    found = [block.text for block in blocks(page) if block.info == "python no-run" and of in block.text]
    assert found
    return "\n".join(found)


def run(script: str, directory: Path, **environment: str) -> None:
    path = directory / "shown.py"
    path.write_text(script, encoding="utf-8")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(CLOUDS)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", path],
        env={**plain, "HOME": str(directory), **environment},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_what_is_shown_for_s3_runs_with_keys_from_the_environment_and_from_options(
    s3: S3Server, tmp_path: Path
) -> None:
    script = shown(STORES, of="s3://")
    for placeholder, real in {
        "my-bucket": BUCKET,
        "http://minio.internal:9000": s3.endpoint,
        "my-key": ADMIN["access_key_id"],
        "my-secret": ADMIN["secret_access_key"],
        # The server of the tests has no certificate.
        "keep_count=3)": "keep_count=3, storage_options={'allow_http': True})",
        '"eu-west-1"': '"eu-west-1", "allow_http": True',
    }.items():
        assert placeholder in script
        script = script.replace(placeholder, real)
    run(
        script,
        tmp_path,
        AWS_ENDPOINT_URL=s3.endpoint,
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID=ADMIN["access_key_id"],
        AWS_SECRET_ACCESS_KEY=ADMIN["secret_access_key"],
    )


def test_keys_of_a_profile_are_found_as_the_page_says(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    keys = f"aws_access_key_id={ADMIN['access_key_id']}\naws_secret_access_key={ADMIN['secret_access_key']}\n"
    (tmp_path / ".aws" / "credentials").write_text(f"[research]\n{keys}")
    (tmp_path / ".aws" / "config").write_text(f"[profile research]\nregion=us-east-1\nendpoint_url={s3.endpoint}\n")
    script = (
        "from strata import CheckpointManager\n"
        "options = {'profile': 'research', 'allow_http': True}\n"
        f"with CheckpointManager('s3://{BUCKET}/profile', storage_options=options) as ckpt:\n"
        "    ckpt.save(b'state', step=1).wait()\n"
        "    assert ckpt.load() == b'state'\n"
    )
    run(script, tmp_path, AWS_ACCESS_KEY_ID="of nobody", AWS_SECRET_ACCESS_KEY="it is wrong")


def test_what_is_shown_for_azure_runs(azure: AzureServer, tmp_path: Path) -> None:
    script = shown(STORES, of="az://")
    for placeholder, real in {
        "az://checkpoints": f"az://{CONTAINER}",
        "http://127.0.0.1:10000/devstoreaccount1": f"http://127.0.0.1:{azure.port}/{ACCOUNT}",
        "my-account-key": KEY,
    }.items():
        assert placeholder in script
        script = script.replace(placeholder, real)
    run(script, tmp_path)


def test_every_block_that_needs_a_server_is_run_here() -> None:
    for page in (STORES, POLICIES):
        for block in blocks(page):
            if block.info == "python no-run":
                assert "s3://" in block.text or "az://" in block.text, f"{page.name}:{block.line}"


# -- tables --------------------------------------------------------------------------------------------------------


def test_the_page_names_every_option_of_every_store() -> None:
    text = STORES.read_text(encoding="utf-8").partition("## All options")[2]
    paragraphs = dict(re.findall(r"For ([A-Za-z0-9 ]+):\s(.*?)\n(?:\n|$)", text + "\n", re.DOTALL))
    named = {kind: re.findall(r"`(\w+)`", options) for kind, options in paragraphs.items()}

    assert named == {
        "every store": list(object_options._CLIENT),
        "S3": ["profile", *object_options._CONFIG[object_options.S3]],
        "Google Cloud": list(object_options._CONFIG[object_options.GCS]),
        "Azure": list(object_options._CONFIG[object_options.AZURE]),
    }


def test_the_page_names_every_limit_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+|none) \|", STORES.read_text(encoding="utf-8"), re.MULTILINE)

    found = {name: None if default == "none" else float(default) for name, default in rows}
    assert found == dataclasses.asdict(Limits())


def test_the_page_names_every_kind_of_url() -> None:
    text = STORES.read_text(encoding="utf-8")
    for scheme in object_options.KINDS:
        assert f"{scheme}://" in text or (scheme == "abfs" and "abfss://" in text)
    account = read_settings("abfss://c@account.dfs.core.windows.net/p", {}, {}).config["account_name"]
    assert account == "account"


def test_the_page_and_the_error_show_the_same_command_for_other_profiles(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[profile research]\nsso_session=x\n")
    with pytest.raises(ConfigError) as refused:
        read_settings("s3://b", {"profile": "research"}, {"AWS_CONFIG_FILE": str(config), "HOME": str(tmp_path)})
    (command,) = re.findall(r"^\$ (eval .*)$", STORES.read_text(encoding="utf-8"), re.MULTILINE)

    assert refused.value.message.endswith(command)


def test_the_page_names_every_strategy_and_every_policy() -> None:
    text = POLICIES.read_text(encoding="utf-8")
    for module, method in ((policy, "decide"), (retention, "keep")):
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and dataclasses.is_dataclass(value) and hasattr(value, method)
        ]
        assert len(names) >= 3
        for name in names:
            assert name in text or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() in text, name
