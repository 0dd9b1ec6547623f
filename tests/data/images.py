"""Files and servers for the tests of the data modules."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np

FOLDER = "cifar-10-batches-py"


def pixels_and_labels(num_images: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_images, 3072), np.uint8), generator.integers(0, 10, num_images).tolist()


def numpy_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch file as the installed numpy and this Python write it."""
    return pickle.dumps({b"batch_label": b"a batch", b"labels": labels, b"data": pixels}, protocol=2)


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch file as Python 2 and numpy 1 wrote the official ones, opcode by opcode."""
    assert len(pixels) < 256
    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([len(pixels)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"U\x0bbatch_labelU\x01xu."


def write_folder(root: Path, num_train: int = 60, num_test: int = 20) -> Path:
    """Write ``root/cifar-10-batches-py`` with random images and labels."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    pixels, labels = pixels_and_labels(num_train)
    for number, rows in enumerate(np.array_split(np.arange(num_train), 5), 1):
        content = numpy_pickle(pixels[rows], [labels[row] for row in rows])
        (folder / f"data_batch_{number}").write_bytes(content)
    (folder / "test_batch").write_bytes(numpy_pickle(*pixels_and_labels(num_test, seed=1)))
    return folder


def pack(folder: Path) -> bytes:
    """A .tar.gz of a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Server:
    """What it serves and how; what it was asked."""

    content: bytes
    ranges: bool = True
    stop_after: int | None = None  # bytes, and the connection is closed
    status: int = 200
    asked: list[str | None] = field(default_factory=list)  # each request's Range header
    url: str = ""


@contextmanager
def serve(content: bytes) -> Iterator[Server]:
    """Serve ``content`` on a free port of this machine."""
    server = Server(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            server.asked.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
            if server.status != 200:
                self.send_response(server.status)
            elif start and start >= len(server.content):
                self.send_response(416)
            else:
                self.send_response(206 if start else 200)
            body = server.content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: server.stop_after])

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{http_server.server_port}/cifar-10-python.tar.gz"
        try:
            yield server
        finally:
            http_server.shutdown()
            thread.join()
