"""Where every unit is, and how it got there, to be read by people."""

from collections.abc import Iterator

from torch import nn

from fsdp.engine import Engine
from fsdp.sharded import engines_in


def story(model: nn.Module) -> str:
    """What the engine is doing with `model` on this rank: for a look at a run that hangs or surprises. Does not communicate.

    For each root: the bytes it holds by kind, the last collectives of each channel, oldest first, and a line for each unit
    with its state, where its whole parameters are, and its last events, oldest first.

    Raises:
        ShardingError: there is no unit in `model`, or it is only a part of a root.
    """
    return "\n".join(line for engine in engines_in(model, "story") for line in _lines(engine))


def _lines(engine: Engine) -> Iterator[str]:
    channels = engine.channels
    held = ", ".join(f"{count:,} {kind}" for kind, count in sorted(engine.ledger.held.items()) if count)
    yield (
        f"root {engine.units[0].name!r}, rank {channels.everyone.rank} of {channels.everyone.size}, backward "
        f"{engine.root.backward.name}; bytes held: {held or 'none'}"
    )
    for name, channel in zip(channels._fields, channels, strict=True):
        if channel.size > 1 and not (name == "everyone" and channel in channels[:3]):
            yield f"  {name}: {', '.join(channel.recent()) or 'nothing called yet'}"
    rows = [
        (unit.name, lifecycle.state.name, residency.name, " ".join(event.name for event in lifecycle.story))
        for unit, lifecycle, residency in zip(engine.units, engine.root.lifecycles, engine.residency, strict=True)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3] or "nothing yet"])
