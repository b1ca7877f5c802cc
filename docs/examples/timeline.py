import torch
from torch import nn

from composable import Timeline, TimelineEvent, fully_shard, timeline

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), policy={nn.Linear})
with timeline(model) as times:
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
assert times.draw().startswith("<svg") and '"traceEvents"' in times.trace()
assert isinstance(times, Timeline)
events: list[TimelineEvent] = times.events
assert {event.row for event in events} == {"0", "1"}
