"""Hypothesis profiles, and the order of files."""

import os

import pytest
from hypothesis import HealthCheck, settings

# an assertion that fails in a helper shows its values, as in a test
pytest.register_assert_rewrite("tests.support")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1_000_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LONG = ("test_explore.py", "test_property_training.py", "test_simulated.py", "test_gloo.py", "test_races.py", "test_train.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that neither of two processes is left alone with one of them."""
    items.sort(key=lambda item: item.path.name not in LONG)
