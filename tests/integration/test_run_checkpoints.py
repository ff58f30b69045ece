"""The checkpoints of a run: their location, what is printed about them, and secrets that are never stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3 import ADMIN, S3Server, s3

from strata import cli
from strata.launch.record.log import cause

__all__ = ["s3"]  # a fixture

SCRIPT = """
import numpy as np
import strata

with strata.init() as ctx:
    for step in range(1, 6):
        ctx.report(step=step)
        ctx.maybe_checkpoint({"state": {"step": np.array(step)}})
"""


def strata_command(*arguments: str, variables: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata.cli", *arguments],
        env={**os.environ, **variables},
        cwd=cwd,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_on_a_bucket_saves_its_last_step_and_prints_the_location(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    url, secret = s3.new_url(), ADMIN["secret_access_key"]
    variables = {
        "STRATA_RUNS_DIR": str(tmp_path / "runs"),
        "AWS_ACCESS_KEY_ID": ADMIN["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    options = [f"--storage-option={pair}" for pair in (f"endpoint={s3.endpoint}", "allow_http=true", "region=here")]
    ran = strata_command(
        *("run", "--workers=2", "--name=on-s3", f"--checkpoints={url}", *options, "train.py"),
        variables=variables,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"checkpoints: {url} (last: step-000000000005-" in ran.stderr
    log = (tmp_path / "runs/on-s3/logs/attempt-000/rank-0.log").read_text()
    assert f"strata: checkpoints in {url}, as often as 0.01 overhead allows" in log
    assert "first after 60 s); the last 3 are kept" in log
    listed = strata_command("checkpoints", "ls", "on-s3", "--json", variables=variables, cwd=tmp_path)
    assert [one["step"] for one in json.loads(listed.stdout)["checkpoints"]] == [5], listed.stderr
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert s3.endpoint in (tmp_path / "runs/on-s3/run.json").read_text()
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    absent = strata_command("checkpoints", "ls", f"{url}-absent", *options, variables=variables, cwd=tmp_path)
    assert (absent.returncode, absent.stdout) == (1, "")
    assert f"no objects at {url}-absent" in absent.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoints=s3://b/x", "--storage-option=secret_access_key=of-mine"], "AWS_SECRET_ACCESS_KEY"),
        (["--checkpoints=s3://b/x", "--storage-option=session_token=of-mine"], "would expose a secret"),
        (["--checkpoints=az://b/x", "--storage-option=account_key=of-mine"], "would expose a secret"),
        (["--checkpoints=s3://b/x", "--storage-option=of-mine"], "must have the form KEY=VALUE"),
        (["--checkpoints=s3://b/x", "--storage-option=endpoint_url=of-mine"], "did you mean endpoint?"),
        (["--storage-option=region=of-mine"], "add --checkpoints s3://BUCKET/PREFIX"),
    ],
)
def test_a_storage_option_that_is_secret_or_wrong_is_refused_before_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments, str(tmp_path / "train.py")])
    output = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert message in output
    assert "of-mine" not in output
    assert not (tmp_path / "runs").exists()


def test_our_note_about_checkpoints_is_not_the_cause_of_a_failure() -> None:
    assert cause(["loading the data", "strata: checkpoints in ckpt, every 50 steps; the last 3 are kept"]) == (
        "loading the data"
    )
