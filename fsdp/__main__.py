"""`python -m fsdp`: its commands are in fsdp/commands."""

import sys

from fsdp.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
