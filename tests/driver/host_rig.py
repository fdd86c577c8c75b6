"""A host driver ready for use, and the few helpers that its tests share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nxrt_cuda import dtype as dt
from nxrt_cuda.driver.host import HostDriver, HostEntry, HostImage, HostLaunch
from nxrt_cuda.errors import DriverError

_CTYPES = {
    "ptr": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def axpy(launch: HostLaunch) -> None:
    """y += a * x"""
    n = launch.args["n"]
    x = launch.view(launch.args["x"], dt.float32, (n,))
    y = launch.view(launch.args["y"], dt.float32, (n,))
    y += np.float32(launch.args["a"]) * x


AXPY = HostImage("axpy.cu", "axpy", (("x", "ptr"), ("y", "ptr"), ("n", "i32"), ("a", "f32")))


def image(entry: str, *params: tuple[str, str], threads: int = 1024) -> HostImage:
    return HostImage(f"{entry}.cu", entry, params, (), threads)


def packed(image: HostImage, *values: float) -> tuple[tuple[list[Any], Any], int]:
    """Argument storage, which the caller keeps, and the address of the array of pointers to it."""
    storage = [_CTYPES[kind](value) for (_, kind), value in zip(image.params, values, strict=True)]
    pointers = (ctypes.c_uint64 * len(storage))(*map(ctypes.addressof, storage))
    return (storage, pointers), ctypes.addressof(pointers)


class Rig:
    """A driver with its context current on this thread, and one stream."""

    def __init__(self, entries: Mapping[str, HostEntry] | None = None, **options: object) -> None:
        self.driver = HostDriver({"axpy": axpy, **(entries or {})}, **options)
        self.context = self.driver.primary_ctx_retain(0)
        self.driver.ctx_push_current(self.context)
        self.stream = self.driver.stream_create()

    def upload(self, array: np.ndarray) -> int:
        """Device memory that holds ``array``."""
        ptr = self.driver.mem_alloc(array.nbytes)
        self.driver.memcpy_htod_async(ptr, array.ctypes.data, array.nbytes, self.stream)
        self.driver.stream_synchronize(self.stream)
        return ptr

    def download(self, ptr: int, dtype: object, count: int, stream: int | None = None) -> np.ndarray:
        """``count`` elements at ``ptr``, after all that is queued on the stream."""
        array = np.zeros(count, dtype)
        stream = self.stream if stream is None else stream
        self.driver.memcpy_dtoh_async(array.ctypes.data, ptr, array.nbytes, stream)
        self.driver.stream_synchronize(stream)
        return array

    def function(self, image: HostImage) -> int:
        return self.driver.module_get_function(self.driver.module_load(image.encode()), image.entry)

    def launch(
        self,
        function: int,
        image: HostImage,
        *values: float,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared_bytes: int = 0,
        stream: int | None = None,
        cooperative: bool = False,
    ) -> None:
        """Queue one launch; the argument storage is overwritten and dropped once the call returns."""
        (storage, _pointers), params = packed(image, *values)
        stream = self.stream if stream is None else stream
        self.driver.launch_kernel(function, grid, block, shared_bytes, stream, params, cooperative)
        for item in storage:
            ctypes.memset(ctypes.addressof(item), 0xEE, ctypes.sizeof(item))


@contextmanager
def refused(name: str, *texts: str) -> Iterator[None]:
    """The block raises the CUresult ``name``, and the message has every one of ``texts``."""
    with pytest.raises(DriverError) as caught:
        yield
    assert caught.value.name == name, str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def in_thread(body: Callable[[], object]) -> None:
    """Run ``body`` on a fresh thread; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
