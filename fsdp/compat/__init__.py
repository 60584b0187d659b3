"""The names of other libraries, on this engine. The engine imports nothing from here.

Start with doors.py, which lists what users import: torch_fsdp.py, fully_shard.py, apex.py, and the packages ddp and fairscale.
What stands behind the names is in fsdp1, fsdp2, ddp and fairscale; what training frameworks need is in frameworks; what several
engines need is in shared. installation.py puts the names of a drop-in module into the library itself.
May use: every package below.
Must not: import the library whose names it has, except in install.
"""

from fsdp.compat.installation import Installed, install, installed, uninstall

__all__ = ["Installed", "install", "installed", "uninstall"]
