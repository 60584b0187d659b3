"""The benchmarks are scripts in a folder of their own; the models of the tests live beside the tests of fsdp."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "fsdp")]
