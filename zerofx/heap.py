"""The memory of the C library's heap, which is where small tensors lie."""

from __future__ import annotations

import ctypes

_TRIM_BYTES = 2**24


class Heap:
    """Lets the system have what was freed: glibc keeps holes below 32 MiB, and the process grows by every parameter that it built."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._freed_bytes = 0

    def freed(self, nbytes: int) -> None:
        """Count freed bytes; give back the pages of holes now and then, because each time walks the heap."""
        self._freed_bytes += nbytes
        if self._freed_bytes >= _TRIM_BYTES and self._trim is not None:
            self._trim(0)
            self._freed_bytes = 0
