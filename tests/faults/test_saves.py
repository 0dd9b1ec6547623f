"""Checkpoints at every instant of a save: one that was complete can be read, whatever happens."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies import complete_files
from lightning_dp.strategies.complete_files import existing, write_file
from lightning_dp.strategies.krizhevsky_hybrid import checkpoint
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import is_sharded, load_folder
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters
from tests.ranks import run_threads, thread_group
from tests.strategies.krizhevsky_hybrid.modules import HybridNet

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "shutil.rmtree"}


def killed_at(number: int, save: Callable[[], None]) -> bool:
    """Run ``save`` in a child that dies, as by kill -9, at its ``number``-th use of the file system.

    Returns:
        False if there was none, so that the save has ended.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: Any) -> None:
            nonlocal count
            if event in EVENTS:
                count += 1
                if count == number:
                    os._exit(9)

        status = 1
        try:
            sys.addaudithook(hook)
            save()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def folder_save(value: float, folder: Path) -> None:
    """Save ``value`` as one rank does, which has the whole head."""
    module = HybridNet()
    torch.nn.init.constant_(module.head[-1].bias, value)
    head = ShardedHead(module.head, Channel(thread_group(HashStore(), 0, 1, 60.0)))
    ShardedParameters(head).shard(CPU)
    content = {"state_dict": module.state_dict(), "value": value}
    checkpoint.write_folder(content, folder, module, [], head, lambda local: local)


def file_save(value: float, path: Path) -> None:
    write_file({"state_dict": HybridNet().state_dict(), "value": value}, path)


def value_at(path: Path) -> float:
    """Return what a resumed job finds at ``path``, after a check that it is all of one save."""
    path = existing(path)
    if not is_sharded(path):
        return torch.load(path, weights_only=True)["value"]
    found = load_folder(path, weights_only=True)
    assert set(found["state_dict"]) == set(HybridNet().state_dict())
    assert (found["state_dict"]["head.4.bias"] == found["value"]).all()
    return found["value"]


SAVES = {"file": file_save, "folder": folder_save}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "kind"), [("file", "file"), ("folder", "folder"), ("file", "folder"), ("folder", "file")]
)
def test_a_kill_at_any_step_leaves_a_complete_checkpoint(before, kind, tmp_path):
    path = tmp_path / "last.ckpt"
    seen = []
    number = 1
    alive = True
    while alive:
        SAVES[before](1.0, path)
        assert set(os.listdir(tmp_path)) == {"last.ckpt"}, "the next save has removed what a kill has left"
        alive = killed_at(number, lambda: SAVES[kind](2.0, path))
        seen.append(value_at(path))
        # Also by the rule of ckpt_path="last", which lists the folder.
        names = [name for name in os.listdir(tmp_path) if name.startswith("last") and name.endswith(".ckpt")]
        newest = max(names, key=lambda name: (tmp_path / name).stat().st_mtime_ns)
        assert value_at(tmp_path / newest) in (1.0, 2.0)
        number += 1
    assert seen == sorted(seen), "first the old one, then the new one"
    assert seen[0] == 1.0
    assert seen[-1] == 2.0
    assert number > 4


@pytest.mark.parametrize("kind", SAVES)
def test_a_full_disk_leaves_the_old_checkpoint(kind, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    SAVES[kind](1.0, path)

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        SAVES[kind](2.0, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert value_at(path) == 1.0


def _one_disk_is_full(rank: int, group: Any, path: Path) -> str:
    module = HybridNet()
    head = ShardedHead(module.head, Channel(group))
    ShardedParameters(head).shard(CPU)

    def broadcast(value: Any) -> Any:
        return path, path.with_name(".unfinished"), "id"

    content = {"state_dict": dict(module.state_dict()), "value": 1.0}
    checkpoint.write_folder(content, path, module, [], head, broadcast)
    save = checkpoint.save

    def full(content: Any, file: Path) -> None:
        if "rows-00001" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, file)

    checkpoint.save = full
    try:
        with pytest.raises((OSError, RuntimeError)) as error:
            checkpoint.write_folder(content, path, module, [], head, broadcast)
        return str(error.value)
    finally:
        checkpoint.save = save


def test_a_full_disk_of_one_rank_ends_the_save_on_all(tmp_path):
    path = tmp_path / "last.ckpt"
    first, second = run_threads(2, _one_disk_is_full, path)
    assert "rank 1 could not write the checkpoint" in first
    assert "No space left" in second
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert load_folder(path)["value"] == 1.0


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_save_takes_the_place_of_a_link(kind, is_there, tmp_path):
    """As ModelCheckpoint(save_last="link") leaves it."""
    path = tmp_path / "last.ckpt"
    path.symlink_to("epoch=0.ckpt")
    if is_there:
        folder_save(1.0, tmp_path / "epoch=0.ckpt")
    for value in (2.0, 3.0):
        SAVES[kind](value, path)
    assert value_at(path) == 3.0
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt"] * is_there + ["last.ckpt"]
    assert not is_there or value_at(tmp_path / "epoch=0.ckpt") == 1.0


@pytest.mark.parametrize("kind", SAVES)
def test_a_folder_that_cannot_be_flushed_is_none_the_worse(kind, tmp_path, monkeypatch):
    """Some network shares, and folders that a virtual machine shares with its host, flush files alone."""
    flush = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    SAVES[kind](1.0, tmp_path / "last.ckpt")
    assert value_at(tmp_path / "last.ckpt") == 1.0


def test_files_of_living_processes_are_left_alone(tmp_path):
    path = tmp_path / "a.ckpt"
    other = complete_files._hidden(tmp_path / "b.ckpt")  # this process lives, and may be writing it in another thread
    other.touch()
    (tmp_path / ".hidden").touch()
    file_save(1.0, path)
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, ".hidden", "a.ckpt"])
    file_save(1.0, tmp_path / "b.ckpt")
    assert sorted(os.listdir(tmp_path)) == [".hidden", "a.ckpt", "b.ckpt"]


def test_what_was_put_aside_is_found_with_a_warning(tmp_path, caplog):
    path = tmp_path / "last.ckpt"
    folder_save(1.0, path)
    path.rename(tmp_path / "last-being-replaced.ckpt")
    assert existing(path) == tmp_path / "last-being-replaced.ckpt"
    assert "was being replaced when its process ended" in caplog.text
    checkpoint.consolidate(path, tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt", weights_only=True)["value"] == 1.0
    assert existing("s3://bucket/last.ckpt") == "s3://bucket/last.ckpt"
