"""Opens a report and a plan in a headless Chromium and uses them: `make test-browser`.

    python -m tools.report_in_browser [--screenshot FILE]

It checks that each page draws its plots without an error in the console and without the network, that hovering shows numbers,
that the buttons zoom by keyboard, and that nothing is wider than a phone. Needs the extra `browser`, Chromium and its driver.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import fsdp
from fsdp.commands.main import main as command

FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WIDTHS: Final = {"desk": 1280, "phone": 390}


def make_report(folder: Path) -> Path:
    """The report of two simulated ranks."""

    def one_rank(rank: int) -> str:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(6)]
        model = fsdp.fully_shard(torch.nn.Sequential(*blocks), auto_wrap_policy={torch.nn.Sequential}, prefetch=0)
        x = torch.randn(512, 256)
        with fsdp.trace(model) as trace:
            for _ in range(3):
                model(x).sum().backward()
                model.zero_grad()
        return str(trace.save(folder / "trace-{rank}.json"))

    path = folder / "report.html"
    if command(["trace", "report", *fsdp.simulate(2, one_rank), "--html", str(path)]):
        raise SystemExit("the report was not written")
    return path


def make_plan(folder: Path) -> Path:
    """The plan of a decoder, with a limit that some choices exceed."""
    path = folder / "plan.html"
    given = ["decoder-125m", "--world-size", "16", "--length", "1024", "--memory", "2GiB"]
    if command(["plan", *given, "--html", str(path)]):
        raise SystemExit("the plan was not written")
    return path


class Kind(NamedTuple):
    """A page that fsdp writes."""

    make: Callable[[Path], Path]
    plots: tuple[str, ...]
    hovered: str
    """The plot over which the pointer goes. Its numbers are milliseconds."""
    zoomed: str
    """The plot that is zoomed."""


KINDS: Final = {
    "report": Kind(make_report, ("parts", "exposed", "timeline", "memory"), "parts", "timeline"),
    "plan": Kind(make_plan, ("memory", "time"), "time", "memory"),
}


def check(driver: Any, kind: Kind, page: Path, width: int) -> None:
    """Use the page at one width."""
    driver.set_window_size(width, 900)
    driver.get(page.as_uri())
    for plot in kind.plots:
        until(lambda plot=plot: driver.find_elements(By.CSS_SELECTOR, f"#{plot} .main-svg"), f"plot {plot} is not drawn")
        assert driver.find_elements(By.CSS_SELECTOR, f"#{plot} .trace"), f"plot {plot} is empty"
    wide = driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"at a width of {width} the page is {wide} pixels too wide"
    check_hover(driver, kind.hovered)
    check_zoom(driver, kind.zoomed)
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert not [name for name in loaded if name.startswith("http")], loaded
    errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors, errors


def check_hover(driver: Any, plot: str) -> None:
    """Hovering over a bar shows its numbers."""
    bars = driver.find_elements(By.CSS_SELECTOR, f"#{plot} .trace .point path")
    bar = max(bars, key=lambda one: one.rect["width"])
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)

    def hovered() -> Any:
        webdriver.ActionChains(driver).move_to_element_with_offset(bar, 1, 1).move_to_element(bar).perform()
        return driver.find_elements(By.CSS_SELECTOR, f"#{plot} .hovertext")

    texts = until(hovered, "hovering shows nothing")
    assert " ms" in texts[0].text, texts[0].text


def check_zoom(driver: Any, plot: str) -> None:
    """The button zooms in and out again, by keyboard."""

    def shown() -> float:
        first, last = driver.execute_script(f"return document.getElementById('{plot}')._fullLayout.xaxis.range")
        return float(last - first)

    before = shown()
    for how, factor in (("in", 0.5), ("out", 1.0)):
        button = driver.find_element(By.CSS_SELECTOR, f"button[data-plot={plot}][data-zoom={how}]")
        button.send_keys(Keys.ENTER)
        until(lambda factor=factor: abs(shown() / before - factor) < 1e-6, f"the button {how} does not zoom")


def until(condition: Callable[[], Any], complaint: str) -> Any:
    """Wait until something is there."""
    end = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < end, complaint
        time.sleep(0.05)
    return found


def take_screenshot(driver: Any, page: Path, where: Path) -> None:
    """A picture of the whole page at the width of a desk."""
    driver.set_window_size(WIDTHS["desk"], 900)
    driver.get(page.as_uri())
    until(lambda: driver.find_elements(By.CSS_SELECTOR, "#memory .main-svg"), "the page is not drawn")
    height = driver.execute_script("return document.documentElement.scrollHeight")
    driver.set_window_size(WIDTHS["desk"], height + 150)  # with the frame of the window
    time.sleep(1)  # plots are drawn anew for the new size
    driver.save_screenshot(str(where))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="the page to open (default: each)")
    parser.add_argument("--screenshot", type=Path, help="where a picture of the last page goes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            for title in given.kind or KINDS:
                page = KINDS[title].make(Path(folder))
                for name, width in WIDTHS.items():
                    check(driver, KINDS[title], page, width)
                    print(f"{title}, {name}, {width} pixels: fine")
                print(json.dumps({"plots": KINDS[title].plots, "bytes": page.stat().st_size}))
            if given.screenshot is not None:
                take_screenshot(driver, page, given.screenshot)
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
