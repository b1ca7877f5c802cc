"""A handle's place in the running step of one root.

The clock counts starts and ends of forwards of fully sharded modules; backwards have numbers.
"""

from torch import nn

from composable.runtime.account import Account
from composable.storage import Handle

__all__ = ["Turn"]


class Turn:
    """Where one handle is.

    Attributes:
        handle: The handle.
        accounts: Of its flat buffers.
        first_forward: Clock of its first differentiable forward since the last backward; 0: before all others;
            ``None``: there was none, so the next backward does not reduce it.
        entered_at: Clock of the start of a forward that has not ended.
        queued_in: The last backward that has or had to complete it.
        met_in: The last backward in which a gradient of an output arrived.
        completed_in: The last backward that completed it: reduced its gradients, or kept them.
        kept_in: The last forward that left secondary shards.
        is_late: Gradients are still coming in the backward that completed it.
        modules_left: Of several modules that share the handle, those still to run in this forward.
        next_forward: Who followed in the latest forward, a hint for prefetch; so are the other two.
        previous_forward: Who went before in the latest forward.
        next_backward: Who followed in the latest backward.
        is_waiting: Users were told that its gradients wait for a later backward, or an all-reduce over copies.
        leaders: With whose modules it is gathered, resharded and reduced, whether its own run or not.
        followers: Those that it does so with.
    """

    __slots__ = (
        "accounts",
        "completed_in",
        "entered_at",
        "first_forward",
        "followers",
        "handle",
        "is_late",
        "is_waiting",
        "kept_in",
        "leaders",
        "met_in",
        "modules_left",
        "next_backward",
        "next_forward",
        "previous_forward",
        "queued_in",
    )

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.accounts = [
            Account(flat, fills_with_zeros=handle.plan.unused_gradients == "zero") for flat in handle.buffers
        ]
        self.modules_left: set[nn.Module] = set()
        self.is_waiting = False
        self.leaders: tuple[Turn, ...] = ()
        self.followers: tuple[Turn, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Begin anew: another root has run the handle meanwhile."""
        self.completed_in: int | None = None
        self.kept_in: int | None = None
        self.met_in: int | None = None
        self.queued_in: int | None = None
        self.forget_order()
        self.end_step()

    def forget_order(self) -> None:
        """Forget the hints for prefetch."""
        self.next_forward: Turn | None = None
        self.previous_forward: Turn | None = None
        self.next_backward: Turn | None = None

    def end_step(self) -> None:
        """Forget a step that was cut short; the hints stay."""
        self.first_forward: int | None = None
        self.entered_at: int | None = None
        self.is_late = False
        self.modules_left.clear()
        for account in self.accounts:
            account.clear()
