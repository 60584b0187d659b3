"""The reference pages name everything there is, with the defaults it has, and nothing else."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

import fsdp

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in `text`, without heads."""
    lines = re.findall(r"^\| (.+) \|$", re.sub(r"^\| .+\n\| ---.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def section(text: str, title: str) -> str:
    """The part of a page below a heading, up to the next one."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def test_every_argument_is_on_the_page_with_its_default_and_no_other() -> None:
    before_the_policies = page("options.md").partition("\n## `fsdp.MixedPrecisionPolicy`")[0]
    said = {
        cells[0].strip("`"): cells[1].strip("`") for cells in rows(before_the_policies) if re.fullmatch(r"`[a-z_]+`", cells[0])
    }
    parameters = inspect.signature(fsdp.fully_shard).parameters.values()
    there = {one.name: one.default for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    assert said.keys() == there.keys()
    assert said.pop("module") == "required"
    assert {name: ast.literal_eval(default) for name, default in said.items()} == {name: there[name] for name in said}


@pytest.mark.parametrize("policy", [fsdp.MixedPrecisionPolicy, fsdp.ReductionPolicy])
def test_every_field_of_a_policy_is_on_the_page_with_its_default_and_no_other(policy: type) -> None:
    said = {
        cells[0].strip("`"): ast.literal_eval(cells[1].strip("`"))
        for cells in rows(section(page("options.md"), f"`fsdp.{policy.__name__}`"))
    }
    assert said == {one.name: one.default for one in dataclasses.fields(policy)}


def test_every_strategy_is_on_the_page() -> None:
    with pytest.raises(fsdp.ShardingError, match="choose one of") as refused:
        fsdp.simulate(1, lambda rank: fsdp.fully_shard(torch.nn.Linear(1, 1), sharding_strategy="NONE"))
    names = re.findall(r"[A-Z_]{5,}", str(refused.value).partition("choose one of")[2])
    assert len(names) == 6
    said = [cells[0] for cells in rows(page("options.md")) if re.match(r'`"[A-Z_]+"`', cells[0])]
    assert sorted(re.findall(r"[A-Z]+_[A-Z_]+", " ".join(said))) == sorted(names)


def test_every_environment_variable_is_on_the_page_and_no_other() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fsdp").rglob("*.py"))
    said = [cells[0].strip("`") for cells in rows(page("environment.md"))]
    assert len(said) == len(set(said))
    assert set(said) == set(re.findall(r"FSDP_[A-Z_]+", sources))


def test_the_format_of_a_checkpoint_is_what_is_written(tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        torch.manual_seed(0)
        model = fsdp.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)))
        model.register_buffer("rank", torch.tensor(rank))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        fsdp.save(tmp_path / "one", model, optimizer, extra={"step": 1}, accumulated=True)

    fsdp.simulate(2, one_rank)
    import json

    from torch.distributed.checkpoint import FileSystemReader

    text = page("checkpoint-format.md")
    written = json.loads((tmp_path / "one" / "manifest.json").read_text(encoding="utf-8"))
    assert {cells[0].strip("`") for cells in rows(section(text, "The manifest"))} == written.keys()
    files = {re.sub(r"__\d+_\d+", "__R_N", path.name) for path in (tmp_path / "one").iterdir()}
    assert {cells[0].strip("`") for cells in rows(section(text, "The folder"))} == files
    keys = FileSystemReader(tmp_path / "one").read_metadata().state_dict_metadata
    forms = [cells[0].strip("`") for cells in rows(section(text, "Keys"))]
    patterns = [re.sub(r"NAME|KEY|OPTION", ".+", re.sub(r"\b[IR]\b", r"\\d+", form.replace(".", r"\."))) for form in forms]
    assert all(any(re.fullmatch(pattern, key) for pattern in patterns) for key in keys)
    for form, pattern in zip(forms, patterns, strict=True):
        assert any(re.fullmatch(pattern, key) for key in keys) or "_extra_state" in form or "@" in form, form


def test_each_word_is_explained_once() -> None:
    words = [
        cells[0].lower()
        for title in ("Words of this project", "Words of the field")
        for cells in rows(section(page("glossary.md"), title))
    ]
    assert len(words) == len(set(words)) > 50


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [*REFERENCE.glob("*.md"), *(ROOT / "docs" / "development").rglob("*.md")]
    broken = []
    for path in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if "://" in target or "explanation" in there.parts:
                continue
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{path.name}: {target}")
    assert not broken


def anchors(path: Path) -> list[str]:
    """The anchors of the headings of a page, as MkDocs makes them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads]
