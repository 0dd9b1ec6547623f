"""What is in a tar shard, and shards that are refused."""

from __future__ import annotations

import gzip
import tarfile
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


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a.JPEG"
    return info


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("a.jpg", b"1"), ("a.jpg", b"2"), ("a.cls", b"0")],
            "x.tar has two images a; give each image a name of its own",
        ),
        ([("a.jpg", b"1"), ("a.png", b"2"), ("a.cls", b"0")], "has two images a"),
        ([("a.jpg", b"1"), ("a.cls", b"0"), ("a.cls", b"1")], "has two labels a"),
        (
            [*sample("a", 1), ("b.jpg", b"1"), ("c.jpg", b"1")],
            r"x.tar has no KEY.cls for 2 keys, of which b is the first",
        ),
        (
            [*sample("a", 1), ("b.cls", b"1"), ("b.webp", b"")],
            r"has no KEY.jpeg, KEY.jpg, KEY.png for 1 keys, of which b",
        ),
        (
            [("a.jpg", b"1"), ("a.cls", b"n01440764")],
            r"a.cls in .*x.tar contains b'n01440764', which is not the number",
        ),
        ([("a.jpg", b"1"), ("a.cls", b"-1")], r"contains b'-1', which is not the number"),
        ([("a.jpg", b"1"), ("a.cls", b"")], r"contains b'', which is not the number"),
        ([("n01440764.tar", b"1"), ("readme.txt", b"1")], r"x.tar has no images .*, but .tar, .txt.*use data=imagenet"),
        ([], "has no images"),
    ],
)
def test_a_shard_without_an_image_and_a_label_for_each_key_is_refused(tmp_path, members, message):
    with pytest.raises(ValueError, match=message):
        scan_shard(write_tar(tmp_path / "x.tar", members))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_refused_and_not_left_out(tmp_path, kind):
    path = write_tar(tmp_path / "x.tar", sample("a", 1))
    with tarfile.open(path, "a") as tar:
        tar.addfile(link("b.JPEG", kind))
    with pytest.raises(ValueError, match=r"b.JPEG in .*x.tar is a link .*tar --dereference --hard-dereference"):
        scan_shard(path)


@pytest.mark.parametrize("compress", [gzip.compress, lambda data: b"\x28\xb5\x2f\xfd" + data])
def test_a_compressed_file_is_refused_whatever_its_name(tmp_path, compress):
    path = write_tar(tmp_path / "x.tar", sample("a", 1))
    path.write_bytes(compress(path.read_bytes()))
    with pytest.raises(ValueError, match=r"x.tar is compressed \((gzip|zstd)\).*decompress it"):
        scan_shard(path)


def test_a_shard_that_is_not_whole_is_refused_wherever_it_ends(tmp_path):
    path = write_tar(tmp_path / "x.tar", [*sample("a", 1), *sample("b", 2), *sample("c", 2)])
    whole = path.read_bytes()
    for size in [0, 100, *range(512, len(whole.rstrip(b"\0")), 256)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x.tar is not a whole tar file: .*; download it or write it again"):
            scan_shard(path)


def test_a_damaged_header_and_a_second_archive_are_found(tmp_path):
    path = write_tar(tmp_path / "x.tar", [*sample("a", 1), *sample("b", 2)])
    whole = path.read_bytes()
    start = whole.index(b"b.JPEG")
    path.write_bytes(whole[:start] + b"?" + whole[start + 1 :])
    with pytest.raises(ValueError, match="not a whole tar file: there is something other than members after byte"):
        scan_shard(path)
    path.write_bytes(whole + whole)
    with pytest.raises(ValueError, match="there is something other than members after byte"):
        scan_shard(path)
