"""What can be done about a thread that does not end: say where it is, and raise in it."""

import ctypes
import sys
import threading
import traceback

__all__ = ["end_thread", "stack_of"]


def stack_of(thread: threading.Thread) -> str:
    """Return what ``thread`` is executing, as a traceback prints it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"


def end_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise ``error`` in ``thread`` as soon as it executes Python again."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
