"""Reads times from environment variables."""

import os

from fsdp.errors import ShardingError


def seconds(variable: str, otherwise: float) -> float:
    """Read a time from the environment.

    Raises:
        ShardingError: the variable is not a positive number of seconds.
    """
    text = os.environ.get(variable, "")
    try:
        found = float(text or otherwise)
    except ValueError:
        found = -1.0
    if found <= 0:
        raise ShardingError(f"{variable} must be a number of seconds, not {text!r}.")
    return found
