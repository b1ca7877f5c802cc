"""trl's ``GRPOTrainer``: completions that the sharded model generates itself, and a function that rewards them.

torchrun --standalone --nproc-per-node 2 trl_grpo.py [--engine torch]
"""

import tempfile
from types import ModuleType

import torch
from datasets import Dataset
from engine import Report, parse_engine
from transformers_causal_lm import llama
from transformers_trainer import ShardedTrainer
from trl import GRPOConfig, GRPOTrainer
from trl_sft import QUIET, tokenizer


class ShardedGRPOTrainer(ShardedTrainer, GRPOTrainer):
    """A ``GRPOTrainer`` for a model that ``fully_shard`` annotated before."""


def share_of_low_digits(completions: list[str], **_: object) -> list[float]:
    """Return what share of each completion's characters are digits below five."""
    return [sum(one in "01234" for one in text) / max(len(text), 1) for text in completions]


def train(engine: ModuleType, **options: object) -> list[float]:
    torch.manual_seed(0)
    model, layers = llama()
    for layer in layers:
        engine.fully_shard(layer)
    engine.fully_shard(model)
    engine.register_fsdp_forward_method(model, "generate")
    data = Dataset.from_list([{"prompt": f"{one} + {one * 7 % 10} ="} for one in range(32)])
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            # All ranks generate as many tokens: each one gathers the parameters.
            generation_kwargs={"min_new_tokens": 8},
            **{**QUIET, **options},
        )
        trainer = ShardedGRPOTrainer(
            model, args, reward_funcs=share_of_low_digits, train_dataset=data, processing_class=tokenizer()
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [*trainer.losses, *(entry["reward"] for entry in logged), *(entry["grad_norm"] for entry in logged)]


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("trl_grpo", engine)
    for options in ({}, {"num_iterations": 2, "gradient_checkpointing": False}):
        for value in train(engine, **options):
            report.add(torch.tensor(value))
    report.end()


if __name__ == "__main__":
    main()
