"""The documentation runs, and what it points to exists.

Rule 1: the ```python blocks of a page are one script: they run in order, in one namespace, in an empty working directory.
Rule 2: a ```text title="output" block directly after a python block is exactly what that block printed.
Rule 3: ```python title="before: ..." is code for another library. It is compiled and not run.
Rule 4: ```python title="name.py" is a file that several processes run. It is compiled here, and a test of its own runs it.
"""

import contextlib
import io
import linecache
import os
import re
import signal
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fsdp
from tests.support.jobs import run_job

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUNNABLE = [
    page
    for page in PAGES
    if page.relative_to(DOCS).parts[0] in ("index.md", "tutorial", "how-to", "migration", "explanation", "reference")
]
OUTPUT = 'text title="output"'
FENCE = re.compile(r"^(?P<indent>[ ]*)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
PLACES = ("fsdp", "state_machine", "tests", "examples", "benchmarks", "docs", "tools")


class Block(NamedTuple):
    """One fenced block of a page: its info string, its text, its first line in the page, and what stands before it."""

    info: str
    text: str
    line: int
    directly_after: str | None
    """The info string of the block that ends directly above, with nothing but empty lines between; None without one."""

    @property
    def title(self) -> str | None:
        """The title in the info string, if it has one."""
        found = re.search(r'title="([^"]*)"', self.info)
        return found and found.group(1)

    @property
    def is_python(self) -> bool:
        """Whether the block is python code."""
        return self.info.split(" ")[0] == "python"

    @property
    def runs(self) -> bool:
        """Whether the block runs with its page."""
        return self.is_python and not (self.title or "").startswith("before:") and not (self.title or "").endswith(".py")


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page in order, those inside tabs, lists and notes included."""
    before, end = None, 0
    for found in FENCE.finditer(text):
        if text[end : found.start()].strip():
            before = None
        yield Block(found["info"].strip(), textwrap.dedent(found["body"]), text.count("\n", 0, found.start("body")) + 1, before)
        before, end = found["info"].strip(), found.end()


def run_page(name: str, text: str) -> None:
    """Run the python blocks of a page as one script and compare what they print.

    Raises:
        AssertionError: a block printed something else than the page says, or the page breaks one of the rules above.
        BaseException: what a block raised, with the line in the page.
    """
    module = types.ModuleType("__main__")
    module.__file__ = name
    printed: str | None = None
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module  # classes of the page are looked up there, as in any script
    try:
        for block in blocks_of(text):
            where = f"{name}:{block.line}"
            if block.is_python:
                # as many empty lines as stand above the block: tracebacks name the line of the page
                source = "\n" * (block.line - 1) + block.text
                filename = f"<{where}>"
                code = compile(source, filename, "exec")
                printed = None
                if block.runs:
                    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(code, module.__dict__)
                    printed = out.getvalue()
            elif block.info.startswith("py"):
                raise AssertionError(f"{where}: ```{block.info}: write ```python, so that the block runs")
            elif block.title == "output":
                assert block.info == OUTPUT, f"{where}: write ```{OUTPUT}"
                assert printed is not None and block.directly_after is not None, f"{where}: no python block runs directly above"
                assert block.directly_after.startswith("python"), f"{where}: no python block stands directly above"
                if printed != block.text:
                    raise AssertionError(f"{where}: the page says\n{block.text}\nand the block printed\n{printed}")
    finally:
        sys.modules["__main__"] = before


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in, and random states, default dtype and environment as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page: Path, alone: None) -> None:
    run_page(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))


def page(*blocks: tuple[str, str]) -> str:
    """A page of fenced blocks, each (info string, text)."""
    return "\n".join(
        f"Some words.\n\n```{info}\n{text}\n```\n" if info != OUTPUT else f"```{info}\n{text}\n```\n" for info, text in blocks
    )


def test_blocks_of_a_page_share_a_namespace_and_a_page_that_is_right_passes() -> None:
    run_page("page", page(("python", "a = 1"), ("python", "print(a + 1)"), (OUTPUT, "2"), ("bash", "false")))


@pytest.mark.parametrize("info", ["python", 'python title="a part of it"'])
def test_a_block_that_raises_fails_the_page_and_names_its_line(info: str) -> None:
    text = page(("python", "a = 1"), (info, "b = 2\nraise KeyError(a)"))
    with pytest.raises(KeyError) as raised:
        run_page("page", text)
    line = raised.traceback[-1].lineno + 1
    assert text.splitlines()[line - 1] == "raise KeyError(a)"


def test_another_output_fails_the_page() -> None:
    with pytest.raises(AssertionError, match=r"page:14: the page says\n3\n\nand the block printed\n2\n"):
        run_page("page", page(("python", "print(1)"), ("python", "print(2)"), (OUTPUT, "3")))


def test_an_output_needs_a_block_that_ran_directly_above() -> None:
    with pytest.raises(AssertionError, match="no python block runs directly above"):
        run_page("page", page((OUTPUT, "3")))
    with pytest.raises(AssertionError, match="no python block runs directly above"):
        run_page("page", page(('python title="before: DDP"', "print(3)"), (OUTPUT, "3")))
    with pytest.raises(AssertionError, match="no python block"):
        run_page("page", page(("python", "print(3)"), ("bash", "true"), (OUTPUT, "3")))
    with pytest.raises(AssertionError, match="no python block"):
        run_page("page", page(("python", "print(3)")) + "It prints:\n\n" + page((OUTPUT, "3")))


def test_a_block_of_another_library_is_compiled_and_not_run() -> None:
    run_page(
        "page", page(('python title="before: DDP"', "import no_such_library"), ('python title="train.py"', "raise KeyError"))
    )
    with pytest.raises(SyntaxError):
        run_page("page", page(('python title="before: DDP"', "import")))


@pytest.mark.parametrize("info", ["py", "pycon", "python3"])
def test_a_block_that_would_not_run_for_its_spelling_is_refused(info: str) -> None:
    with pytest.raises(AssertionError, match="write ```python"):
        run_page("page", page((info, "a = 1")))


def test_blocks_inside_tabs_run_too() -> None:
    with pytest.raises(KeyError):
        run_page("page", '=== "tab"\n\n    ```python\n    a = 1\n    raise KeyError(a)\n    ```\n')


def test_classes_of_a_page_can_be_pickled() -> None:
    run_page(
        "page",
        page(("python", "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)"), (OUTPUT, "True")),
    )


def test_files_for_several_processes_have_a_test_of_their_own() -> None:
    titles = [block.title for page in RUNNABLE for block in blocks_of(page.read_text(encoding="utf-8")) if block.is_python]
    of_frameworks = {"accelerate_plugin.py", "lightning_trainer.py", "lightning_fabric.py", "ray_job.py"}
    expected = {"first_job.py", "before.py", "fairscale_before.py"} | of_frameworks
    assert {title for title in titles if title and title.endswith(".py")} == expected


@pytest.mark.gloo
def test_the_job_of_the_tutorial_is_killed_and_resumes(tmp_path: Path) -> None:
    page = DOCS / "tutorial" / "two-processes-to-a-checkpoint.md"
    blocks = list(blocks_of(page.read_text(encoding="utf-8")))
    (script,) = (block.text for block in blocks if block.title == "first_job.py")
    (first,) = (block.text for block in blocks if block.title == "first run")
    (second,) = (block.text for block in blocks if block.title == "second run")
    (tmp_path / "first_job.py").write_text(script, encoding="utf-8")

    run = partial(run_job, tmp_path / "first_job.py", size=2, cwd=tmp_path)
    killed = run("--kill-at", "25")
    assert killed.status == -signal.SIGKILL, killed.errors
    assert killed.output == first, killed.errors
    resumed = run()
    assert resumed.status == 0, resumed.errors
    assert resumed.output == second


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_and_path_of_a_page_leads_to_a_file(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", re.sub(r"`[^`\n]*`", "", text))
    targets = {link: (page.parent / link).resolve() for link in links if not re.match(r"[a-z]+:", link)}
    outside = [link for link, target in targets.items() if not target.is_relative_to(DOCS)]
    assert not outside, f"{page.relative_to(ROOT)} links to files that the site lacks; write them as `path`: {outside}"
    missing = [link for link, target in targets.items() if not target.exists()]
    paths = re.findall(rf"`((?:{'|'.join(PLACES)})/[\w./-]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{page.relative_to(ROOT)} points to what does not exist: {missing}"


def test_every_public_name_is_in_the_reference_once() -> None:
    reference = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: fsdp\.(\w+)$", reference, re.MULTILINE)) == sorted(fsdp.__all__)


def test_the_navigation_lists_every_page_and_no_other() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w/-]+\.md$", navigation, re.MULTILINE)) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_lines_outside_tables_can_be_read() -> None:
    """A table's row is one line, and code of a page may quote what a program prints."""
    long = []
    for page in (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"):
        text = FENCE.sub(lambda block: "\n" * block.group().count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), start=1):
            if len(line) > 200 and not line.lstrip().startswith("|"):
                long.append(f"{page.relative_to(ROOT)}:{number}")
    assert not long
