"""Downloads that resume, are verified before they are used, and never leave a partial file under the final name."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path

CHUNK_BYTES = 1 << 18


def download(url: str, path: Path, sha256: str, timeout_s: float = 30.0) -> None:
    """Download ``url`` to ``path``, unless ``path`` has the right checksum already.

    The data is written to ``path`` + ".part". After an interruption, the next call asks the server for the rest only,
    or for the whole file if the server does not support ranges. Call it in one process at a time.

    Raises:
        ConnectionError: the transfer failed. The ".part" file stays and is resumed by the next call.
        ValueError: the checksum is wrong. The ".part" file is deleted. A file that was at ``path`` before is kept.
    """
    remedy = f"run again, or download {url} by other means and put it at {path}"
    if path.exists():
        found = sha256_of(path)
        if found != sha256:
            raise ValueError(f"{path}: expected sha256 {sha256}, found {found}; delete the file and {remedy}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _receive(url, part, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        kept = f"{part.stat().st_size} bytes are kept in {part}; " if part.exists() else ""
        raise ConnectionError(f"cannot download {url}: {error}; {kept}{remedy}") from error
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise ValueError(f"{url}: expected sha256 {sha256}, found {found}; the download was deleted; {remedy}")
    os.replace(part, path)


def _receive(url: str, part: Path, timeout_s: float) -> None:
    """Append to ``part`` what is missing of ``url``."""
    if not url.startswith(("http://", "https://")):
        raise OSError("only http and https addresses are downloaded")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the server has no more bytes than ``part``; the checksum decides whether it is complete
        raise
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if not resumed:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        progress = _Progress(part.name.removesuffix(".part"), total)
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress.show(done)
    if total is not None and done != total:
        raise OSError(f"the transfer stopped after {done} of {total} bytes")


class _Progress:
    """Percentages on stderr: a line that is rewritten on a terminal, or else a line every 10 %."""

    def __init__(self, name: str, total_bytes: int | None) -> None:
        self.name, self.total_bytes = name, total_bytes
        self.step = 1 if sys.stderr.isatty() else 10
        self.shown = -1

    def show(self, done_bytes: int) -> None:
        if not self.total_bytes:
            return
        percent = 100 * done_bytes // self.total_bytes // self.step * self.step
        if percent == self.shown:
            return
        self.shown = percent
        end = "\n" if self.step > 1 or percent == 100 else ""
        begin = "" if self.step > 1 else "\r"
        print(
            f"{begin}{self.name}: {percent} % of {self.total_bytes / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def extract(archive: Path, name: str, root: Path) -> None:
    """Unpack folder ``name`` of a ``.tar.gz`` to ``root/name``, completely or not at all.

    Raises:
        ValueError: the archive is broken, has paths outside of its folder, or does not contain ``name``.
        RuntimeError: this version of Python cannot extract safely.
    """
    if not hasattr(tarfile, "data_filter"):
        raise RuntimeError("this version of Python cannot extract safely (PEP 706); use 3.11.4 or later")
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root) as temporary:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}; delete it and download it again") from error
        unpacked = Path(temporary, name)
        if not unpacked.is_dir():
            raise ValueError(f"{archive} contains no folder {name}; delete it and download the official one")
        os.replace(unpacked, root / name)
