"""How much of the training patterns and of the explorer is run: a part, or all with `FSDP_TESTS=all` in the environment."""

import os
from typing import Final

_ASKED: Final = os.environ.get("FSDP_TESTS", "default")
if _ASKED not in ("default", "all"):
    raise ValueError(f"FSDP_TESTS is 'default' or 'all', not {_ASKED!r}")

EVERYTHING: Final = _ASKED == "all"
"""True if every pattern runs in every simulated world, and over gloo with two and three processes, and every tree is explored."""
