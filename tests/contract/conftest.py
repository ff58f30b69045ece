"""Failed assertions in the suites say as much as those in the tests."""

import pytest

pytest.register_assert_rewrite("coordinator_contract", "journal_contract")
