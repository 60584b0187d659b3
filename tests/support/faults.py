"""Everything that is done to checkpoints to break them, and a page of what happens then."""

import errno
import io
import json
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

import fsdp
from fsdp.checkpoint import atomic_folder, dcp, manifest
from fsdp.comm.simulated import current_rank
from tests.support.models import CASES, local, make_net, wrap
from tests.support.ranks import refusals
from tests.support.states import refused_whole

FILE: Final = "__1_0.distcp"


class Evil:
    """A pickle that runs a command when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def step_name(step: int) -> str:
    return f"step-{step}"


def make_model(fill: float = 1.0) -> nn.Module:
    model = wrap(CASES["net"])
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(fill)
    return model


def save(folder: Path, step: int, fill: float | None = None) -> None:
    """Two ranks save a model that is filled with the number of the step."""
    fsdp.simulate(
        2, lambda rank: fsdp.save(folder / step_name(step), make_model(step if fill is None else fill), extra={"step": step})
    )


def load(folder: Path, size: int = 2) -> list[float]:
    """What every parameter holds afterwards, by rank."""

    def fn(rank: int) -> float:
        model = make_model(-1.0)
        fsdp.load(folder, model)
        values = {float(value) for p in model.parameters() for value in local(p).reshape(-1)}
        assert len(values) == 1
        return values.pop()

    return fsdp.simulate(size, fn)


def refusal_of_load(folder: Path, make: Callable[[], nn.Module] = make_model) -> str:
    """What two ranks are told, which must be the same but for who tells it; nothing may have been loaded."""

    def fn(rank: int) -> str:
        model = make()
        with refused_whole(model) as refusal:
            fsdp.load(folder, model)
        return str(refusal.value)

    return fsdp.simulate(2, fn)[1]


def change(path: Path, edit: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    edit(content)
    path.write_bytes(content)


def another_digit(content: bytearray) -> None:
    """So that it can still be read."""
    at = max(i for i, byte in enumerate(content[: len(content) // 2]) if chr(byte).isdigit())
    content[at] = ord("8") if content[at] == ord("7") else ord("7")


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 1


def cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def rewrite_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """As somebody would who knows the format: with a checksum that is right."""
    path = folder / manifest.NAME
    body = json.loads(path.read_text())
    del body["crc32"]
    edit(body)
    path.write_text(json.dumps({"crc32": manifest._crc_of(body), **body}))


def attack_metadata(folder: Path) -> None:
    path = folder / dcp.METADATA
    path.write_bytes(pickle.dumps(Evil(folder / "owned")))
    rewrite_manifest(folder, lambda body: body["files"].update({dcp.METADATA: manifest.record(path, [(0, path.stat().st_size)])}))


def attack_value(folder: Path) -> None:
    """The value of `extra`, by a pickle of the same length at most."""
    found = dcp.StoredCheckpoint(folder).metadata
    (info,) = (info for index, info in found.storage_data.items() if index.fqn == "extra.0")
    path = folder / info.relative_path
    stream = io.BytesIO()
    torch.save(Evil(folder / "owned"), stream)
    items = [(at, length) for at, length, _ in json.loads((folder / manifest.NAME).read_text())["files"][path.name]["items"]]
    info.length, at = len(stream.getvalue()), path.stat().st_size
    info.offset = at
    with open(path, "ab") as file:
        file.write(stream.getvalue())
    (folder / dcp.METADATA).write_bytes(pickle.dumps(found))
    rewrite_manifest(
        folder,
        lambda body: body["files"].update(
            {
                path.name: manifest.record(path, [*items, (at, info.length)]),
                dcp.METADATA: manifest.record(folder / dcp.METADATA, [(0, (folder / dcp.METADATA).stat().st_size)]),
            }
        ),
    )


def wrong_model() -> nn.Module:
    net = make_net()
    net.extra = nn.Linear(2, 2)
    return fsdp.fully_shard(net)


def wrong_shape() -> nn.Module:
    net = make_net()
    net.leave = nn.Linear(8, 3)
    return fsdp.fully_shard(net)


AT_REST: Final[dict[str, Callable[[Path], Any]]] = {
    "a shard file is cut": lambda folder: change(folder / FILE, cut),
    "a byte of a shard file is flipped": lambda folder: change(folder / FILE, flip),
    "a shard file is missing": lambda folder: (folder / FILE).unlink(),
    "a byte of the metadata is flipped": lambda folder: change(folder / dcp.METADATA, flip),
    "the metadata is missing": lambda folder: (folder / dcp.METADATA).unlink(),
    "the manifest is cut": lambda folder: change(folder / manifest.NAME, cut),
    "a byte of the manifest is flipped": lambda folder: change(folder / manifest.NAME, another_digit),
    "the manifest and the metadata are missing": lambda folder: [(folder / n).unlink() for n in (manifest.NAME, dcp.METADATA)],
    "another format version": lambda folder: rewrite_manifest(folder, lambda body: body.update(version=99)),
    "a malicious pickle as metadata, with a right checksum": attack_metadata,
    "a malicious pickle as a value, with a right checksum": attack_value,
}
"""What is done to a finished checkpoint."""

MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "a model with other names": wrong_model,
    "a model with other shapes": wrong_shape,
}

STAGES: Final = {
    "before anything is written": "nothing new",
    "when rank 1 has written its parts": "nothing new",
    "before the metadata is written": "nothing new",
    "before the manifest is written": "nothing new",
    "when half the manifest is written": "nothing new",
    "before the folder gets its name": "nothing new",
    "when the folder has its name": "the new one",
}
"""When all ranks are killed, and what is there afterwards."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Rank 1 cannot write to its end."""
    real = dcp.FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        done = real(self, plan, planner)
        rank = current_rank()
        if rank is not None and rank.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_data):
        yield


