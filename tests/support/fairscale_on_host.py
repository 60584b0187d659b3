"""Runs a script of fairscale on a machine without CUDA: `python tests/support/fairscale_on_host.py SCRIPT`.

fairscale's own FullyShardedDataParallel runs unmodified. It wants streams of CUDA, which order nothing on the host, and reduces
matrices, of which gloo takes vectors alone.
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import fully_sharded_data_parallel as peer
from torch import Tensor

NAMES = ("fp32_to_fp16", "all_gather", "post_backward")
"""What fairscale calls its streams."""


class Stream:
    """A stream on which work is done when it is launched."""

    def wait_stream(self, other: "Stream") -> None:
        """Do nothing: the work of the other stream is done."""


_stack = [Stream()]


@contextmanager
def stream(one: Stream) -> Iterator[None]:
    """Make a stream the current one."""
    _stack.append(one)
    try:
        yield
    finally:
        _stack.pop()


def stand_in() -> None:
    """Put what fairscale needs in the place of CUDA's."""
    setup, reduce_scatter = peer.FullyShardedDataParallel._setup_streams, dist._reduce_scatter_base

    def setup_streams(self: Any) -> None:
        setup(self)
        for name in NAMES:
            self._streams.setdefault(name, Stream())

    def reduce_scatter_vectors(output: Tensor, given: Tensor, **options: Any) -> Any:
        return reduce_scatter(output.view(-1), given.view(-1), **options)

    peer.FullyShardedDataParallel._setup_streams = setup_streams
    dist._reduce_scatter_base = reduce_scatter_vectors
    torch.cuda.stream = stream
    torch.cuda.current_stream = lambda *unused: _stack[-1]
    torch.cuda.synchronize = lambda *unused: None
    Tensor.record_stream = lambda self, one: None
    Tensor.cuda = lambda self, *unused, **also: self


if __name__ == "__main__":
    stand_in()
    runpy.run_path(sys.argv[1], run_name="__main__")
