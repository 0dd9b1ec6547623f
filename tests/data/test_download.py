"""Downloads, from a server of the test's own: whole, resumed, broken, wrong."""

from __future__ import annotations

import fcntl
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from lightning_dp._lightning import LightningModule, Trainer
from lightning_dp.data import CIFAR10, cifar10
from lightning_dp.data.cifar10 import download
from tests.data.images import FOLDER, pack, serve, sha256, write_folder
from tests.ranks import LIMIT_S, run_processes

CONTENT = bytes(range(256)) * 4000


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def server():
    with serve(CONTENT) as server:
        yield server


def test_a_download_is_verified_and_not_repeated(tmp_path, server, capsys):
    download(server.url, tmp_path / "new" / "file", sha256(CONTENT))
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert names(tmp_path / "new") == {"file"}
    assert "file: 100 % of 1.0 MB" in capsys.readouterr().err
    download(server.url, tmp_path / "new" / "file", sha256(CONTENT))
    assert server.asked == [None]  # once


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_resumes(tmp_path, server, ranges):
    server.ranges, server.stop_after = ranges, 300_000
    with pytest.raises(ConnectionError, match=r"300000 .*bytes are kept in .*file.part; run again, or download"):
        download(server.url, tmp_path / "file", sha256(CONTENT))
    assert names(tmp_path) == {"file.part"}
    assert (tmp_path / "file.part").read_bytes() == CONTENT[:300_000]
    server.stop_after = None
    download(server.url, tmp_path / "file", sha256(CONTENT))
    assert server.asked == [None, "bytes=300000-"]
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert names(tmp_path) == {"file"}


def test_a_complete_partial_file_is_not_downloaded_again(tmp_path, server):
    (tmp_path / "file.part").write_bytes(CONTENT)
    download(server.url, tmp_path / "file", sha256(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"", b"left from another file", CONTENT + b"too long"])
def test_a_wrong_checksum_leaves_nothing(tmp_path, server, part):
    (tmp_path / "file.part").write_bytes(part)
    expected = sha256(CONTENT) if part else "0" * 64
    with pytest.raises(
        ValueError, match=f"expected sha256 {expected}, found .*the download was deleted; run again, or download"
    ):
        download(server.url, tmp_path / "file", expected)
    assert names(tmp_path) == set()


def test_a_wrong_file_in_place_is_left_alone(tmp_path, server):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(
        ValueError, match=f"expected sha256 {sha256(CONTENT)}, found {sha256(b'mine')}; delete the file"
    ):
        download(server.url, tmp_path / "file", sha256(CONTENT))
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert server.asked == []


def test_an_error_of_the_server_is_reported(tmp_path, server):
    server.status = 404
    with pytest.raises(ConnectionError, match=r"cannot download http.*404.*; run again, or download .* put it at"):
        download(server.url, tmp_path / "file", sha256(CONTENT))
    assert names(tmp_path) == set()


def test_an_address_without_a_server_is_reported(tmp_path):
    with serve(CONTENT) as gone:
        pass
    with pytest.raises(ConnectionError, match="cannot download"):
        download(gone.url, tmp_path / "file", sha256(CONTENT))
    with pytest.raises(ConnectionError, match="only http and https"):
        download(f"file://{__file__}", tmp_path / "file", sha256(CONTENT))
    assert names(tmp_path) == set()


class Nothing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def test_step(self, batch: object, batch_idx: int) -> None:
        pass


def evaluate_on_rank(rank: int, world_size: int, url: str, checksum: str, root: Path) -> int:
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    data = CIFAR10(root, download=True, val_size=10, batch_size=10, url=url, sha256=checksum)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(Nothing(), datamodule=data, verbose=False)
    return len(data.read_test()[1])


def test_one_rank_downloads_for_all(tmp_path):
    archive = pack(write_folder(tmp_path / "source"))
    root = tmp_path / "root"
    with serve(archive) as server:
        assert run_processes(2, evaluate_on_rank, 2, server.url, sha256(archive), root) == [20, 20]
    assert server.asked == [None]
    assert names(root) == {"cifar-10-python.tar.gz", FOLDER}
    assert len(names(root / FOLDER)) == 6


def test_a_second_node_that_shares_the_folder_waits_for_the_download(tmp_path, monkeypatch):
    archive = pack(write_folder(tmp_path / "source"))
    first, waits, lock = count(), threading.Event(), fcntl.flock

    def watched(*arguments):
        if next(first) == 1:
            waits.set()
        lock(*arguments)

    def late(*arguments):
        assert waits.wait(LIMIT_S)
        download(*arguments)

    monkeypatch.setattr(fcntl, "flock", watched)
    monkeypatch.setattr(cifar10, "download", late)
    with serve(archive) as server, ThreadPoolExecutor() as pool:
        module = CIFAR10(tmp_path / "root", download=True, url=server.url, sha256=sha256(archive))
        for done in [pool.submit(module.prepare_data) for _ in range(2)]:
            done.result()
    assert server.asked == [None]  # once


def test_one_at_a_time_is_let_in_although_each_removes_the_lock(tmp_path):
    inside, lock = threading.Lock(), tmp_path / "lock"

    def enter(_):
        with cifar10.one_at_a_time(lock):
            alone = inside.acquire(blocking=False)
            os.sched_yield()
            if alone:
                inside.release()
        return alone

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(enter, range(400)))
    assert not lock.exists()


def test_a_wrong_archive_is_not_unpacked(tmp_path):
    with serve(pack(write_folder(tmp_path / "source"))) as server:
        data = CIFAR10(tmp_path / "root", download=True, url=server.url)
        with pytest.raises(ValueError, match="expected sha256 6d958be0"):
            data.prepare_data()
    assert names(tmp_path / "root") == set()
