"""Decode, crop and resize batches with NVIDIA DALI: on a GPU by nvJPEG, on the CPU by its own threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp.data.image_files import EncodedImages
from lightning_dp.data.jpeg import resolve_decoder


class DaliDecoder:
    """Makes images of `EncodedImages`.

    Args:
        device: where images are decoded and returned: a CUDA device or the CPU.
        num_threads: of DALI, for this process.

    Raises:
        ModuleNotFoundError: DALI is not installed.
    """

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self.device = device
        self.num_threads = num_threads
        self._pipelines: dict[bool, Any] = {}
        resolve_decoder("dali")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pipelines": {}}  # a pipeline cannot be copied; the copy builds its own

    def __call__(self, images: EncodedImages) -> Tensor:
        """Return (n, 3, size, size) uint8 in the channels-last memory format.

        Raises:
            RuntimeError: a file cannot be decoded. DALI does not say which one.
        """
        pipeline = self._pipelines.get(images.exact)
        if pipeline is None or pipeline.max_batch_size < len(images):
            pipeline = self._pipelines[images.exact] = self._build(len(images), images.exact)
        boxes = [region.box for region in images.regions]
        feeds: dict[str, Any] = {
            "files": list(images.files()),
            "start": np.array([(box.top, box.left) for box in boxes], np.int32),
            "shape": np.array([(box.height, box.width) for box in boxes], np.int32),
            "size": np.full((len(images), 2), images.size, np.float32),
            "flip": np.array([region.flip for region in images.regions], np.int32),
        }
        for name, values in feeds.items():
            pipeline.feed_input(name, values)
        try:
            (decoded,) = pipeline.run()
        except RuntimeError:
            del self._pipelines[images.exact]  # it is no longer valid
            raise
        return self._to_torch(decoded, images)

    def _to_torch(self, decoded: Any, images: EncodedImages) -> Tensor:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        # A copy: DALI uses its own memory again.
        result = torch.empty(len(images), images.size, images.size, 3, dtype=torch.uint8, device=self.device)
        on_cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_cuda else None
        feed_ndarray(decoded.as_tensor(), result, cuda_stream=stream)
        return result.permute(0, 3, 1, 2)

    def _build(self, max_batch_size: int, exact: bool) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        on_cuda = self.device.type == "cuda"

        @pipeline_def(
            batch_size=max_batch_size,
            num_threads=self.num_threads,
            device_id=(self.device.index or 0) if on_cuda else None,
            # A batch goes in and comes out. The loader's workers are those who are ahead.
            prefetch_queue_depth=1,
            exec_async=False,
            exec_pipelined=False,
        )
        def pipeline() -> Any:
            image = fn.decoders.image_slice(
                fn.external_source(name="files", dtype=types.UINT8, ndim=1),
                start=fn.external_source(name="start", dtype=types.INT32, ndim=1),
                shape=fn.external_source(name="shape", dtype=types.INT32, ndim=1),
                axis_names="HW",
                device="mixed" if on_cuda else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,  # like the other decoders
                jpeg_fancy_upsampling=exact,
                use_fast_idct=not exact,
            )
            size = fn.external_source(name="size", dtype=types.FLOAT, ndim=1)
            image = fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.flip(image, horizontal=fn.external_source(name="flip", dtype=types.INT32, ndim=0))

        built = pipeline()
        built.build()
        return built
