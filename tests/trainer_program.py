"""Trains with the ``Trainer`` of docs/works_with.md, or with a plain one in one process, and writes what came out.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainer_program FOLDER fully_shard
python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.trainer_program FOLDER fully_shard resume
python -m tests.trainer_program FOLDER plain
"""

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

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
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

from composable import replicate  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"
STEPS, SAMPLES_IN_A_STEP, ACCUMULATED = 4, 8, 2


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32, **sizes))


def trainer_of(annotation: str) -> Any:
    """Return the class on the page, with the annotation of the line or of its comment."""
    if annotation == "plain":
        return Trainer
    page = PAGE.read_text().partition("### Transformers' `Trainer`\n")[2]
    source = re.search(r"```text\n(.*?)```", page, flags=re.DOTALL)
    assert source is not None
    text = source[1]
    if annotation == "replicate":
        line = "fully_shard(self.model, policy={Block})  # or replicate(self.model)"
        assert line in text
        text = text.replace(line, "replicate(self.model)")
    names: dict[str, Any] = {"Block": LlamaDecoderLayer, "replicate": replicate}
    exec(text, names)
    return names["AnnotatedTrainer"]


def run(folder: Path, annotation: str, resume: str | None = None) -> Any:
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
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(32)}, unk_token="word0"))
    trainer = trainer_of(annotation)(
        make_model(),
        args,
        train_dataset=data,
        data_collator=default_data_collator,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, annotation, *resume = sys.argv[1:]
    name = "resumed" if resume else "final"
    trainer = run(Path(folder), annotation, f"{folder}/checkpoint-2" if resume else None)
    trainer.save_model(f"{folder}/{name}")
    if trainer.args.process_index == 0:
        Path(folder, f"{name}.json").write_text(json.dumps(losses_of(trainer)))


if __name__ == "__main__":
    main()
