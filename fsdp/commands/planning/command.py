"""The command `python -m fsdp plan`."""

import argparse
import importlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.commands.planning.choices import AUTO, STRATEGIES, UnitsOfClasses
from fsdp.commands.planning.plan import OPTIMIZERS, plan
from fsdp.commands.planning.plan_page import write_plan
from fsdp.commands.planning.shapes import SHAPES, Decoder, cut_decoder, make_tokens, parallelize_decoder
from fsdp.commands.rehearsal.hardware import DEVICES, NETWORKS
from fsdp.commands.rehearsal.kernels import ATTENTION
from fsdp.commands.reporting.formats import write_text
from fsdp.config import MixedPrecisionPolicy
from fsdp.errors import ShardingError, require_package
from fsdp.file_errors import file_errors

_UNITS: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_AS_THEY_ARE: Final = (
    *("world_size", "per_host", "max_ranks", "tp", "ep", "pp", "device", "network"),
    *("optimizer", "attention", "strategies", "micro_batches"),
)
"""The options that are arguments of `plan` of the same names."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_plan(commands: Any) -> None:
    """Add `plan` to the commands."""
    parser = commands.add_parser("plan", help="say what a job will need, and which options are the fastest that fit")
    parser._negative_number_matcher = re.compile(r"-\d.*")  # as in --memory -1GiB, which is no option
    parser.add_argument(
        "target",
        help=f"a function that makes the model (package.module:function), a config.json of transformers, or {', '.join(SHAPES)}",
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument("--per-host", type=int, default=8, help="ranks on one host (default: %(default)s)")
    parser.add_argument("--device", default="h100", choices=[*DEVICES], help="default: %(default)s")
    parser.add_argument("--network", default="ib-ndr", choices=[*NETWORKS], help="between hosts (default: %(default)s)")
    parser.add_argument("--memory", help="of a rank's device, with its unit, as in 80GiB (default: what the device has)")
    parser.add_argument(
        "--reserve", help="of this memory, what stays free for the context, communicators and fragmentation (default: 6 %% of it)"
    )
    parser.add_argument(
        "--params", choices=[*_DTYPES], help="dtype of parameters, gradients and optimizer state (default: as the model is made)"
    )
    parser.add_argument(
        "--attention",
        default="auto",
        choices=[*ATTENTION],
        help="kernel of scaled_dot_product_attention: torch's choice, a fused one, or none (default: %(default)s)",
    )
    parser.add_argument("--inputs", help="package.module:function that makes one micro-batch; not needed for language models")
    parser.add_argument("--batch", type=int, help="rows of a micro-batch of tokens (default: 1)")
    parser.add_argument("--length", type=int, help="tokens of a row (default: 2048)")
    parser.add_argument("--micro-batches", type=int, default=1, help="before each step of the optimizer (default: %(default)s)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="sizes of tensor parallelism to compare (default: 1)")
    parser.add_argument("--ep", type=int, nargs="+", default=[1], help="sizes of expert parallelism to compare (default: 1)")
    parser.add_argument("--pp", type=int, nargs="+", default=[1], help="sizes of pipeline parallelism to compare (default: 1)")
    parser.add_argument(
        "--stages", help="package.module:function of a model, a number, and how many there are, which returns this stage"
    )
    parser.add_argument(
        "--parallelize",
        help="package.module:function of a model and a mesh, which spreads layers over mesh['tp'] and experts over mesh['ep']",
    )
    parser.add_argument("--loss-parallel", action="store_true", help="compute the loss under torch's loss_parallel")
    parser.add_argument("--optimizer", default="adamw", choices=[*OPTIMIZERS], help="default: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 and reduce in float32")
    parser.add_argument("--offload", action="store_true", help="compare with an offload policy too, also where others fit")
    parser.add_argument("--max-ranks", type=int, help="find the smallest number of ranks that fits, up to this one")
    parser.add_argument(
        "--units",
        nargs="+",
        metavar="CLASSES",
        help="choices of units: names of classes, as in Block or Block,Embedding, or auto (default: auto, and other sizes where "
        "these may be better)",
    )
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the numbers too")
    parser.add_argument("--html", type=Path, help="write a page too, which needs no network")
    parser.set_defaults(run=run_plan)


def run_plan(given: argparse.Namespace) -> int:
    """Run `plan`; return the exit status: 0 if a choice fits."""
    if given.html is not None:
        require_package("plan --html", "plotly")
    for path in (given.json, given.html):
        if path is not None:
            _check_output(path)
    for name, number in (("batch", given.batch), ("length", given.length)):
        if number is not None and number < 1:
            raise ShardingError(f"plan: --{name} is {number}; give a number, at least 1.")
        if number is not None and given.inputs is not None:
            raise ShardingError(f"plan: --{name} is for inputs that the plan makes, and --inputs makes its own; leave one out.")
    build, inputs = _target(given)
    if given.inputs is not None:
        inputs = _import(given.inputs, "--inputs")
    if inputs is None:
        raise ShardingError(f"plan: {given.target} says nothing about its inputs; give --inputs package.module:function.")
    found = plan(
        build,
        inputs=inputs,
        **{name: getattr(given, name) for name in _AS_THEY_ARE},
        memory=None if given.memory is None else bytes_of("--memory", given.memory),
        reserve=None if given.reserve is None else bytes_of("--reserve", given.reserve),
        params=None if given.params is None else _DTYPES[given.params],
        units=None if given.units is None else {name: _units(name) for name in given.units},
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if given.bf16 else None,
        offload=[False, True] if given.offload else None,
        stages=_stages(given),
        parallelize=_parallelize(given),
        loss_parallel=given.loss_parallel or given.target in SHAPES,
    )
    print(found)
    if given.json is not None:
        write_text("plan", given.json, found.to_json())
    if given.html is not None:
        write_plan(given.html, found)
        print(f"wrote {given.html}")
    return 0 if found.best is not None else 1


def _check_output(path: Path) -> None:
    """Raises:
    ShardingError: there is no folder for this file, or there is a folder in its place.
    """
    if not path.parent.is_dir():
        raise ShardingError(f"plan: {path}: there is no folder {path.parent}; make it first.")
    if path.is_dir():
        raise ShardingError(f"plan: {path} is a folder; give the name of a file.")


def bytes_of(option: str, text: str) -> int:
    """The number of bytes in a text such as 80GiB.

    Raises:
        ShardingError: it is not one, or has no unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b|b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ShardingError(f"plan: {option} is {text!r}; give a number with its unit, as in 80GiB.")
    if match[2] is None and float(match[1]):
        raise ShardingError(f"plan: {option} is {text!r}, without a unit; give {match[1]}GiB, {match[1]}GB or {match[1]}B.")
    return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])


