from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import DataParallelMeshDims, fully_shard

mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shards", "tensor_parallel"))
model = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shards"))
assert model.weight.to_local().shape == (4, 8)
