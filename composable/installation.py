"""Everything that importing this package changes in torch, in one function; docs/torch.md tells users."""

from composable.dtensor import register_ragged, teach_torch
from composable.optim import check_every_step
from composable.saving import teach_torch_to_load

__all__ = ["install"]


def install() -> None:
    """Teach torch the parameters of this library. Runs when the package is imported; again, it changes nothing.

    * ``RaggedDTensor`` joins the types that optimizers and ``clip_grad_norm_`` treat in lists. On torch 2.11 it also
      finds our rule for each operation on it.
    * ``distribute_tensor`` and ``DTensor.redistribute`` take the placement ``RaggedShard``.
    * ``set_model_state_dict``, ``set_optimizer_state_dict`` and their kin cut full values for our parameters,
      and refuse what does not fit before they change anything.
    * Before each step of every optimizer one look at its parameters: those that an annotation has replaced, or
      that have no values, are an error.

    What has none of our tensors in it goes to torch's own code unchanged.

    Raises:
        UsageError: This torch cannot run operations on our parameters.
    """
    register_ragged()
    teach_torch()
    teach_torch_to_load()
    check_every_step()
