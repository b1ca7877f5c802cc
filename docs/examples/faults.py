import torch
import torch.distributed as dist

from composable.testing import Delay, Drop, Fault, Raise, simulate


def add_ranks(rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


assert simulate(2, add_ranks, faults=[Fault(1, "all_reduce", Delay(turns=3))]) == [1.0, 1.0]
for action in (Drop(), Raise(OSError("cable pulled"))):
    try:
        simulate(2, add_ranks, faults=[Fault(1, "all_reduce", action)])
    except (OSError, RuntimeError) as error:  # a lost message is a DesyncError
        print(type(error).__name__)
