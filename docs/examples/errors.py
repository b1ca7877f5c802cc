from torch import nn

from composable import (
    ComposableError,
    ConfigError,
    DesyncError,
    StateDictError,
    UsageError,
    fully_shard,
    load_full_state_dict,
    no_sync,
)

try:
    fully_shard(nn.Linear(8, 8), policy="every layer")
except ConfigError as error:
    print(error.what, error.at, error.fix, sep="\n")
try:
    no_sync(nn.Linear(8, 8)).__enter__()
except UsageError as error:
    print(error)
try:
    load_full_state_dict(fully_shard(nn.Linear(8, 8)), {})
except StateDictError as error:
    print(error)
assert issubclass(DesyncError, ComposableError)
