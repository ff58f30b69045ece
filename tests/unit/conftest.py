"""Fixtures of the tests of tables."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["numpy", "numba"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations of the loops over rows."""
    from strata.servers.table import native

    if request.param == "numba" and native.find is None:
        pytest.skip("numba is not installed")
    if request.param == "numpy":
        for name in native.KERNELS:
            monkeypatch.setattr(native, name, None)
