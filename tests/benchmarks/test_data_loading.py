"""The loader benchmark with ImageNet's files."""

from __future__ import annotations

import json

import data_loading
import pytest

from tests.data.jpegs import write_imagenet


def test_the_table_says_how_many_cores_feed_a_gpu():
    table = data_loading.imagenet_table(
        {"ours": [400.0, 600.0, 500.0], "pillow in full": [300.0, 200.0, 250.0]}, "ours"
    )
    assert "| pillow in full | 250 (200-300) | 2.00 (1.33-3.00) |" in table
    assert table.endswith("2,500 images/s for one GPU need 5 such cores.")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_smoke_run_on_files_writes_results(tmp_path):
    root = write_imagenet(tmp_path / "imagenet", num_train=8, num_val=1)
    data_loading.main(["--smoke", "--imagenet", str(root), "--output", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert {"ours, pillow", "pillow in full", "pillow in full, as bytes"} <= results["images_per_s"].keys()
    assert (tmp_path / "out" / "images_per_s.png").exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_smoke_run_on_shards_writes_results(tmp_path):
    root = write_imagenet(tmp_path / "imagenet", num_train=8, num_val=1)
    data_loading.main(["--smoke", "--imagenet", str(root), "--shards", "--output", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert {"ours, tar shards", "ours, class folders"} <= results["images_per_cpu_s"].keys()
    assert all(value > 0 for values in results["images_per_cpu_s"].values() for value in values)


def test_shards_need_the_files_that_are_written_into_them():
    with pytest.raises(SystemExit, match="--shards needs --imagenet DIR"):
        data_loading.main(["--shards"])
