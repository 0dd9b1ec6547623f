"""ImageNet's layouts: which image has which label, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lightning_dp.data.imagenet import LABEL_FILES, list_train, list_val, read_labels
from tests.data.jpegs import CLASSES, flatten_val, write_imagenet


def labeled(listing) -> dict[str, int]:
    names, labels = listing
    assert labels.dtype.is_floating_point is False
    return dict(zip((os.fsdecode(name) for name in names), labels.tolist(), strict=True))


def write_meta(folder: Path, numbers: dict[int, str]) -> None:
    """Write the devkit's meta.mat, which numbers the classes in an order of its own."""
    from scipy.io import savemat

    synsets = np.array(
        [(number, name, "words") for number, name in numbers.items()],
        dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")],
    )
    savemat(str(folder / "meta.mat"), {"synsets": synsets})


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path):
    train, classes = list_train(write_imagenet(tmp_path, 2, 1))
    assert classes == list(CLASSES)
    assert labeled(train) == {
        f"train/{name}/{name}_{image}.JPEG": CLASSES.index(name) for name in CLASSES for image in (0, 1)
    }
    val = list_val(tmp_path, classes)
    assert labeled(val) == {f"val/{name}/{name}_0.JPEG": label for label, name in enumerate(CLASSES)}


def test_other_files_are_ignored_and_any_spelling_of_the_suffix_is_read(tmp_path):
    folder = tmp_path / "train" / "n0"
    folder.mkdir(parents=True)
    for name in ("a.jpg", "b.PNG", "é.jpeg", "f.webp", "g.tif", "checksums.txt", ".hidden", "._a.jpg", "../._b.jpg"):
        (folder / name).touch()
    (tmp_path / "train" / ".cache").mkdir()
    train, classes = list_train(tmp_path)
    assert classes == ["n0"]
    assert list(labeled(train)) == [f"train/n0/{name}" for name in ("a.jpg", "b.PNG", "f.webp", "g.tif", "é.jpeg")]


def test_images_in_folders_within_a_class_are_of_that_class(tmp_path):
    for name in ("n0/b/2.jpg", "n0/1.jpg", "n0/b/c/1.jpg", "n0/.cache/3.jpg", "n1/images/1.jpg"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "4.jpg").touch()
    (tmp_path / "train" / "n1" / "more").symlink_to(tmp_path / "linked")
    train, _ = list_train(tmp_path)
    n0, n1 = ("1.jpg", "b/2.jpg", "b/c/1.jpg"), ("images/1.jpg", "more/4.jpg")
    assert labeled(train) == {f"train/n0/{name}": 0 for name in n0} | {f"train/n1/{name}": 1 for name in n1}
    assert list(labeled(train)) == sorted(labeled(train))


def devkit(root: Path, images: list[tuple[str, str]]) -> None:
    numbers = {3: CLASSES[0], 1: CLASSES[1], 2: CLASSES[2]}
    number_of = {name: number for number, name in numbers.items()}
    path = root / LABEL_FILES[0]
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{number_of[name]}\n" for _, name in images))
    write_meta(path.parent, numbers)


def kaggle(root: Path, images: list[tuple[str, str]]) -> None:
    lines = [f"{Path(image).stem},{name} 1 2 3 4 {name} 5 6 7 8" for image, name in reversed(images)]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "\n".join(lines))


def class_names(root: Path, images: list[tuple[str, str]]) -> None:
    (root / "val_labels.txt").write_text("\n".join(name for _, name in images) + "\n")


def caffe(root: Path, images: list[tuple[str, str]]) -> None:
    (root / "val_labels.txt").write_text("\n".join(f"{image} {CLASSES.index(name)}" for image, name in images))


@pytest.mark.parametrize("write", [devkit, kaggle, class_names, caffe])
def test_images_without_class_folders_get_their_labels_from_a_file(tmp_path, write):
    images = flatten_val(write_imagenet(tmp_path, 1, 3))
    write(tmp_path, images)
    expected = {f"val/{image}": CLASSES.index(name) for image, name in images}
    assert labeled(list_val(tmp_path, CLASSES)) == expected
    assert len(set(expected.values())) == 3


@pytest.mark.parametrize("line", ["{image} {name}", "{name}"])
def test_numbers_are_the_names_of_folders_that_have_such_names(tmp_path, line):
    """In the order of names 10 comes before 2, so that class 1, counted from 0, is another one."""
    classes, labels = ["1", "10", "2"], ["2", "10", "1"]
    text = "\n".join(line.format(image=f"{place}.jpg", name=name) for place, name in enumerate(labels))
    (tmp_path / "labels.txt").write_text(text)
    names = [f"{place}.jpg" for place in range(3)]
    assert read_labels(tmp_path / "labels.txt", names, classes) == [2, 1, 0]


