"""What the engine says by itself: the logger "fsdp", silent until a program configures logging, and a line on stderr."""

import logging
import os
import sys
from typing import Final

LOG: Final = logging.getLogger("fsdp")
LOG.addHandler(logging.NullHandler())


def write_to_stderr(text: str) -> None:
    """Write lines in one call, so that those of several ranks do not mix, to the stderr of the process."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"{text}\n".encode())
