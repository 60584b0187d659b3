"""Drop-in modules: each has the names of another library and runs on this engine. Nothing in fsdp imports this package.

Start with fairscale.py, the names of fairscale. What stands behind them is in fsdp/fairscale_api. installation.py puts the names
of a drop-in module into the library itself.
May use: every package below.
Must not: import the library whose names it has, except in install.
"""

from fsdp.compat.installation import Installed, install, installed, uninstall

__all__ = ["Installed", "install", "installed", "uninstall"]
