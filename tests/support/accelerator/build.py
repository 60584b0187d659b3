"""Compiles the pretend accelerator with g++ against the headers of the installed torch, once, into a folder that git ignores."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch

HERE: Final = Path(__file__).parent
BUILDS: Final = HERE.parents[2] / "build" / "accelerator"
"""Compiled libraries, one for each torch and each state of the sources."""
LIMIT: Final = 600
"""Seconds for the compiler, which takes some 20."""


def missing() -> str | None:
    """Why the accelerator cannot be compiled here; None if it can."""
    if shutil.which("g++") is None:
        return "the pretend accelerator is compiled with g++, which is not installed"
    if not (_torch() / "include" / "ATen").is_dir():
        return "the pretend accelerator needs torch's headers, which this torch does not have"
    return None


@cache
def compiled_file() -> Path:
    """The compiled library. Compiles it if this state of the sources has not been compiled for this torch."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    state = hashlib.sha256(torch.__version__.encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = BUILDS / f"libaccelerator-{state}.so"
    if not target.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        _compile(target)
    return target


def _compile(target: Path) -> None:
    # several processes may compile at the same time: each into a file of its own, which then takes the name in one move
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        include, lib = _torch() / "include", _torch() / "lib"
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        subprocess.run(
            [
                *("g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
                *(f"-I{include}", str(HERE / "accelerator.cpp"), "-o", str(made)),
                *(f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"),
            ],
            check=True,
            timeout=LIMIT,
        )
        os.replace(made, target)


def _torch() -> Path:
    return Path(torch.__file__).parent