@pytest.mark.parametrize("line", ["{image} {name}", "{image},{name}", "{image} {name} 1 2 3 4", "{name}"])
def test_a_class_may_have_spaces_in_its_name(tmp_path, line):
    """Another class may have the first word of it as its name."""
    classes = ["apple", "apple pie", "pie"]
    labels = ["apple pie", "pie", "apple"] if "1" not in line else ["pie", "pie", "apple"]
    text = "\n".join(line.format(image=f"{place}.jpg", name=name) for place, name in enumerate(labels))
    (tmp_path / "labels.txt").write_text(text)
    found = read_labels(tmp_path / "labels.txt", [f"{place}.jpg" for place in range(3)], classes)
    assert found == [classes.index(name) for name in labels]


def test_a_line_of_a_spreadsheet_may_have_spaces_in_the_name_of_the_image(tmp_path):
    (tmp_path / "labels.csv").write_text("my cat.jpg,n1\nmy dog.jpg, n0\n", encoding="utf-8-sig")
    assert read_labels(tmp_path / "labels.csv", ["my cat.jpg", "my dog.jpg"], ["n0", "n1"]) == [1, 0]
    (tmp_path / "labels.csv").write_text("n1\nn0\n", encoding="utf-8-sig")
    assert read_labels(tmp_path / "labels.csv", ["my cat.jpg", "my dog.jpg"], ["n0", "n1"]) == [1, 0]


def test_the_name_of_an_image_may_have_dots_and_the_label_file_no_suffixes(tmp_path):
    (tmp_path / "labels.csv").write_text("cat.1,n1\ncat.2,n0\nval/dog.3.JPG,n1\n")
    names = ["cat.1.jpg", "cat.2.jpg", "dog.3.png"]
    assert read_labels(tmp_path / "labels.csv", names, ["n0", "n1"]) == [1, 0, 1]


def test_a_label_file_may_be_elsewhere(tmp_path):
    images = flatten_val(write_imagenet(tmp_path / "images", 1, 2))
    caffe(tmp_path, images)
    assert len(list_val(tmp_path / "images", CLASSES, tmp_path / "val_labels.txt")[1]) == 6


@pytest.mark.parametrize("name", ["gone.txt", "images"])
def test_a_label_file_that_is_none_is_named_with_its_key(tmp_path, name):
    flatten_val(write_imagenet(tmp_path / "images", 1, 2))
    with pytest.raises(
        FileNotFoundError, match=f"val_labels=.*{name} is no file; name the one with the labels of .*val"
    ):
        list_val(tmp_path / "images", CLASSES, tmp_path / name)


def test_a_label_file_for_class_folders_is_refused(tmp_path):
    write_imagenet(tmp_path, 1, 2)
    (tmp_path / "labels.txt").touch()
    with pytest.raises(ValueError, match=r"val_labels=.*labels.txt has no effect on class folders, which .*val has"):
        list_val(tmp_path, CLASSES, tmp_path / "labels.txt")


def test_a_folder_that_is_not_imagenet_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder train; set data.root"):
        list_train(tmp_path)
    write_imagenet(tmp_path, 1, 1)
    (tmp_path / "train" / "n9").mkdir()
    with pytest.raises(FileNotFoundError, match="n9 has no image"):
        list_train(tmp_path)
    with pytest.raises(ValueError, match="has a class n02105855 that .*train does not have"):
        list_val(tmp_path, CLASSES[:2])
    flatten_val(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"no file with its labels; put one of ILSVRC2012_devkit.*or set val_labels"
    ):
        list_val(tmp_path, CLASSES)


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_were_not_moved_into_their_class_are_not_left_out(tmp_path, split):
    write_imagenet(tmp_path, 2, 1)
    (tmp_path / split / "1.JPEG").touch()
    with pytest.raises(ValueError, match=r"1\.JPEG is beside the class folders, and would be left out; move it"):
        list_val(tmp_path, list_train(tmp_path)[1])


@pytest.mark.parametrize("place", ["train/n3", "val/n3", "train/n0/more"])
def test_a_link_to_a_folder_that_is_missing_is_not_left_out(tmp_path, place):
    """Its disk is not mounted."""
    for split in ("train", "val"):
        (tmp_path / split / "n0").mkdir(parents=True)
        (tmp_path / split / "n0" / "1.jpg").touch()
    (tmp_path / "train" / ".hidden").symlink_to("gone")
    assert list_train(tmp_path)[1] == ["n0"]
    (tmp_path / place).symlink_to("gone")
    with pytest.raises(FileNotFoundError, match=rf"{place} is a link to gone, which is missing; mount its disk"):
        list_val(tmp_path, list_train(tmp_path)[1])
