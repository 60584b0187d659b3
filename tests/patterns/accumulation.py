"""Gradients of several backwards in one step."""

from contextlib import nullcontext

import torch
from torch import nn

from tests.patterns.harness import AVERAGE_ONLY, Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, sgd, steps, train
from tests.patterns.use import Skips


@pattern(
    "micro-batches under no_sync",
    "nothing is reduced until the last one",
    gathers=2 * 3 * 5,
    reductions=2 * 3,
    cost="2 steps of 3 micro-batches of 5; 3 units reduced once a step",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            with run.no_sync(model) if micro < 2 else nullcontext():
                train(model, run.data(10 * step + micro, 2, WIDTH))
        yield
        optimizer.step()


@pattern("micro-batches without no_sync", "the second reduction adds to the first", gathers=3 * 5, reductions=3 * 3)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for micro in range(3):
        train(model, run.data(micro, 2, WIDTH))
        yield


@pattern(
    "windows of no_sync between backwards that synchronise",
    "gradients are in two places, and both are added once",
    gathers=6 * 5,
    reductions=3 * 3,
    cost="6 micro-batches, 3 of which synchronise",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for micro, kept in enumerate((False, True, True, False, True, False)):
        with run.no_sync(model) if kept else nullcontext():
            train(model, run.data(micro, 2, WIDTH))
        if not kept:
            yield


@pattern(
    "several forwards inside a window, their backwards outside",
    "it is the backward that synchronises or not",
    gathers=3 * 3 + 2 + 3 + 3,
    reductions=2 * 3,
    cost="3 forwards; the first backward finds the root's own; two synchronise",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    with run.no_sync(model):
        losses = [loss_of(model(run.data(micro, 2, WIDTH))) for micro in range(3)]
        losses.pop().backward()
    losses.pop().backward()
    yield
    losses.pop().backward()
    yield


@pattern(
    "several forwards outside a window, their backwards inside",
    "as above, the other way round",
    gathers=3 * 3 + 2 + 3 + 3,
    reductions=3,
    cost="as above; one synchronises",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    losses = [loss_of(model(run.data(micro, 2, WIDTH))) for micro in range(3)]
    with run.no_sync(model):
        losses.pop().backward()
        losses.pop().backward()
    losses.pop().backward()
    yield


@pattern(
    "a unit that is absent from the last micro-batch",
    "its kept gradients are reduced by a backward that does not reach it",
    reductions=3,
    cost="every unit once, in the one backward that synchronises",
    gathers=5 + (2 + 1 + 2) + (2 + 1 + 2),
)
def _(run: Run) -> Yields:
    model = run.shard(Skips(), {Block})
    with run.no_sync(model):
        loss_of(model(run.data(0, 2, WIDTH), 0, 1)).backward()
        loss_of(model(run.data(1, 2, WIDTH), 0)).backward()
    loss_of(model(run.data(2, 2, WIDTH), 1)).backward()
    yield


@pattern(
    "a backward that comes through some units on some ranks only",
    "one rank keeps a gradient that another has not, and gathers what the other does not",
    disagrees=True,
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    with run.no_sync(model):
        output = model(run.data(0, 2, WIDTH))
        loss = loss_of(output) if run.rank == 0 else loss_of(output.detach().requires_grad_())
        loss.backward()
    train(model, run.data(1, 2, WIDTH))
    yield


@pattern(
    "an optimizer's step between windows",
    "what is kept was computed with the old weights, and is still reduced",
    gathers=5 * 5,
    reductions=3 * 3,
    cost="5 micro-batches, 3 of which synchronise",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    train(model, run.data(0, 2, WIDTH))
    yield
    with run.no_sync(model):
        train(model, run.data(1, 2, WIDTH))
    train(model, run.data(2, 2, WIDTH))
    yield
    optimizer.step()
    with run.no_sync(model):
        train(model, run.data(3, 2, WIDTH))
    train(model, run.data(4, 2, WIDTH))
    yield


@pattern(
    "zero_grad to None inside a window",
    "kept gradients are forgotten as any others",
    gathers=3 * 5,
    reductions=3,
    cost="3 micro-batches, one of which synchronises",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    with run.no_sync(model):
        train(model, run.data(0, 2, WIDTH))
        model.zero_grad(set_to_none=True)
        train(model, run.data(1, 2, WIDTH))
    train(model, run.data(2, 2, WIDTH))
    yield


@pattern(
    "zero_grad in place inside a window",
    "as above, without None to tell it by",
    gathers=4 * 5,
    reductions=2 * 3,
    cost="4 micro-batches, 2 of which synchronise",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    train(model, run.data(3, 2, WIDTH))
    yield
    with run.no_sync(model):
        train(model, run.data(0, 2, WIDTH))
        model.zero_grad(set_to_none=False)
        train(model, run.data(1, 2, WIDTH))
    train(model, run.data(2, 2, WIDTH))
    yield


@pattern(
    "zero_grad in place between steps",
    "gradients that are zero are not gradients that are missing",
    gathers=5 + (2 + 1 + 2) + 5,
    reductions=3 + 2 + 3,
    cost="ordinary steps; one block left out of the second, for which it is gathered in vain, ahead of either pass",
)
def _(run: Run) -> Yields:
    model = run.shard(Skips(), {Block})
    optimizer = sgd(model)
    for step, through in enumerate([(0, 1), (1,), (0, 1)]):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(run.data(step, 2, WIDTH), *through)).backward()
        yield
        optimizer.step()


@pattern("clipping", "the norm is over all ranks", within=2e-6, **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        run.note("norm", run.clip(model, 0.05))
        optimizer.step()


@pattern(
    "clipping after accumulation",
    "the norm is that of the sum",
    within=2e-6,
    gathers=2 * 5,
    reductions=3,
    cost="2 micro-batches, one of which synchronises",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    with run.no_sync(model):
        train(model, run.data(0, 2, WIDTH))
    train(model, run.data(1, 2, WIDTH))
    yield
    run.note("norm", run.clip(model, 0.05))
    optimizer.step()


@pattern(
    "clipping what is kept",
    "the norm of gradients that are not reduced is no norm",
    refused="kept under no_sync",
    gathers=2 * 5,
    reductions=3,
    cost="2 micro-batches, one of which synchronises",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    with run.no_sync(model):
        train(model, run.data(0, 2, WIDTH))
    run.refused(lambda: run.clip(model, 0.05))
    train(model, run.data(1, 2, WIDTH))
    yield


@pattern(
    "a gradient scaler, accumulation and clipping",
    "one rank's overflow skips the step of all",
    within=2e-6,
    gathers=4 * 2 * 5,
    reductions=4 * 3,
    cost="4 steps of 2 micro-batches; a step asks by one small all-reduce whether a gradient is not finite",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer, scaler = sgd(model), run.scaler(model, init_scale=64.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        with run.no_sync(model):
            scaler.scale(loss_of(model(run.data(2 * step, 2, WIDTH)))).backward()
        bad = float("inf") if step == 1 and run.rank == run.size - 1 else 1.0
        scaler.scale(loss_of(model(run.data(2 * step + 1, 2, WIDTH))) * bad).backward()
        yield None if step != 1 else AVERAGE_ONLY
        if step != 1:
            scaler.unscale_(optimizer)
            run.note("norm", run.clip(model, 0.05))
        scaler.step(optimizer)
        scaler.update()
        run.note("scale", scaler.get_scale())
    optimizer.zero_grad()


@pattern(
    "gradients divided by the number of tokens afterwards",
    "gradients are scaled in place, shard by shard",
    gathers=2 * 2 * 5,
    reductions=2 * 3,
    cost="2 steps of 2 micro-batches",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        with run.no_sync(model):
            train(model, run.data(2 * step, 2, WIDTH))
        train(model, run.data(2 * step + 1, 3, WIDTH))
        yield
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(5)
        optimizer.step()


@pattern(
    "two roots, each with its own window",
    "one keeps while the other reduces, in one backward",
    gathers=2 * (5 + 3),
    reductions=2 + (3 + 2),
    cost="2 micro-batches of either root; the first reduces the other one's only",
)
def _(run: Run) -> Yields:
    one, other = run.shard(Net(), {Block}), run.shard(nn.Sequential(nn.Linear(3, WIDTH), Block()), {Block})
    with run.no_sync(one):
        loss_of(other(one(run.data(0, 2, WIDTH)))).backward()
    loss_of(other(one(run.data(1, 2, WIDTH)))).backward()
    yield


@pattern(
    "a unit that is wrapped again while it keeps gradients",
    "what is kept belongs to an engine that is no more",
    refused="keeps gradients under no_sync",
    gathers=1 + 1,
    reductions=1,
    cost="a root of one unit, which is kept: 2 micro-batches, one of which synchronises",
)
def _(run: Run) -> Yields:
    inner = run.shard(Block())
    with run.no_sync(inner):
        train(inner, run.data(0, 2, WIDTH))
    run.refused(lambda: run.shard(nn.Sequential(inner, nn.Linear(WIDTH, 3))))
    train(inner, run.data(1, 2, WIDTH))
    yield
