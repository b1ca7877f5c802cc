"""Where a root is, as ranks that wait are told; read from another thread, so nothing is noted for it."""

from composable.comm import AnnotationStatus, Started, Transport, Tree
from composable.engine import FlatBuffer, Scheduler

__all__ = ["ProgressReporter"]


class ProgressReporter:
    """Tells where the modules of a root are.

    Args:
        name: Of the root's class.
        scheduler: That runs its handles.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self._name = name
        self._scheduler = scheduler
        self._flats = [(handle, flat) for handle in scheduler.handles for flat in handle.buffers if not flat.is_empty]

    def close(self) -> None:
        """Let go of every handle; from now on nothing is told."""
        self._flats = []

    def tell(self, *, in_backward: bool) -> AnnotationStatus | None:
        """Return where they are; ``None`` where nothing is sharded."""
        address = _address(self._flats[0][1]) if self._flats else None
        if address is None or not address[0].groups:
            return None
        step = self._scheduler.step
        forwards, backwards, failure = step.forward_id, step.backward_id, step.failure
        is_backward = step.is_backward
        is_last = is_backward or backwards > step.backwards_before
        tree = Tree(
            self._name,
            forwards,
            backwards,
            is_inside=bool(step.running) or (is_last and in_backward),
            is_backward=is_last,
            failure=failure,
        )
        return AnnotationStatus(f"{address[0].groups[0].group_name} {address[1]}", tree, address[0], self._groups())

    def _groups(self) -> tuple[str, ...]:
        """Return the names of all process groups that the tree talks in."""
        transports = self._scheduler.step.finalizer.transports()
        for _, flat in self._flats:
            transports |= flat.routes.transports()
        return tuple(sorted({group.group_name for transport in transports for group in transport.groups}))

    def name_of(self, started: Started) -> str | None:
        """Return what it does for whom; ``None``: it is none of the root's."""
        for handle, flat in self._flats:
            what = flat.routes.name_of(started)
            if what is not None:
                return f"the {what} of {handle.described}"
        return None


def _address(flat: FlatBuffer) -> tuple[Transport, int]:
    path = flat.routes.gather_path
    return path.transport, path.key
