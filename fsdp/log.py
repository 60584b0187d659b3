"""The logger of the package, "fsdp": what the engine has decided. Silent until a program configures logging."""

import logging
from typing import Final

LOG: Final = logging.getLogger("fsdp")
LOG.addHandler(logging.NullHandler())
