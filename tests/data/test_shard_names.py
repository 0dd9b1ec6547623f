"""Which files are the shards of a split."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dp.data.shards import expand_range, find_shards


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["train-000000.tar", "train-000001.tar"], ["val-000000.tar"]),
        (["imagenet1k-train-0000.tar", "imagenet1k-train-0001.tar"], ["imagenet1k-validation-00.tar"]),
        (["train/000.tar", "train/001.tar"], ["val/000.tar"]),
        (["train/a.tar"], ["validation/a.tar"]),
        (["ImageNet-Train-1.tar"], ["ImageNet-VAL-1.tar"]),
    ],
)
def test_shards_are_found_by_the_names_that_people_give_them(tmp_path, train, val, caplog):
    touch(tmp_path, *reversed(train), *val, "train.txt", ".train-hidden.tar", "_info.json")
    assert find_shards(tmp_path, "train") == train
    assert find_shards(tmp_path, "val") == val
    assert not caplog.records


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("a-*.tar", ["a-000.tar", "a-001.tar", "a-002.tar", "a-010.tar"]),
        (["b/{0..1}.tar", "a-010.tar"], ["b/0.tar", "b/1.tar", "a-010.tar"]),
        ("{0..9}/*.tar", ["2/x.tar", "7/x.tar"]),
    ],
)
def test_patterns_stand_for_shards_in_order(tmp_path, patterns, expected):
    touch(tmp_path, "a-000.tar", "a-001.tar", "a-002.tar", "a-010.tar", "b/0.tar", "b/1.tar", "2/x.tar", "7/x.tar")
    assert find_shards(tmp_path, "train", patterns) == expected
    absolute = [str(tmp_path / pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    assert find_shards(tmp_path / "other", "train", absolute) == [str(tmp_path / name) for name in expected]


def test_several_ranges_in_a_name_are_nested():
    assert expand_range("{1..2}/x-{09..10}.tar") == ["1/x-09.tar", "1/x-10.tar", "2/x-09.tar", "2/x-10.tar"]


def test_compressed_shards_are_not_left_out(tmp_path):
    """Their content is refused when it is read."""
    touch(tmp_path, "train-0.tar", "train-1.tar.gz")
    assert find_shards(tmp_path, "train") == ["train-0.tar", "train-1.tar.gz"]


def test_links_to_shards_that_are_missing_are_not_left_out(tmp_path):
    """To read them is an error, which names them."""
    touch(tmp_path, "train-0.tar")
    (tmp_path / "train-1.tar").symlink_to("gone.tar")
    assert find_shards(tmp_path, "train") == ["train-0.tar", "train-1.tar"]


def test_two_places_for_the_same_split_are_refused(tmp_path):
    touch(tmp_path, "train-0.tar", "train/0.tar")
    with pytest.raises(ValueError, match=r"both .*train-0.tar and .*train/0.tar look like shards; set train_shards"):
        find_shards(tmp_path, "train")


def test_a_gap_in_the_numbers_is_warned_of(tmp_path, caplog):
    touch(tmp_path, *(f"i1k-train-{number:03}.tar" for number in range(10) if number not in (4, 7)))
    find_shards(tmp_path, "train")
    (record,) = caplog.records
    assert "2 shards are missing" in record.getMessage()
    assert "i1k-train-*.tar" in record.getMessage()
