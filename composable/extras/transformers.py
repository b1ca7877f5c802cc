"""``AnnotatedTrainer``: transformers' ``Trainer`` for a model that is annotated, not wrapped.

Import it from here: transformers, and its Accelerate, are needed for this file alone. Their names that it overrides are
held by a test of the versions that docs/works_with.md names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from composable import full_state_dict, fully_shard, load_checkpoint, save_checkpoint
from composable.annotation import states_of
from composable.errors import ConfigError
from composable.ground.names import class_name

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"AnnotatedTrainer needs transformers ({error}): pip install transformers accelerate") from error


class AnnotatedTrainer(Trainer):  # type: ignore[misc]  # a base that mypy does not see
    """A ``Trainer`` that annotates its model just before it makes the optimizer; all ranks take part in its saves.

    Arguments, arguments of training, callbacks and folders are those of ``Trainer``: a folder has config, tokenizer and
    whole weights, as a hub wants them, and in ``optimizer`` a checkpoint from which any number of ranks resumes. For a
    trainer derived from ``Trainer``, as trl's are: ``class Mine(AnnotatedTrainer, SFTTrainer)``, with nothing in it.

    Args:
        args: What ``Trainer`` takes, and the same for ``kwargs``.
        annotate: Annotates the model in place: ``replicate``, or ``lambda model: fully_shard(model, policy={Block})``.
            ``None``: ``fully_shard``, with the classes that the model itself says are not to be split as its units. A
            model that has an annotation already is left as it is.

    Raises:
        ConfigError: The arguments of training ask for FSDP, DeepSpeed or saves on each node; ``optimizers`` has an
            optimizer for a model without annotation; or ``annotate`` is left out, and the model names no classes.
    """

    def __init__(self, *args: Any, annotate: Callable[[nn.Module], object] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError(
                "args ask for FSDP or DeepSpeed, beside the annotation", fix="leave them out, and annotate"
            )
        # Else the first rank of each other node would write folders without weights.
        if self.args.save_on_each_node:
            raise ConfigError("save_on_each_node: rank 0 alone has the weights", fix="leave it out, share output_dir")
        self._annotate = annotate or _shard_blocks
        if self.optimizer is not None:
            self._check_annotated("optimizers= has an optimizer of parameters that fully_shard would replace")

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that wraps no model, as ``__init__`` and each trial of a search do."""
        super().create_accelerator_and_postprocess()
        # Autocast and compilation stay.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Annotate the model, unless it is, and make its optimizer. Collective."""
        if not states_of(self.model.modules()):
            self._annotate(self.model)
            self._check_annotated("annotate has annotated nothing")
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights as ``Trainer`` does, on the rank that does so. Collective."""
        state_dict = full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Of this library: loading it runs no code of the files, on any number of ranks. It has the weights too.
        extra = self.lr_scheduler.state_dict()
        step = self.state.global_step
        save_checkpoint(f"{output_dir}/optimizer", step, self.model, self.optimizer.optimizer, extra=extra)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            loaded = load_checkpoint(f"{checkpoint}/optimizer", self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(loaded.extra)

    def _check_annotated(self, what: str) -> None:
        if not states_of(self.model.modules()):
            raise ConfigError(what, fix="annotate the model first, or pass annotate=, without optimizers=")


def _shard_blocks(model: nn.Module) -> None:
    names = set(getattr(model, "_no_split_modules", None) or ())
    if not (blocks := {type(module) for module in model.modules() if class_name(module) in names}):
        fix = "pass annotate=lambda model: fully_shard(model, policy={Block}), or annotate=replicate"
        raise ConfigError(f"{class_name(model)} does not say which of its modules are blocks", fix=fix)
    fully_shard(model, policy=blocks)
