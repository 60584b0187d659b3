"""The models of the tests live beside the tests of fsdp, and programs of several processes beside those of gloo."""

import sys
from pathlib import Path

for folder in ("fsdp", "equivalence"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / folder))
