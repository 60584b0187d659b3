"""Measures the links of two processes over gloo, and plans with them."""

from pathlib import Path
from typing import Any

import fsdp
from tests.commands.rehearsal.models import MODELS
from tests.support.processes import be_a_rank


def main(rank: int, size: int, folder: Path) -> Any:
    found = fsdp.measure_links()
    case = MODELS["GPT"]
    plan = fsdp.plan(case.build, 4, inputs=case.inputs, checkpointing=[False], strategies=["FULL_SHARD"], **found)
    return found, str(plan)


if __name__ == "__main__":
    be_a_rank(main)