def _units(text: str) -> UnitsOfClasses | Literal["auto"]:
    """What chooses the units that a text names."""
    return "auto" if text == AUTO else UnitsOfClasses(frozenset(text.split(",")))


def _target(given: argparse.Namespace) -> tuple[Callable[[], nn.Module], Callable[..., Any] | None]:
    """What makes the model, and what makes its inputs if that is known."""

    def tokens(shared_by: int) -> Tensor:
        return make_tokens(shared_by * (given.batch or 1), given.length or 2048)

    if given.target in SHAPES:
        return partial(Decoder, SHAPES[given.target]), tokens
    if given.target.endswith(".json"):
        return _of_transformers(Path(given.target)), lambda by: {"input_ids": tokens(by), "labels": tokens(by)}
    return _import(given.target), None


def _parallelize(given: argparse.Namespace) -> Callable[[nn.Module, Any], object] | None:
    """What spreads layers and experts of the target over ranks."""
    if given.parallelize is not None:
        return _import(given.parallelize, "--parallelize")
    if max(given.tp) == max(given.ep) == 1:
        return None
    if given.target not in SHAPES:
        raise ShardingError("plan: --tp and --ep need --parallelize package.module:function, of a model and a mesh.")
    if max(given.ep) > 1:
        raise ShardingError(f"plan: {given.target} has no experts; leave out --ep.")
    return parallelize_decoder


def _stages(given: argparse.Namespace) -> Callable[[nn.Module, int, int], nn.Module] | None:
    """What cuts the target into stages."""
    if given.stages is not None:
        return _import(given.stages, "--stages")
    if max(given.pp) == 1:
        return None
    if given.target not in SHAPES:
        raise ShardingError("plan: --pp needs --stages package.module:function, of a model, a number, and how many there are.")
    return cut_decoder


def _of_transformers(path: Path) -> Callable[[], nn.Module]:
    with file_errors(f"plan: {path}", path):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
    except ValueError as reason:
        raise ShardingError(f"plan: {path}: not JSON ({reason}); give a config.json of transformers.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ShardingError(f"plan: {path} has no 'model_type'; give a config.json of transformers.")
    require_package("plan", "transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        model.__dict__["forward"] = partial(_answering, model.forward)
        return model

    try:
        config = AutoConfig.for_model(content.pop("model_type"), **{**content, "use_cache": False})
        with torch.device("meta"):
            build()
    except Exception as reason:
        raise ShardingError(
            f"plan: {path}: transformers makes no language model of it ({type(reason).__name__}: {_first_line(reason)})."
        ) from reason
    return build


class _AllHold(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers yes where a model reads whether something holds for a whole tensor.

    Models of transformers ask whether the rows of a batch are single sequences without padding. Those of a plan are.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def _answering(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a model of transformers, which gets its answers."""
    with _AllHold():  # type: ignore[no-untyped-call]
        return forward(*args, **kwargs)


def _first_line(reason: BaseException) -> str:
    return str(reason).partition("\n")[0][:200]


def _import(name: str, option: str = "") -> Callable[..., Any]:
    """The function of that name. `option`: the one that names it; empty for the target.

    Raises:
        ShardingError: there is none.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        others = "" if option else f", a config.json, or one of {', '.join(SHAPES)}"
        raise ShardingError(
            f"plan: {f'{option} {name}' if option else repr(name)} names no function; give package.module:function{others}."
        )
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as reason:
        raise ShardingError(f"plan: {name} cannot be imported ({reason}); give package.module:function.") from reason
    return found
