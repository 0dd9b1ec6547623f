"""Checkpoints on disk: one that was complete can be read at every instant.

Lightning writes a checkpoint to the folder for temporary files, and moves it. Where that is another file system, the
move is a copy over the old file. A kill or a full disk meanwhile leaves neither. Here a file is written beside the old
one, and renamed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_dp._lightning import TorchCheckpointIO

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.pt"
"""The file in a folder of PyTorch's with the `checksum` of each other one that does not hold its own."""
_CHUNK = 1 << 22  # bytes

_HIDDEN = re.compile(r"\..+\.unfinished-(?P<pid>\d+)-on-(?P<host>.+)")


class CompleteFiles(TorchCheckpointIO):
    """Lightning's plugin for ordinary files, but a checkpoint is written beside the old one and then renamed."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is None and "://" not in str(path):
            write_file(checkpoint, path)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        require_file(path)
        return super().load_checkpoint(path, *args, **kwargs)


def write_complete_files(strategy: Any) -> None:
    """Let a strategy of Lightning write checkpoints by `CompleteFiles`, unless the user has chosen another plugin."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = CompleteFiles()


def is_plain_file(checkpoint_io: Any, path: Any) -> bool:
    """Return whether a plugin keeps the checkpoint as an ordinary local file, which we may then read by ourselves."""
    return type(checkpoint_io) in (TorchCheckpointIO, CompleteFiles) and "://" not in str(path)


def require_file(path: Any) -> None:
    """Raise ValueError if a checkpoint is a folder. Python says of one only that it is no file."""
    if "://" not in str(path) and Path(path).expanduser().is_dir():
        raise ValueError(
            f"{path} is a folder, as of a sharded checkpoint, and this strategy loads files; make a file of it with "
            "lightning_dp.strategies.consolidate_checkpoint"
        )


def write_file(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Save to a local file, without a copy in memory. What is there is replaced once the new file is complete."""
    path = Path(path).expanduser()  # as Lightning does
    with _replacing(path) as unfinished:
        save(checkpoint, unfinished)


def copy(source: Path, path: Path) -> None:
    """Copy a checkpoint, a file or a folder. What is there is replaced once the copy is complete."""
    with _replacing(path) as unfinished:
        if source.is_dir():
            shutil.copytree(source, unfinished)
        else:
            shutil.copy2(source, unfinished)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a hidden name to write to, and `replace` ``path`` by what is there after the context. Not after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = hidden_beside(path)
    try:
        yield unfinished
        replace(path, unfinished)
    finally:
        remove(unfinished)


@contextmanager
def naming_checkpoint(path: Any) -> Iterator[None]:
    """Let an error within the context say which checkpoint was read. torch's do not, if a file is truncated."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The checkpoint that was read is {path}; is it complete?")
        raise


def hidden_beside(path: Path) -> Path:
    """Return a hidden name beside ``path`` that no other process uses, and remove what killed processes have left."""
    for left in path.parent.glob(".*.unfinished-*"):
        match = _HIDDEN.fullmatch(left.name)
        # Of the processes of other hosts it is not known whether they live, but none writes this checkpoint beside us.
        if match is not None:
            is_dead = match["host"] == socket.gethostname() and not _is_alive(int(match["pid"]))
            if is_dead or left.name.startswith(f".{path.name}.unfinished-"):
                remove(left)
    return _hidden(path)


def replace(path: Path, unfinished: Path) -> None:
    """Rename ``unfinished`` to ``path``, and remove what was there.

    The system replaces a file by another in one step, but not a folder. There the old one is put aside under a name
    that begins alike, so that ``ckpt_path="last"`` finds it, too, and only then is the new one put into its place.
    """
    aside = _aside(path)
    if path.is_symlink():
        if unfinished.is_dir():
            path.unlink()  # a folder cannot replace a link; the checkpoint that it points to stays under its own name
    elif path.exists() and (path.is_dir() or unfinished.is_dir()):
        _hide_and_remove(aside)
        path.rename(aside)
    unfinished.replace(path)
    _hide_and_remove(aside)
    _sync(path.parent)


def existing(path: Any) -> Any:
    """Return ``path``, or what `replace` has put aside if the process was killed before the new one was in place."""
    if "://" in str(path):
        return path
    path = Path(path).expanduser()
    if path.exists() or not _aside(path).exists():
        return path
    log.warning(f"{path} was being replaced when its process ended; {_aside(path)} is the one of before")
    return _aside(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _hide_and_remove(path: Path) -> None:
    """Rename first: nobody must find a folder that is half removed."""
    if path.exists():
        remove(path.rename(_hidden(path)))


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished-{os.getpid()}-on-{socket.gethostname()}")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.stem}-being-replaced{path.suffix}")


def save(content: dict[str, Any], path: Path) -> None:
    """Write a file, and have it on the disk when this returns: a rename may reach the disk before the content does."""
    try:
        with open(path, "wb") as file:  # given the path, torch's own writer drops the reason of an error
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch hides the reason, such as a full disk, behind an error about positions in the file.
        reason = error.__context__
        if not isinstance(reason, OSError):
            raise
        message = f"{path} cannot be written: {reason.strerror}; a checkpoint that was there before is whole"
        raise OSError(reason.errno, message) from error


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, as ``torch.save`` keeps one of each part of its own."""
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def _sync(path: Path) -> None:
    with suppress(OSError):  # some file systems do not let a folder be opened, others cannot flush one
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it is another user's
    return True
