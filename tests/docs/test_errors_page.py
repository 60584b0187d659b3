"""docs/reference/errors.md has every class of errors, and shows how to read what stands under one."""

import inspect
from pathlib import Path

import fsdp
from fsdp import errors

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


def test_every_class_of_errors_has_a_row_that_says_what_it_is() -> None:
    classes = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, Exception)]
    for one in classes:
        bases = ", ".join(f"`{base.__name__}`" for base in one.__bases__)
        assert f"| `fsdp.{one.__name__}` | {bases} | " in PAGE
        assert getattr(fsdp, one.__name__) is one


def test_the_page_stays_short() -> None:
    assert len(PAGE.splitlines()) <= 150
