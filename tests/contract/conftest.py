"""Rewrites the assertions of the contract suites, so that they report as much as those in the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from postgres import postgres

__all__ = ["postgres"]

pytest.register_assert_rewrite("coordinator_contract", "journal_contract", "leadership_contract", "store_contract")
pytest.register_assert_rewrite("data_format_contract", "data_source_contract", "workers_contract")
pytest.register_assert_rewrite("metric_contract", "strategy_contract", "engine_contract", "callback_contract")
