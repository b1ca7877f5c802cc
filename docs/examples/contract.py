from torch import nn

from composable import contract, get_registry


@contract()
def freeze(module: nn.Module, *, reason: str) -> nn.Module:
    freeze.state(module).reason = reason
    return module.requires_grad_(False)


layer = freeze(nn.Linear(4, 4), reason="the first layers are trained already")
assert list(get_registry(layer)) == ["freeze"]
assert freeze.state(layer).reason.startswith("the first layers")
