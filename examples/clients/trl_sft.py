"""trl's ``SFTTrainer``: prompts and completions, packing, gradient checkpointing, on a model that is fully sharded.

torchrun --standalone --nproc-per-node 2 trl_sft.py [--engine torch]
"""

import tempfile
from types import ModuleType

import torch
from datasets import Dataset
from engine import Report, parse_engine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers_causal_lm import llama
from transformers_trainer import ShardedTrainer
from trl import SFTConfig, SFTTrainer

STEPS = 6
# What every trainer of this kind is told here: how long to train and what to leave out.
QUIET = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class ShardedSFTTrainer(ShardedTrainer, SFTTrainer):
    """An ``SFTTrainer`` for a model that ``fully_shard`` annotated before."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one token for each digit and letter, and for the ends."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *"0123456789", *"abcdefghijklmnopqrstuvwxyz", "+", "=", " "]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def train(engine: ModuleType, **options: object) -> list[float]:
    torch.manual_seed(0)
    model, layers = llama()
    for layer in layers:
        engine.fully_shard(layer)
    engine.fully_shard(model)
    sums = [(one, one * 7 % 10) for one in range(32)]
    data = Dataset.from_list([{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in sums])
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(output_dir=folder, per_device_train_batch_size=2, max_length=32, **QUIET, **options)
        trainer = ShardedSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())
        trainer.train()
    return trainer.losses


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("trl_sft", engine)
    for options in (
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"packing": True, "packing_strategy": "wrapped", "completion_only_loss": False},
    ):
        for loss in train(engine, **options):
            report.add(torch.tensor(loss))
    report.end()


if __name__ == "__main__":
    main()
