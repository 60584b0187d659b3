"""The models of the tests live beside the tests of fsdp."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "fsdp"))
