"""Exactly what goes over the wire in a step: bytes, number and size of collectives, alignment, padding. Nothing is sent.

    python benchmarks/wire.py                                      # three models, 8 to 1,024 ranks
    python benchmarks/wire.py --models Qwen3-4B --world 6 48

A layout is a pure function of shapes, precision and number of ranks (fsdp/params/layout.py). So the bytes of a step can be
computed for any rank of any world. Parameters are gathered in bf16; gradients are reduced in fp32, over fp32 shards.
Units are the layers, gathered once for the forward and once for the backward, and the root's own parameters, gathered once;
a unit is one collective.
Beside ours stands the padding of FSDP2 and of flat FSDP1, by the formulas in `fsdp2_padded` and `fsdp1_padded`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from common import Bar, arguments, machine, markdown, write
from configurations import CONFIGURATIONS, UnitShapes, units_of

from fsdp.params.layout import ALIGNMENT, Layout, make_layout

GATHERED, REDUCED = 2, 4
"""Bytes of an element of bf16 and fp32."""
HOST = 8
"""HYBRID_SHARD: so many ranks share the shards."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "HYBRID_SHARD", "NO_SHARD")
GATHER_ONCE = ("SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER")
"""In a step: whole parameters are kept from forward to backward, or always, and gathered anew when an optimizer has stepped."""
SHOWN = (8, 64, 512)
"""In the table, of strategies other than FULL_SHARD; the JSON has all."""
JUDGED_WORLDS = range(8, 513)


@dataclass(frozen=True, slots=True)
class Row:
    """One model, strategy and number of ranks; bytes are those that one rank receives in a step."""

    model: str
    strategy: str
    world: int
    elements: int
    received: float
    floor: float
    collectives: int
    least_message: int
    median_message: float
    largest_message: int
    """Messages: what one rank contributes to a collective, in bytes."""
    padding: float
    worst_unit_padding: float
    misaligned_chunks: int
    misaligned_parameters: int
    """Of all ranks' chunks, and of all parameters in them: how many do not begin at a multiple of 16 bytes."""
    cut_by_element: float
    """The share of elements in parameters that are not cut between rows."""


def measure(model: str, units: Sequence[UnitShapes], strategy: str, world: int) -> Row:
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": min(HOST, world)}.get(strategy, world)
    replicas = world // shards
    layouts = [make_layout(unit.shapes, GATHERED, shards) for unit in units]
    elements = sum(unit.numel for unit in units)
    parameters = sum(len(unit.shapes) for unit in units)
    messages: list[int] = []
    received = floor = 0.0
    for number, (unit, layout) in enumerate(zip(units, layouts, strict=True)):
        # the root's own are kept between forward and backward
        gathers = 0 if shards == 1 else 1 if strategy in GATHER_ONCE or number == 0 else 2
        messages += [layout.shard_numel * GATHERED] * gathers
        received += gathers * layout.shard_numel * GATHERED * (shards - 1)
        floor += gathers * unit.numel * GATHERED * (shards - 1) / shards
        if shards > 1:
            messages.append(layout.shard_numel * REDUCED)
            received += layout.shard_numel * REDUCED * (shards - 1)
            floor += unit.numel * REDUCED * (shards - 1) / shards
        if replicas > 1:
            messages.append(layout.shard_numel * REDUCED)
            received += 2 * layout.shard_numel * REDUCED * (replicas - 1) / replicas
            floor += 2 * unit.numel / shards * REDUCED * (replicas - 1) / replicas
    # which gradients came: a byte for each parameter
    messages.append(parameters)
    received += 2 * parameters * (world - 1) / world
    padded = sum(layout.numel for layout in layouts)
    return Row(
        model=model,
        strategy=strategy,
        world=world,
        elements=elements,
        received=received,
        floor=floor,
        collectives=len(messages),
        least_message=min(messages[:-1]),
        median_message=statistics.median(messages[:-1]),
        largest_message=max(messages),
        padding=padded / elements - 1,
        worst_unit_padding=max(layout.numel / unit.numel - 1 for unit, layout in zip(units, layouts, strict=True)),
        misaligned_chunks=sum(_misaligned_chunks(layout) for layout in layouts),
        misaligned_parameters=sum(slot.start * GATHERED % ALIGNMENT != 0 for layout in layouts for slot in layout.slots),
        cut_by_element=sum(slot.numel for layout in layouts for i, slot in enumerate(layout.slots) if layout.cut(i).by_element)
        / elements,
    )


def _misaligned_chunks(layout: Layout) -> int:
    """In either precision."""
    begins = [rank * layout.shard_numel * size for size in (GATHERED, REDUCED) for rank in range(layout.num_shards)]
    return sum(begin % ALIGNMENT != 0 for begin in begins)


