"""Steps parameters inside backward, bucket by bucket, as their averages come."""

from collections.abc import Sequence

from torch import nn

from composable.engine import Stepper
from composable.replication.bucket import Bucket, ReducedParam, grad_dtype_of
from composable.replication.round import Round
from composable.replication.sender import Sender

__all__ = ["step_complete", "step_rest", "step_sent"]


def step_sent(
    steppers: Sequence[Stepper],
    params: Sequence[ReducedParam],
    buckets: Sequence[Bucket],
    own_round: Round,
    sender: Sender,
) -> None:
    """Step the buckets before the one that was sent last, and free them, as far as their averages come in time.

    Another rank may have other gradients first, and wait for this one elsewhere in its backward, say for a module
    that is sharded: so no wait here may be without end, and the end of backward steps the rest.
    """
    while own_round.stepped < own_round.sent - 1:
        bucket = buckets[own_round.stepped]
        if bucket.has_split and not bucket.flat.is_cuda:
            return  # Such a step may be collective, and how many buckets come in time differs between ranks.
        if not sender.finish_first():
            return
        if bucket.casts:
            bucket.unpack()
        own_round.stepped += 1
        _step_bucket(steppers, params, bucket)
        if not bucket.is_last():
            bucket.release()


def step_rest(
    steppers: Sequence[Stepper],
    params: Sequence[ReducedParam],
    buckets: Sequence[Bucket],
    own_round: Round,
    used: Sequence[float] | None,
) -> None:
    """Step the others, by averages that are there, and free all buckets.

    Args:
        steppers: What steps.
        params: Of all buckets.
        buckets: All of them.
        own_round: Knows which buckets were stepped.
        used: Of each parameter, how many ranks had a gradient; ``None``: all had one.
    """
    for bucket in buckets[own_round.stepped :]:
        if bucket.casts:
            bucket.unpack()
        for index, view in zip(bucket.param_indices, bucket.views, strict=True):
            param = params[index].param
            if used is not None and used[index] == 0:
                continue
            if grad_dtype_of(param) is view.dtype:
                param.grad = view
            elif param.grad is None:
                param.grad = view.to(grad_dtype_of(param))
        # What is cut short goes on here: the other ranks step all buckets.
        own_round.stepped += 1
        _step_bucket(steppers, params, bucket)
        bucket.release()


def step_complete(steppers: Sequence[Stepper], params: Sequence[nn.Parameter]) -> None:
    """Step those of ``params`` that have a gradient."""
    complete = [param for param in params if param.grad is not None] if steppers else []
    for step in steppers:
        step(complete)


def _step_bucket(steppers: Sequence[Stepper], params: Sequence[ReducedParam], bucket: Bucket) -> None:
    step_complete(steppers, [params[index].param for index in bucket.param_indices])
