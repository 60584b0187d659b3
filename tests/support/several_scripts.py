"""Runs scripts one after the other in one process, or in those of a job: a start takes longer than a script.

python tests/support/several_scripts.py A.py B.py    rank 0 prints a line of MARK before each
"""

import os
import runpy
import sys
from pathlib import Path

MARK = "---- "

if __name__ == "__main__":
    for number, path in enumerate(map(Path, sys.argv[1:])):
        # the examples keep the addresses of each start apart by this number, and these are starts, one after the other
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        if os.environ.get("RANK", "0") == "0":
            print(f"{MARK}{path.stem}", flush=True)
        sys.argv = [str(path)]
        runpy.run_path(str(path), run_name="__main__")
