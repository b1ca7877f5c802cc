"""Memory of a rank that other ranks on its host map too.

A message lies in a *block* of the memory; an entry in a ring says which one. A block is free again once a flag of each
peer says that the peer is done with it. The memory has no name in any file system: peers open it through ``/proc``, and
the kernel frees it with the last process that has it.

Bytes are written before the count of entries, and read after it. That is enough on x86-64, which keeps the order of
stores; other processors need fences, which Python does not have.

Several threads may use a memory at once. No thread waits for other ranks while it holds a lock of a memory.
"""

import ctypes
import os
import secrets
import select
import struct
import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable
from threading import RLock, get_ident
from typing import Any

import torch

from composable.errors import ConfigError

__all__ = ["ENTRIES", "Block", "OwnMemory", "PeerMemory"]

_NAME = "composable"  # In lists of open files.
_PAGE, _LINE = 4096, 64
# The first page: the count of entries, the word that says that the rank has left, and the token. Then the ring.
_COUNT, _LEFT = 0, 16  # as 32-bit words, each on a cache line of its own
_TOKEN = slice(128, 160)  # as bytes
_ENTRY = struct.Struct("5q")  # tag, number, place and size of the block, bytes of the message
# More than a rank ever has in flight.
ENTRIES = 4096
# So many views of a block are kept for the next message of the same size.
_MOST_VIEWS = 8
_CONTROL_BYTES = _PAGE + ENTRIES * _LINE
_WRAP = 2**32

# How long a sleep takes at most.
_NAP_S = 0.1

_PUNCH_HOLE = 3  # and the size of the file stays
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64
if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    _LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _futex = _LIBC.syscall
    _futex.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, int(_NAP_S * 1e9))
_NAP_AT = ctypes.addressof(_NAP)


def _map(fd: int, offset: int, nbytes: int) -> tuple[int, Any]:
    """Map bytes of a file; returns their address, and a buffer with which the mapping goes."""
    address = _LIBC.mmap(None, nbytes, 3, 1, fd, offset)  # to read and to write, shared
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes of shared memory: {os.strerror(number)}")
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, _LIBC.munmap, address, nbytes).atexit = False
    return address, buffer


