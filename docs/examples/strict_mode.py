from torch import nn

from composable import UsageError, fallback_counts, fully_shard, strict_mode

model = fully_shard(nn.Linear(8, 8))
fallback_counts(reset=True)
model.weight.detach().cumsum(0)  # gathers the whole weight
print(fallback_counts())
with strict_mode():
    try:
        model.weight.detach().cumsum(0)
    except UsageError as error:
        print(error)
