"""torch.compile. The last of the groups: a compilation that fails half-way leaves torch unusable behind it."""

import torch

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, sgd, train


def _compiles(what: str) -> None:
    @pattern(
        f"torch.compile of {what}", "the compiler traces through hooks, or guards on what changes with every gather", slow=True
    )
    def _(run: Run) -> Yields:
        torch._dynamo.reset()
        model = run.shard(Net(), {Block})
        compiled = model
        if run.sharded:
            if what == "modules inside units":
                for block in model.blocks:
                    block.linear.compile(backend="aot_eager")
            elif what == "units":
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            elif what == "the whole model":
                compiled = torch.compile(model, backend="aot_eager")
        step_of = torch.compile(train, backend="aot_eager") if run.sharded and what == "a step" else train
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            step_of(compiled, run.data(step, 2, WIDTH))
            yield
            optimizer.step()


for _what in ("modules inside units", "units", "the whole model", "a step"):
    _compiles(_what)
