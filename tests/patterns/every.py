"""The whole table."""

from importlib import import_module
from typing import Final

from tests.patterns.harness import PATTERNS

GROUPS: Final = (
    "order",
    "backwards",
    "use",
    "outputs",
    "calls",
    "accumulation",
    "parameters",
    "weights",
    "kinds",
    "checkpointing",
    "recomputes",
    "surroundings",
    "compiling",
)

for _group in GROUPS:
    import_module(f"tests.patterns.{_group}")

__all__ = ["PATTERNS"]