@contextmanager
def disk_full_at_once() -> Iterator[None]:
    """Rank 1 writes to a device that takes nothing, and torch's writer fails in words of its own."""
    real = FileSystem.create_stream

    def create_stream(self: FileSystem, path: Any, mode: str) -> Any:
        rank = current_rank()
        full = mode == "wb" and rank is not None and rank.rank == 1
        return open("/dev/full", "wb") if full else real(self, path, mode)

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        yield


@contextmanager
def read_only_folder() -> Iterator[None]:
    """As a file system that is mounted so says it."""
    with mock.patch.object(Path, "mkdir", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
        yield


@contextmanager
def another_save_meanwhile() -> Iterator[None]:
    """Another job finishes a checkpoint of the same name."""
    real = atomic_folder.sync

    def sync(folder: Path) -> None:
        real(folder)
        name = folder.name.split(atomic_folder.INCOMPLETE)[0].removeprefix(".")
        (folder.parent / name / "something").mkdir(parents=True, exist_ok=True)

    with mock.patch.object(atomic_folder, "sync", sync):
        yield


SAVING: Final = {
    "the disk is full on one rank": full_disk,
    "the disk is full on one rank, while torch writes a tensor": disk_full_at_once,
    "a read-only folder": read_only_folder,
    "another job saves under the same name": another_save_meanwhile,
}


def refusal_of_save(folder: Path, step: int, in_background: bool = False) -> str:
    """What the second rank is told, at the call or when it waits."""
    return refusals(2, lambda rank: fsdp.save(folder / step_name(step), make_model(), async_=in_background).wait())[1]


def plain(text: str, folder: Path) -> str:
    """Without what differs from run to run."""
    text = text.replace(f"{folder}/", "").replace(str(folder), "folder")
    return re.sub(r"\b\d[\d,]{2,}", "N", text)


def page(rows: dict[str, str]) -> str:
    return "\n".join(["| fault | what happens |", "| --- | --- |", *(f"| {fault} | {found} |" for fault, found in rows.items())])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(stage: str) -> None:
    """Replace what runs at `stage` by the end of the process."""

    def dying(*_: Any, **__: Any) -> None:
        die()

    def rank_1_dies(self: Any, plan: Any, planner: Any, real: Any = dcp.FileSystemWriter.write_data) -> Any:
        done = real(self, plan, planner)
        rank = current_rank()
        if rank is not None and rank.rank == 1:
            die()
        return done

    def half(self: Any, folder: Path, real: Any = manifest.Manifest.write) -> None:
        real(self, folder)
        change(folder / manifest.NAME, cut)
        die()

    def second(folder: Path, seen: list[Path] | None = None, real: Any = atomic_folder.sync) -> None:
        real(folder)
        if atomic_folder.INCOMPLETE not in folder.name:
            die()

    {
        "before anything is written": lambda: setattr(dcp.WritePlan, "write", dying),
        "when rank 1 has written its parts": lambda: setattr(dcp.FileSystemWriter, "write_data", rank_1_dies),
        "before the metadata is written": lambda: setattr(dcp.FileSystemWriter, "finish", dying),
        "before the manifest is written": lambda: setattr(manifest.Manifest, "write", dying),
        "when half the manifest is written": lambda: setattr(manifest.Manifest, "write", half),
        "before the folder gets its name": lambda: setattr(atomic_folder, "sync", dying),
        "when the folder has its name": lambda: setattr(atomic_folder, "sync", second),
    }[stage]()