class Block:
    """A part of a rank's memory that holds one message at a time: a flag of each rank, then the bytes."""

    __slots__ = ("_data", "_views", "flags", "is_hole", "message", "nbytes", "offset", "taker")

    def __init__(self, fd: int, offset: int, nbytes: int, ranks: int) -> None:
        # Its place in the memory, and its size.
        self.offset, self.nbytes = offset, nbytes
        _, buffer = _map(fd, offset, nbytes)
        # The flag of rank ``r`` is word ``16 * r``: the last message of the block that it is done with.
        self.flags = memoryview(buffer).cast("B").cast("I")
        # If made in inference mode, it could never be written outside of it.
        with torch.inference_mode(mode=False):
            self._data = torch.frombuffer(buffer, dtype=torch.uint8, offset=ranks * _LINE)
        self._views: dict[Hashable, torch.Tensor] = {}
        self.message = 0  # The last message that the owner has put there.
        self.is_hole = False  # It has no memory at present.
        self.taker = 0  # The thread of the owner that is about to put a message there; 0: none is.

    def view(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of a message of ``dtype``."""
        key = dtype, start, stop
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                del self._views[next(iter(self._views))]  # Messages of many sizes must not fill the memory.
            with torch.inference_mode(mode=False):
                view = self._data[start * dtype.itemsize : stop * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view


class _Control:
    """The first bytes of a rank's memory: the count of its entries, and the entries."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self.count_at, self._buffer = _map(fd, 0, _CONTROL_BYTES)
        self.control = memoryview(self._buffer).cast("B")
        self.words = self.control.cast("I")

    def wake_peers(self) -> None:
        """Wake the peers that sleep until something comes."""
        _futex(_SYS_FUTEX, self.count_at, _FUTEX_WAKE, 2**31 - 1, None)


class OwnMemory(_Control):
    """The memory of this rank. Peers write only the words there in which they say what they have read."""

    def __init__(self, rank: int, ranks: int) -> None:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, _CONTROL_BYTES)
        except OSError:
            os.close(fd)
            raise
        super().__init__(fd)
        self.token = secrets.token_bytes(_TOKEN.stop - _TOKEN.start)
        self.control[_TOKEN] = self.token
        self.size = _CONTROL_BYTES
        self._ranks = ranks
        self._own_flag = 16 * rank
        self._flags = range(0, 16 * ranks, 16)
        self._blocks: defaultdict[int, list[Block]] = defaultdict(list)  # By size, the oldest message first.
        self._lock = RLock()  # Held while a thread takes a block, or publishes one.

    def take(self, nbytes: int) -> Block:
        """Return a block for a message of ``nbytes``, whose earlier message all ranks are done with."""
        nbytes += self._ranks * _LINE
        # In steps of an eighth at most, so that messages of about one size share blocks.
        step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
        size = -(-nbytes // step) * step
        # A thread that an exception stopped takes the same block again.
        takers = 0, get_ident()
        with self._lock:
            blocks = self._blocks[size]
            block = next((one for one in blocks if one.taker in takers and self._is_read(one)), None)
            try:
                if block is None or block.is_hole:
                    # Else the first write would end the process where there is no memory left.
                    os.posix_fallocate(self.fd, self.size if block is None else block.offset, size)
                if block is None:
                    block = Block(self.fd, self.size, size, self._ranks)
                    self.size += size
                else:
                    blocks.remove(block)
            except OSError as error:
                raise ConfigError(
                    f"{size} bytes of shared memory are needed beside {self.size}: {error.strerror}",
                    fix='raise the limit of memory or of file sizes, or choose transport="process_group"',
                ) from error
            block.taker, block.is_hole = takers[1], False
            blocks.append(block)
        return block

    def _is_read(self, block: Block) -> bool:
        """Say whether all ranks are done with the message in ``block``."""
        flags, message = block.flags, block.message
        return all(flags[one] == message for one in self._flags)

    def free_read(self) -> None:
        """Free the memory of blocks whose messages all ranks are done with. It is there again once a message needs it.

        Garbage collection may call this at any time: it does nothing while another thread takes a block.
        """
        if self._lock.acquire(blocking=False):
            try:
                for block in [one for blocks in self._blocks.values() for one in blocks if not one.is_hole]:
                    if not block.taker and self._is_read(block):
                        # A hole in the file, also where peers map it. It reads as zeros, and so do the flags there.
                        _LIBC.fallocate(self.fd, _PUNCH_HOLE, block.offset, block.nbytes)
                        block.message, block.is_hole = 0, True
            finally:
                self._lock.release()

    def publish(self, tag: int, number: int, block: Block, nbytes: int, *, is_kept: bool = False) -> None:
        """Let peers read the message in ``block``; ``is_kept``: this rank still needs the block, until ``let_go``."""
        with self._lock:
            message = (self.words[_COUNT] + 1) % _WRAP
            block.message = message
            if not is_kept:
                self.let_go(block)
            block.taker = 0  # Now it is free once all ranks are done with this message.
            _ENTRY.pack_into(
                self.control, _PAGE + message % ENTRIES * _LINE, tag, number, block.offset, block.nbytes, nbytes
            )
            self.words[_COUNT] = message
        # Always: whether a peer sleeps cannot be read without a fence, which is in this call.
        self.wake_peers()

    def let_go(self, block: Block) -> None:
        """Note that this rank needs a block of its own no longer."""
        block.flags[self._own_flag] = block.message

    def leave(self, process: int) -> None:
        """Tell peers that nothing more will come; nothing happens in a fork of ``process``, the owner."""
        if os.getpid() == process:
            self.words[_LEFT] = 1
            self.wake_peers()


class PeerMemory(_Control):
    """The memory of a peer.

    Attributes:
        inbox: The entries that this rank is not done with: place and size of the block, message, and its bytes, by tag
            and number.
    """

    def __init__(self, process: int, fd: int, token: bytes, rank: int, ranks: int) -> None:
        path, other = f"/proc/{process}/fd/{fd}", OSError(f"process {process} is another one here")
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise other  # Not to be opened, or read beyond its end.
        super().__init__(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if self.control[_TOKEN] != token:
            raise other
        self.inbox: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self._pidfd = os.pidfd_open(process)
        weakref.finalize(self, os.close, self._pidfd).atexit = False
        self._process, self._flag, self._ranks = process, 16 * rank, ranks
        self._read = 0
        self._lock = RLock()  # Held while a thread reads entries.
        self._blocks: dict[int, Block] = {}

    def read_entries(self) -> int:
        """Put new entries into ``inbox``; returns the count of entries that were read, for ``sleep``."""
        with self._lock:
            count: int = self.words[_COUNT]
            if (count - self._read) % _WRAP > ENTRIES:
                raise RuntimeError(f"more than {ENTRIES} messages of process {self._process} were not read in time")
            while self._read != count:
                message = (self._read + 1) % _WRAP
                entry = _ENTRY.unpack_from(self.control, _PAGE + message % ENTRIES * _LINE)
                self.inbox[entry[:2]] = (entry[2], entry[3], message, entry[4])
                self._read = message
        return count

    def sleep(self, count: int) -> None:
        """Wait, a short time, until there are more entries than ``count``."""
        _futex(_SYS_FUTEX, self.count_at, _FUTEX_WAIT, count, _NAP_AT)

    def has_left(self) -> str:
        """Return how the peer has ended; empty: it lives."""
        if self.words[_LEFT]:
            return "has closed its shared memory"
        ends = select.poll()  # Of this thread alone.
        ends.register(self._pidfd, select.POLLIN)
        return f"has closed its shared memory: process {self._process} has ended" if ends.poll(0) else ""

    def block_of(self, key: tuple[int, int], nbytes: int) -> Block:
        """Return the block of a message in ``inbox``."""
        offset, size, _, sent = self.inbox[key]
        if sent != nbytes:
            raise RuntimeError(f"a message has {sent} bytes, and {nbytes} are due")
        block = self._blocks.get(offset)
        if block is None:
            block = self._blocks[offset] = Block(self.fd, offset, size, self._ranks)
        return block

    def give_back(self, key: tuple[int, int]) -> None:
        """Note that this rank is done with a message, which it has read from its block."""
        offset, _, message, _ = self.inbox.pop(key)
        self.inbox.pop((~key[0], key[1]), None)  # The first half of an all-reduce was in the same block.
        self._blocks[offset].flags[self._flag] = message
