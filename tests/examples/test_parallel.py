"""The example of several dimensions trains as one process, in the products that fit four processes."""

from pathlib import Path

import pytest

from tests.support.everything import EVERYTHING
from tests.support.jobs import run_alone, run_job

SCRIPT = Path(__file__).parents[2] / "examples" / "parallel.py"
PRODUCTS = ["--tp 2", "--pp 2 --ep 2", "--ep 2 --tp 2", "--ep 2 --cp 2", "--tp 2 --pp 2"]
MORE = ["--tp 4", "--pp 4", "--ep 4", "--cp 4", "--pp 2", "--cp 2 --tp 2", "--cp 2 --pp 2"]
"""`make test-all` runs them."""


@pytest.mark.gloo
@pytest.mark.parametrize("product", [*PRODUCTS, *(MORE if EVERYTHING else [])])
def test_a_product_of_dimensions_trains_as_one_process(product: str, tmp_path: Path) -> None:
    ended = run_job(SCRIPT, *product.split(), "--compare", "--steps", 4, size=4, cwd=tmp_path)
    assert ended.status == 0, ended.output + ended.errors
    assert "on 4 processes (cpu, gloo), dp " in ended.output
    assert "one process has the same losses" in ended.output


@pytest.mark.gloo
def test_a_product_that_does_not_fit_the_processes_is_refused(tmp_path: Path) -> None:
    ended = run_alone(SCRIPT, "--tp", "3", cwd=tmp_path)
    assert ended.status == 2
    assert "dp * tp * pp * cp must be 1, the number of processes" in ended.errors
