"""Builds a wheel that owns one top-level name: `state_machine` is installed as `fsdp.state_machine`.

Other projects have a package `state_machine` too. In a clone, and in an editable install of one, the folder keeps its own name.
All other settings are in pyproject.toml.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

INNER = "state_machine"
IMPORT = re.compile(rf"^(\s*(?:from|import) ){INNER}\b", re.MULTILINE)


class BuildPy(build_py):
    """Copies the packages. For a wheel, moves `state_machine` into `fsdp` and renames it in import statements."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        shutil.rmtree(built / "fsdp" / INNER, ignore_errors=True)  # an earlier build left it
        (built / INNER).rename(built / "fsdp" / INNER)
        for path in (built / "fsdp").rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(IMPORT.sub(rf"\1fsdp.{INNER}", text), encoding="utf-8")


class OneName(Distribution):
    """The list of top-level names in the metadata has `fsdp` alone."""

    def iter_distribution_names(self) -> Iterator[str]:
        return (name for name in super().iter_distribution_names() if name.partition(".")[0] != INNER)


setup(cmdclass={"build_py": BuildPy}, distclass=OneName)
