"""What README promises is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_usage_example_runs_as_printed(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(r"\[[\d.e-]+, [\d.e-]+\]\n", ran.stdout), ran.stdout


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_both_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("train", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_the_error_in_the_readme_is_the_one_that_is_raised() -> None:
    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fsdp.summon_full_params(self):
                return super().forward(x)

    def one_rank(rank: int) -> None:
        fsdp.fully_shard(model := Net(2, 2))
        model(torch.zeros(1, 2))

    with pytest.raises(fsdp.IllegalTransition) as raised:
        fsdp.simulate(1, one_rank)
    quoted = re.search(r"    unit 'Net'.*?\n.*?\n", README)
    assert quoted is not None
    for sentence in re.split(r", \.\.\.\)\.|\n", quoted.group()):
        assert sentence.strip() in str(raised.value), sentence
