"""One of the ranks of a function: python -m tests.support.a_rank MODULE FUNCTION RANK SIZE FOLDER"""

import sys
from importlib import import_module

from tests.support.processes import be_a_rank

if __name__ == "__main__":
    module, function = sys.argv.pop(1), sys.argv.pop(1)
    be_a_rank(getattr(import_module(module), function))
