"""Find the tar shards of a data set by their names, in the ways that people have them."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "val": ("val", "validation")}  # what the names of folders and shards say
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LAST_NUMBER = re.compile(r"(.*\D|)(\d+)(\D*)", re.DOTALL)


def find_shards(root: Path, split: str, patterns: str | Sequence[str] | None = None) -> list[str]:
    """Return the shards of a split, in order, relative to ``root``.

    Args:
        root: folder of the shards.
        split: ``"train"`` or ``"val"``.
        patterns: names with ``*`` and ``?``, or with ranges such as ``{000000..001281}``. None for ``*train*.tar`` or
            ``train/*.tar``, and for ``*val*.tar``, ``val/*.tar`` or ``validation/*.tar``.

    Raises:
        FileNotFoundError: there is no shard, or one of a range is missing.
        ValueError: a shard is compressed, is used twice, or is not a local file.
    """
    if patterns is None:
        found = _default_shards(root, split)
    else:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        found = [name for pattern in patterns for name in _matches(root, pattern, split)]
        if not found:
            raise ValueError(f"{split}_shards={patterns} names no shard; name some, or use null for the usual names")
    compressed = [name for name in found if name.lower().endswith(COMPRESSED)]
    if compressed:
        raise ValueError(
            f"{root / compressed[0]} is compressed, so its images cannot be read one by one; decompress it (gzip -d, "
            "zstd -d, ...), and keep only the .tar file: compression makes images hardly smaller"
        )
    require_distinct(root, found)
    _warn_of_gaps(root, found)
    return found


def require_distinct(root: Path, names: Sequence[str]) -> None:
    """Raise ValueError if a shard appears twice, also by different paths."""
    seen: dict[Path, str] = {}
    for name in names:
        path = (root / name).resolve()
        if path in seen:
            raise ValueError(
                f"the shard {root / name} is used twice{'' if seen[path] == name else f', also as {seen[path]}'}; set "
                "train_shards and val_shards so that they name each shard once"
            )
        seen[path] = name


def expand_range(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges such as ``{000..127}`` stands for. Leading zeros are kept."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    if int(first) > int(last):
        raise ValueError(f"{pattern} has a range that ends before it begins; use {{{last}..{first}}}")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [
        name for number in numbers for name in expand_range(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def _default_shards(root: Path, split: str) -> list[str]:
    """Return the shards of a split in ``root`` itself, or in a folder of the split. Compressed ones are among them."""
    beside = [name for name in _tar_files(root) if any(word in name.lower() for word in SPLITS[split])]
    inside = [f"{folder}/{name}" for folder in SPLITS[split] for name in _tar_files(root / folder)]
    if beside and inside:
        raise ValueError(f"both {root / beside[0]} and {root / inside[0]} look like shards; set {split}_shards")
    if not beside and not inside:
        raise FileNotFoundError(
            f"there are no shards for {split} in {root.absolute()}; set data.root to the folder with *{split}*.tar or "
            f"{split}/*.tar, or set {split}_shards (for class folders, use data=imagenet)"
        )
    return beside or inside


def _tar_files(folder: Path) -> list[str]:
    """Return the names of the tar files in a folder, in order."""
    if not folder.is_dir():
        return []
    suffixes = (".tar", ".tgz", *(f".tar{suffix}" for suffix in COMPRESSED))
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    return sorted(name for name in names if name.lower().endswith(suffixes))


def _matches(root: Path, pattern: str, split: str) -> list[str]:
    """Return the shards that one pattern stands for. They are relative to ``root``, unless the pattern is absolute."""
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ValueError(
            f"{split}_shards={pattern} is not a local file, but images are read in random order; copy the shards to "
            "a local disk, and give their names there"
        )
    names = expand_range(pattern)
    if any(character in pattern for character in "*?["):
        names = sorted({path for name in names for path in glob.glob(name, root_dir=root)})
        if not names:
            raise FileNotFoundError(f"{split}_shards={pattern} matches no file in {root.absolute()}; see ls {root}")
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} shards of {split}_shards={pattern} are missing, of which "
            f"{root / missing[0]} is the first; download them, or name those that are there"
        )
    return names


def _warn_of_gaps(root: Path, names: Sequence[str]) -> None:
    """Warn of numbers that are missing among numbered shards: a download may be incomplete."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is not None:
            before, number, after = match.groups()
            numbers.setdefault((before, after), []).append(int(number))
    for (before, after), present in numbers.items():
        missing = max(present) + 1 - min(present) - len(present)
        if 0 < missing < len(present):  # otherwise the numbers are no count of shards
            log.warning(
                "%d shards are missing between the first and the last of %s/%s*%s; is the download complete?",
                missing, root, before, after,
            )  # fmt: skip
