"""Trains with an ``AnnotatedTrainer``, or with a plain one in one process, and writes what came out.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainer_program FOLDER fully_shard
python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.trainer_program FOLDER fully_shard resume
python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainer_program FOLDER fully_shard bf16
python -m tests.trainer_program FOLDER plain
python -m tests.trainer_program FOLDER refused
"""

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

# A torchvision that was built for another torch ends the import of transformers, which does without it.
sys.modules["torchvision"] = None  # type: ignore[assignment]

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from composable import ConfigError, replicate  # noqa: E402
from composable.extras.transformers import AnnotatedTrainer  # noqa: E402

STEPS, SAMPLES_IN_A_STEP, ACCUMULATED = 4, 8, 2


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32, **sizes))


def run(folder: Path, annotation: str, resume: str | None = None, *, bf16: bool = False) -> Any:
    """Train, from a checkpoint if one is given; return the trainer, whose state has the losses."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=SAMPLES_IN_A_STEP // ACCUMULATED // ranks,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=bf16,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(32)}, unk_token="word0"))
    kinds = {"plain": Trainer, "replicate": partial(AnnotatedTrainer, annotate=replicate)}
    trainer = kinds.get(annotation, AnnotatedTrainer)(
        make_model(),
        args,
        train_dataset=data,
        eval_dataset=data[:SAMPLES_IN_A_STEP],
        data_collator=default_data_collator,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words),
    )
    if annotation != "plain" and resume is None:
        trainer.create_accelerator_and_postprocess()  # as each trial of a hyperparameter search does
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def check_refusals(folder: str) -> None:
    """Raise ``AssertionError`` if what cannot be right is not refused by name."""

    def refused(match: str, model: Any, args: Any, **kwargs: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            AnnotatedTrainer(model, args, **kwargs).create_optimizer()

    args = TrainingArguments(folder, use_cpu=True, report_to=[])
    model, other = make_model(), torch.nn.Linear(2, 2)
    refused("optimizers= has an optimizer", model, args, optimizers=(torch.optim.SGD(model.parameters()), None))
    refused("annotate has annotated nothing", model, args, annotate=lambda model: None)
    refused("Linear does not say which of its modules are blocks", other, args)
    on_each = TrainingArguments(folder, use_cpu=True, report_to=[], save_on_each_node=True)
    refused("save_on_each_node: rank 0 alone has the weights", model, on_each)


def train_and_write(folder: str, annotation: str, *how: str) -> None:
    name = "resumed" if "resume" in how else "final"
    checkpoint = f"{folder}/checkpoint-2" if "resume" in how else None
    trainer = run(Path(folder), annotation, checkpoint, bf16="bf16" in how)
    trainer.save_model(f"{folder}/{name}")
    if trainer.args.process_index == 0:
        Path(folder, f"{name}.json").write_text(json.dumps(losses_of(trainer)))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, annotation, *how = sys.argv[1:]
    if annotation == "refused":
        check_refusals(folder)
    else:
        train_and_write(folder, annotation, *how)


if __name__ == "__main__":
    main()