def fsdp2_padded(unit: UnitShapes, world: int) -> int:
    """FSDP2 cuts each parameter between rows, ceil(rows / W) to a rank, and sends that many for every rank."""
    return sum(-(-shape[0] // world) * world * prod(shape[1:]) for shape in unit.shapes)


def fsdp1_padded(unit: UnitShapes, world: int) -> int:
    """FSDP1 (flat) lays parameters end to end and pads their sum to a multiple of W."""
    return -(-unit.numel // world) * world


def compare(units: Sequence[UnitShapes], world: int) -> dict[str, dict[str, float]]:
    """Padding, and the share of units whose chunk is no multiple of 16 bytes in bf16, with everything sharded over all ranks."""
    ways: dict[str, Callable[[UnitShapes, int], int]] = {
        "ours": lambda unit, world: make_layout(unit.shapes, GATHERED, world).numel,
        "fsdp2": fsdp2_padded,
        "fsdp1": fsdp1_padded,
    }
    elements = sum(unit.numel for unit in units)
    found = {}
    for name, padded in ways.items():
        sizes = [padded(unit, world) for unit in units]
        found[name] = {
            "padding": sum(sizes) / elements - 1,
            "misaligned": sum(size // world * GATHERED % ALIGNMENT != 0 for size in sizes) / len(sizes),
        }
    return found


def worst_padding(units: Sequence[UnitShapes]) -> tuple[float, int]:
    """Over every number of ranks that is judged: the most padding, and for how many ranks."""
    elements = sum(unit.numel for unit in units)
    return max((sum(make_layout(u.shapes, GATHERED, w).numel for u in units) / elements - 1, w) for w in JUDGED_WORLDS)


def judge(rows: Sequence[Row], worst: Mapping[str, tuple[float, int]]) -> list[Bar]:
    judged = [row for row in rows if row.world in JUDGED_WORLDS]
    bars = []
    for model in sorted({row.model for row in judged}):
        mine = [row for row in judged if row.model == model]
        bars += [
            Bar("wire: padding, any of 8 to 512 ranks", 0.03, worst[model][0], model),
            Bar("wire: bytes received / floor", 1.03, max(row.received / row.floor for row in mine), model),
            Bar("wire: chunks and parameters not at 16 bytes", 0, max(map(_misaligned, mine)), model),
        ]
    return bars


def _misaligned(row: Row) -> int:
    return row.misaligned_chunks + row.misaligned_parameters


def show(rows: Sequence[Row], beside: Sequence[dict[str, Any]]) -> None:
    table = [
        [
            row.model,
            row.strategy,
            str(row.world),
            f"{row.received / 1e9:.3f}",
            f"{row.received / row.floor:.5f}",
            str(row.collectives),
            f"{row.least_message / 1e6:.3f} / {row.median_message / 1e6:.3f} / {row.largest_message / 1e6:.3f}",
            f"{100 * row.padding:.3f}",
            f"{100 * row.worst_unit_padding:.3f}",
            str(_misaligned(row)),
            f"{100 * row.cut_by_element:.1f}",
        ]
        for row in rows
        if row.strategy == "FULL_SHARD" or row.world in SHOWN
    ]
    header = ["model", "strategy", "ranks", "GB received", "/ floor", "collectives", "message MB least / median / most"]
    print(markdown([*header, "padding %", "worst unit %", "misaligned", "cut by element %"], table))
    compared = [
        [
            one["model"],
            str(one["world"]),
            *(f"{100 * one[name]['padding']:.3f}" for name in ("ours", "fsdp1", "fsdp2")),
            *(f"{100 * one[name]['misaligned']:.0f}" for name in ("ours", "fsdp1", "fsdp2")),
        ]
        for one in beside
    ]
    columns = [f"{what} % {who}" for what in ("padding", "misaligned units") for who in ("ours", "FSDP1", "FSDP2")]
    print(markdown(["model", "ranks", *columns], compared))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    parser.add_argument("--world", type=int, nargs="+", default=[8, 16, 24, 48, 64, 96, 128, 256, 384, 512, 768, 1024])
    options = parser.parse_args()
    shapes = {name: units_of(CONFIGURATIONS[name]()) for name in options.models}
    worst = {name: worst_padding(units) for name, units in shapes.items()}
    worlds = {name: sorted({*options.world, worst[name][1]}) for name in shapes}
    rows = [
        measure(name, units, strategy, world)
        for name, units in shapes.items()
        for strategy in STRATEGIES
        for world in worlds[name]
        if strategy != "HYBRID_SHARD" or world % HOST == 0
    ]
    beside = [
        {"model": name, "world": world, **compare(units, world)} for name, units in shapes.items() for world in worlds[name]
    ]
    report = {
        "benchmark": "wire",
        "machine": machine(options.date),
        "settings": {"gathered": "bfloat16", "reduced": "float32", "ranks that share shards in HYBRID_SHARD": HOST},
        "rows": [asdict(row) for row in rows],
        "beside": beside,
        "worst_padding": {name: {"padding": padding, "world": world} for name, (padding, world) in worst.items()},
    }
    show(rows, beside)
    write(report, judge(rows, worst), options.out)


if __name__ == "__main__":
    main()
