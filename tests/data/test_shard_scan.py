"""What is in a tar shard, and shards that are refused."""

from __future__ import annotations

import tarfile
from itertools import count
from pathlib import Path

import pytest

from lightning_dp.data.shards import INDEX_FILE, index_shards, member_name, scan_shard, split_name
from tests.data.shards import sample, write_tar


def read(path: Path, members) -> list[bytes]:
    data = path.read_bytes()
    return [data[start : start + length] for start, length in zip(members.offsets, members.lengths, strict=True)]


def test_keys_end_at_the_first_dot_and_hidden_files_and_metadata_have_none():
    assert split_name("a/b.c/key.seg.PNG") == ("a/b.c/key", "seg.png")
    assert split_name("./n0_1.JPEG") == ("./n0_1", "jpeg")
    for name in ("._n0_1.JPEG", "a/.hidden.jpg", "README", "__shard__/x.jpg"):
        assert split_name(name) == (None, name)


def test_labels_may_be_anywhere_in_the_shard_and_images_keep_their_order(tmp_path):
    members = [
        ("b.cls", b"7\n"), ("z.jpg", b"zz"), ("c.PNG", b"ccc"), ("a.cls", b" 0 "), ("b.JPEG", b"b"), ("a.jpeg", b"aa"),
        ("c.cls", b"12"), ("z.cls", b"999"), ("z.json", b"{}"), ("a.seg.png", b"mask"), ("._a.jpg", b"AppleDouble"),
    ]  # fmt: skip
    path = write_tar(tmp_path / "x.tar", members)
    found = scan_shard(path)
    assert read(path, found) == [b"zz", b"ccc", b"b", b"aa"]
    assert found.labels.tolist() == [999, 12, 7, 0]
    assert [member_name(path, offset) for offset in found.offsets] == ["z.jpg", "c.PNG", "b.JPEG", "a.jpeg"]


def test_an_image_whose_name_has_a_further_dot_is_named(tmp_path):
    """Its label has the same key and suffix as others that are ignored, so that both would be missing."""
    path = write_tar(tmp_path / "x.tar", [*sample("a", 0), *sample("b.final", 1, suffix="jpg")])
    with pytest.raises(ValueError, match=r"b\.final\.jpg in .*x\.tar is no image: a key ends at the first dot"):
        scan_shard(path)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_are_read_whole(tmp_path, format):
    folder = "x" * (90 if format == tarfile.USTAR_FORMAT else 300)
    keys = [f"{folder}/{'y' * 90}{number}" for number in range(2)]  # which differ in the last character only
    if format != tarfile.USTAR_FORMAT:
        keys.append("é" * 200)
    path = write_tar(
        tmp_path / "x.tar", [part for n, key in enumerate(keys) for part in sample(key, n, b"%d" % n)], format
    )
    found = scan_shard(path)
    assert read(path, found) == [b"%d" % number for number in range(len(keys))]
    assert found.labels.tolist() == list(range(len(keys)))
    assert member_name(path, found.offsets[1]) == f"{keys[1]}.JPEG"


def test_the_same_key_in_two_shards_is_two_images(tmp_path):
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, sample("000000", 3))
    index = index_shards(tmp_path, ["a.tar", "b.tar"], tmp_path / INDEX_FILE)
    assert sum(len(shard.members.labels) for shard in index) == 2


def test_a_shard_that_is_not_whole_is_refused_wherever_it_ends(tmp_path):
    path = write_tar(tmp_path / "x.tar", [*sample("a", 1), *sample("b", 2), *sample("c", 2)])
    whole = path.read_bytes()
    for size in [0, 100, *range(512, len(whole.rstrip(b"\0")), 256)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x.tar is not a whole tar file: .*; download it or write it again"):
            scan_shard(path)


@pytest.mark.parametrize("length", [-5, -512, -1024])
@pytest.mark.parametrize("name", ["b.jpg", "b.txt", "b.cls"])
def test_a_header_with_a_negative_length_is_refused_and_not_read_for_ever(tmp_path, monkeypatch, name, length):
    info = tarfile.TarInfo(name)
    info.size = length
    path = write_tar(tmp_path / "x.tar", sample("a", 1))
    whole = path.read_bytes().rstrip(b"\0")
    begin = -(-len(whole) // 512) * 512
    path.write_bytes(whole.ljust(begin, b"\0") + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    read, calls = tarfile.TarFile.next, count()

    def read_a_few(tar):
        assert next(calls) < 10
        return read(tar)

    monkeypatch.setattr(tarfile.TarFile, "next", read_a_few)
    with pytest.raises(ValueError, match=r"x.tar is not a whole tar file: a header claims a negative number of bytes"):
        scan_shard(path)
