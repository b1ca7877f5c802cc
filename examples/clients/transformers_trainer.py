"""transformers' ``Trainer``: its loop, accumulation, clipping, evaluation and saving, on a model that is fully sharded.

torchrun --standalone --nproc-per-node 2 transformers_trainer.py [--engine torch]
"""

import tempfile
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from engine import Report, parse_engine
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers_causal_lm import VOCAB, llama

STEPS = 6


class ShardedTrainer(Trainer):
    """A ``Trainer`` for a model that ``fully_shard`` annotated before.

    Two things differ from the base class: nothing wraps the model, and every rank takes part in a save.
    """

    def __init__(self, model, args, **kwargs):
        # What Accelerate asks before it wraps a model for the ranks that it sees.
        model._is_accelerate_prepared = True
        self.losses = []
        super().__init__(model, args=args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())  # for the comparison: what is logged is rounded
        return loss

    def save_model(self, output_dir=None, _internal_call=False):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)


def train(engine: ModuleType, folder: str, accumulated: int) -> list[float]:
    torch.manual_seed(0)
    model, layers = llama()
    for layer in layers:
        engine.fully_shard(layer)
    engine.fully_shard(model)
    rows = torch.randint(VOCAB, (16, 16), generator=torch.Generator().manual_seed(0))  # the same on all ranks
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=STEPS,
        save_only_model=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ShardedTrainer(model, args, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    dist.barrier()
    alone = LlamaForCausalLM.from_pretrained(Path(folder) / f"checkpoint-{STEPS}").eval()
    tokens = rows[:4]
    with torch.no_grad():
        reloaded = alone(input_ids=tokens, labels=tokens).loss.item()
    assert abs(reloaded - evaluated) < 1e-5, (reloaded, evaluated)
    dist.barrier()
    return [*trainer.losses, evaluated]


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("transformers_trainer", engine)
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    for accumulated in (1, 2):
        for loss in train(engine, f"{names[0]}/{accumulated}", accumulated):
            report.add(torch.tensor(loss))
    report.end()


if __name__ == "__main__":
    main()
