"""Hypothesis profiles, and the order of files."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# an assertion that fails in a helper shows its values, as in a test
pytest.register_assert_rewrite("tests.support")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1_000_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

FIRST = (
    "state_machine_tests/test_explore.py",
    "runtime/test_property_training.py",
    "patterns/test_simulated.py",
    "patterns/test_gloo.py",
    "equivalence/test_gloo.py",
    "device/test_races.py",
    "examples/test_train.py",
    "comm/test_simulated.py",
)
"""The files that take longest, see docs/development/testing.md."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that neither of two processes is left alone with one of them at the end."""
    first = [Path(__file__).parent / name for name in FIRST]
    assert all(path.exists() for path in first), first
    items.sort(key=lambda item: item.path not in first)
