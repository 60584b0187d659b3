"""Which torch the migration pages describe: names and arguments of its classes are compared on that torch alone."""

from typing import Final

import pytest
import torch

DESCRIBED: Final = ("2.13", "2.14", "2.15")
"""Versions whose public names and arguments of DDP, FSDP1 and FSDP2 are those of the pages."""

describes_this_torch: Final = pytest.mark.skipif(
    ".".join(torch.__version__.split(".")[:2]) not in DESCRIBED,
    reason=f"the pages describe torch {', '.join(DESCRIBED)}; this one may have other names and arguments",
)
