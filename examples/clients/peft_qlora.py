"""QLoRA: PEFT's adapters on a Llama whose frozen weights bitsandbytes keeps in 4 bits (NF4), as transformers loads it.

torchrun --standalone --nproc-per-node 2 peft_qlora.py [--engine torch]
"""

import tempfile
from types import ModuleType

import torch
import torch.distributed as dist
from bitsandbytes.nn import Params4bit
from engine import Report, local_batch, parse_engine
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from transformers_causal_lm import VOCAB, llama

STEPS = 6


def train(engine: ModuleType, report: Report, folder: str, storage: torch.dtype) -> None:
    """Train with weights that are packed into elements of one dtype: bytes, or what a trainer shards beside floats."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    base = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(base, config)
    packed = [param.dtype for param in model.parameters() if isinstance(param, Params4bit)]
    assert packed == [storage] * 3 * 7, packed  # seven linear layers in each of three blocks
    options = {}
    if engine.__name__ == "composable":
        options["options"] = engine.HandleOptions(shard_as_bytes=[Params4bit])
    for layer in base.model.layers:
        engine.fully_shard(layer, **options)
    engine.fully_shard(model, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    model.train()
    for step in range(STEPS):
        tokens = local_batch(step, vocab=VOCAB)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.add(loss, norm)
    assert all(isinstance(param, DTensor) for param in model.parameters())


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("peft_qlora", engine)
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    llama()[0].save_pretrained(names[0])  # by the first rank alone
    dist.barrier()
    for storage in (torch.uint8, torch.float32):
        train(engine, report, names[0], storage)
    report.end()


if __name__ == "__main__":
    main()
