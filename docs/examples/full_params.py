from torch import nn

from composable import BucketLayout, ParamBucket, fully_shard, iter_full_params, load_full_params

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
for fqn, value in iter_full_params(model):
    assert value.shape == model.get_parameter(fqn).shape

bucket: ParamBucket
for bucket in iter_full_params(model, bucket_bytes=1000):
    layout: BucketLayout = bucket.layout
    values = layout.views(bucket.buffer)
    load_full_params(model, values.items(), strict=False)
