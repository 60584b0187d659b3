"""The wheel: its names, its metadata, and that it works beside a package of somebody else with the name `state_machine`."""

import ast
import subprocess
import sys
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import fsdp
from tests.support.processes import ROOT, environment

EVERYTHING = """
import pkgutil, sys
import fsdp, fsdp.state_machine

imported = [module.name for module in pkgutil.walk_packages(fsdp.__path__, "fsdp.") if not module.name.endswith("__main__")]
for name in imported:
    try:
        __import__(name)
    except ImportError as missing:
        # a framework is not installed
        assert name.startswith(("fsdp.integrations.", "fsdp.compat.frameworks.")), name
        assert "pip install" in str(missing) or missing.name.partition(".")[0] in ("accelerate", "lightning"), missing
assert "state_machine" not in sys.modules
assert fsdp.IllegalTransition is fsdp.state_machine.IllegalTransition

import torch

def train(rank):
    model = fsdp.fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    return any(parameter.grad is not None for parameter in model.parameters())

print(fsdp.__file__, fsdp.__version__, len(imported), fsdp.simulate(2, train))
"""


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_it_owns_one_top_level_name(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = archive.namelist()
        (listed,) = [archive.read(name).decode().split() for name in files if name.endswith("/top_level.txt")]
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {"fsdp"}
    assert listed == ["fsdp"]


def test_it_has_every_file_of_both_packages(installed: Path) -> None:
    for package, place in (("fsdp", "fsdp"), ("state_machine", "fsdp/state_machine")):
        here = {path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".typed")}
        assert here
        assert not [path for path in here if not (installed / place / path).exists()]


def test_no_import_in_it_asks_for_the_name_that_was_moved(installed: Path) -> None:
    asked = set()
    for path in installed.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                asked |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                asked.add((node.module or "").partition(".")[0])
    assert {"fsdp", "torch"} <= asked
    assert "state_machine" not in asked


def test_it_works_beside_another_package_of_the_name_state_machine(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "state_machine").mkdir()
    (tmp_path / "state_machine" / "__init__.py").write_text("raise ImportError('this is another state_machine')")
    ran = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{tmp_path}:{installed}"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    file, version, modules, trained = ran.stdout.split(maxsplit=3)
    assert Path(file).is_relative_to(installed)
    assert version == fsdp.__version__
    assert int(modules) > 100
    assert trained == "[True, True]\n"


def test_its_metadata_says_what_it_is(metadata: Message) -> None:
    assert metadata["Name"] == "fsdp"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "PyTorch" in metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    needed = [name for name in metadata.get_all("Requires-Dist", []) if "extra ==" not in name]
    assert needed == ["torch>=2.11", "numpy"]


def test_the_install_line_is_one_that_works_from_a_clone() -> None:
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "pip install ." in text, page
        assert "pip install fsdp" not in text and "pip install 'fsdp" not in text, f"{page}: no index has this package"
