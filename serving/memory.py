"""Memory of the process: freed memory is kept between batches, and given back every few seconds."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_memory() -> None:
    """Keep freed memory until `trim_memory`, in one heap for all threads, tables of Arrow included.

    The tensors of a batch have some megabytes each. By default glibc returns them to the kernel and
    requests them again for each operation, and the page faults then take longer than the operation.
    Of a thread's own heap, `trim_memory` gives back all but the end, which may be 64 MB; so this is
    called before there are threads. Arrow's own heap gives nothing back.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that it accepts
        library.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
        library.mallopt(_M_ARENA_MAX, 1)
        import pyarrow  # which starts a thread

        pyarrow.set_memory_pool(pyarrow.system_memory_pool())


def trim_memory() -> None:
    """Give the free memory of glibc's heaps back to the kernel, page by page.

    Each burst of requests leaves free pages between live objects, and the next burst may find them
    too scattered to use. Without this, the memory of a process grows with every burst.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
