"""What README says is what happens, and what it counts is what the other pages have."""

import json
import re
from pathlib import Path

import pytest
import torch

import fsdp
from tests.support.jobs import run_alone
from tools.tables.picture import picture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")


def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    ran = run_alone(script, cwd=tmp_path)
    assert ran.status == 0, ran.errors
    (printed,) = re.findall(r"# prints (.+)", example)
    assert ran.output == f"{printed}\n"


def test_the_selftest_is_on_the_first_screen() -> None:
    assert any("python -m fsdp selftest" in line for line in README.splitlines()[:20])


def test_it_is_short_and_its_first_screen_says_that_no_gpu_has_run_it() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert any("not run on a GPU" in line for line in lines[:20])


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_linked_file_exists(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_map_of_contributing_names_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fsdp|state_machine|tests|tools|benchmarks|docs)/[\w./-]*)`", text)
    assert len(paths) > 50
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_both_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("train", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_the_picture_is_that_of_the_table() -> None:
    remedy = "run: python -m tools.tables.picture > docs/figures/lifecycle.svg"
    assert "docs/figures/lifecycle.svg" in README
    assert (DOCS / "figures" / "lifecycle.svg").read_text(encoding="utf-8") == picture(), remedy


def test_the_strategies_are_those_that_there_are() -> None:
    from fsdp.config import STRATEGIES

    table = README.partition("| `sharding_strategy` |")[2].partition("\n\n")[0]
    assert re.findall(r'^\| `"(\w+)"`', table, re.MULTILINE) == list(STRATEGIES)


def failed_steps(heading: str) -> list[list[str]]:
    """The rows of one table of the page of failures: what fails, in which part, then one cell each of fsdp, FSDP2, FSDP1, DDP."""
    (page,) = DOCS.rglob("failures.md")
    table = page.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n###")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("what fails", "---")]


@pytest.mark.parametrize(
    ("heading", "sign", "row"),
    [("Both ranks fail alike", "**", "the same step again"), ("Rank 1 fails alone", "time-out", "one rank fails alone")],
)
def test_failures_are_counted_as_the_page_has_them(heading: str, sign: str, row: str) -> None:
    said = next(line for line in README.splitlines() if line.startswith("| ") and row in line)
    for engine, column in (("fsdp", 2), ("FSDP2", 3), ("FSDP1", 4)):
        cells = [one[column] for one in failed_steps(heading) if one[column] not in ("–", "no such place")]
        assert cells, engine
        count = sum(sign in cell for cell in cells)
        assert re.search(rf"\b{count} of {len(cells)}\b", said.split("|")[column]), (engine, count, len(cells))
        if engine == "fsdp":
            assert f": {count} of {len(cells)}" in README.partition("## ")[0]


@pytest.mark.parametrize(
    ("measure", "said"), [("step: ours / FSDP2", "of FSDP2's time"), ("step: ours / the faster FSDP1", "of FSDP1's")]
)
def test_the_speed_is_that_of_the_results(measure: str, said: str) -> None:
    step = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text(encoding="utf-8"))
    found = [bar["value"] for bar in step["bars"] if bar["measure"] == measure]
    (line,) = [line for line in README.splitlines() if line.startswith("- **Speed**")]
    assert f"{min(found):.2f} to {max(found):.2f} {said}" in line
    assert f", {len(found)} cases: " in line


def test_no_line_of_readme_has_a_footnote_or_a_measure_that_is_missed() -> None:
    assert not re.search("[¹²³]", README)
    assert "missed" not in README


def test_the_quoted_refusal_is_the_one_that_is_raised() -> None:
    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fsdp.summon_full_params(self):
                return super().forward(x)

    def one_rank(rank: int) -> None:
        fsdp.fully_shard(model := Net(2, 2))
        model(torch.zeros(1, 2))

    with pytest.raises(fsdp.IllegalTransition) as raised:
        fsdp.simulate(1, one_rank)
    quoted = re.search(r"    unit 'Net'.*?\n.*?\n", ARCHITECTURE)
    assert quoted is not None
    for sentence in re.split(r", \.\.\.\)\.|\n", quoted.group()):
        assert sentence.strip() in str(raised.value), sentence
