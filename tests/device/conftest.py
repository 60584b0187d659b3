from pathlib import Path

import pytest

from tests.support.accelerator import build


@pytest.fixture(scope="package")
def compiled() -> Path:
    """The compiled accelerator, which takes half a minute the first time."""
    if (why := build.missing()) is not None:
        pytest.skip(why)
    return build.compiled_file()
