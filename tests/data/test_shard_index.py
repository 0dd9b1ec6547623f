"""The index of tar shards that is kept in a file."""

from __future__ import annotations

import io
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_dp.data import shards as shards_module
from lightning_dp.data.shards import INDEX_FILE, index_shards, load_index, save_index, scan_shard
from tests.data.shards import JPEG, sample, write_tar


@pytest.fixture
def shards(tmp_path) -> list[str]:
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", [*sample(f"a{number}", number), *sample("b", 5, JPEG + b"\0" * number)])
    return ["0.tar", "1.tar", "2.tar"]


def scanned(monkeypatch) -> list[str]:
    """Return a list that gets the name of every shard whose headers are read."""
    names: list[str] = []

    def scan(path: Path):
        names.append(path.name)
        return scan_shard(path)

    monkeypatch.setattr(shards_module, "scan_shard", scan)
    return names


def equal(one, other) -> bool:
    return len(one) == len(other) and all(
        a.stamp == b.stamp and all(map(np.array_equal, a.members, b.members)) for a, b in zip(one, other, strict=True)
    )


def test_an_index_is_read_from_its_file_and_changed_shards_from_their_headers(tmp_path, shards, monkeypatch):
    names = scanned(monkeypatch)
    file = tmp_path / INDEX_FILE
    first = index_shards(tmp_path, shards, file)
    assert sorted(names) == shards
    assert equal(index_shards(tmp_path, shards, file), first)
    assert equal(index_shards(tmp_path, shards[::-2], file), first[::-2])
    assert sorted(names) == shards, "no header is read again"
    os.utime(tmp_path / "1.tar", ns=(0, first[1].stamp.mtime_ns + 1))
    write_tar(tmp_path / "2.tar", sample("c", 1))
    again = index_shards(tmp_path, shards, file)
    assert sorted(names[3:]) == ["1.tar", "2.tar"]
    assert again[2].members.labels.tolist() == [1]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".tar"] == [INDEX_FILE]
    with pytest.raises(FileNotFoundError, match="3.tar"):
        index_shards(tmp_path, ["3.tar"], file)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def damaged(index: dict, field: str, value: object) -> bytes:
    """An index in whose file one array is another one."""
    buffer = io.BytesIO()
    file = Path("index.npz")
    save_index(file, index)
    with np.load(file) as arrays:
        np.savez(buffer, **{**arrays, field: value})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("names", np.array([Harmful()], dtype=object)),
        ("counts", np.array([2, 2, 3])),
        ("counts", np.array([2, 4, 0])),
        ("offsets", np.arange(6.0)),
        ("offsets", np.arange(5)),
        ("lengths", np.full(6, 1 << 40)),
        ("lengths", np.full(6, -1)),
        ("labels", np.full(6, -1)),
        ("stamps", np.zeros((2, 2), np.int64)),
    ],
)
def test_a_damaged_index_is_made_again_and_never_executed(tmp_path, shards, caplog, field, value):
    file = tmp_path / INDEX_FILE
    first = index_shards(tmp_path, shards, file)
    file.write_bytes(damaged(load_index(file), field, value))
    caplog.clear()
    assert load_index(file) == {}
    assert "cannot be used, and is made again" in caplog.text
    assert equal(index_shards(tmp_path, shards, file), first)
    assert equal(list(load_index(file).values()), first)
    assert not Path("executed").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut", pickle.dumps(Harmful())])
def test_a_file_that_is_no_index_is_made_again_and_never_executed(tmp_path, shards, data):
    file = tmp_path / INDEX_FILE
    file.write_bytes(data)
    assert load_index(file) == {}
    assert len(index_shards(tmp_path, shards, file)) == 3
    assert len(load_index(file)) == 3
    assert not Path("executed").exists()


def test_an_index_that_cannot_be_written_is_warned_of_and_used(tmp_path, shards, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert len(index_shards(tmp_path, shards, tmp_path / "file" / INDEX_FILE)) == 3
    assert "set index_dir to a folder that can be written" in caplog.text
