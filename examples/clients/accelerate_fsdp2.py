"""Accelerate's FSDP2 plugin: ``accelerator.prepare`` shards the model, here with the import of this library.

torchrun --standalone --nproc-per-node 2 accelerate_fsdp2.py [--engine torch]
"""

import os

os.environ["FSDP_VERSION"] = "2"  # read when Accelerate starts

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from engine import Report, local_batch, parse_engine, redirected
from transformers_causal_lm import VOCAB, llama

STEPS = 6


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("accelerate_fsdp2", engine)
    for is_loaded_on_first in (False, True):
        for is_checkpointed in (False, True):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=is_loaded_on_first,
                activation_checkpointing=is_checkpointed,
                reshard_after_forward=True,
            )
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
            # Accelerate does this itself on any device but the CPU.
            accelerator.state.fsdp_plugin = plugin
            accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            torch.manual_seed(0 if dist.get_rank() == 0 or not is_loaded_on_first else 1)
            model, _ = llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with redirected(engine):
                model, optimizer = accelerator.prepare(model, optimizer)
            assert isinstance(model, engine.FSDPModule)
            for step in range(STEPS):
                with redirected(engine), accelerator.accumulate(model):
                    tokens = local_batch(step, vocab=VOCAB)
                    loss = model(input_ids=tokens, labels=tokens).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                report.add(loss, norm if accelerator.sync_gradients else None)
            state = accelerator.get_state_dict(model)
            with torch.no_grad():
                sharded = model(input_ids=tokens).logits
            if accelerator.is_main_process:
                alone, _ = llama()
                # Accelerate's checkpointing wraps layers, and their names.
                alone.load_state_dict({name.replace("_checkpoint_wrapped_module.", ""): state[name] for name in state})
                with torch.no_grad():
                    difference = (alone(input_ids=tokens).logits - sharded).abs().max().item()
                assert difference < 1e-5, difference
            accelerator.free_memory()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    report.end()


if __name__ == "__main__":
    main()
