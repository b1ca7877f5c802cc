import torch
from torch import nn

from composable import CustomPolicy, ModuleWrapPolicy, SizePolicy, plan

with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Tanh())
by_class = plan(model, policy=ModuleWrapPolicy({nn.Linear}), world_size=2)
by_function = plan(model, policy=CustomPolicy(lambda module: module is model[1]), world_size=2)
by_size = plan(model, policy=SizePolicy(1000), world_size=2)
assert [len(one.handles) for one in (by_class, by_function, by_size)] == [2, 2, 2]
