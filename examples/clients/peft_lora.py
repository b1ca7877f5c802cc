"""PEFT: LoRA adapters on a frozen base, each decoder layer and the root fully sharded.

torchrun --standalone --nproc-per-node 2 peft_lora.py [--engine torch]
"""

import tempfile

import torch
import torch.distributed as dist
from engine import Report, local_batch, parse_engine
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaForCausalLM
from transformers_causal_lm import VOCAB, llama

STEPS = 6


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("peft_lora", engine)
    base, layers = llama()
    start = {name: value.clone() for name, value in base.state_dict().items()}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(base, config)
    for layer in layers:
        engine.fully_shard(layer)
    engine.fully_shard(model)
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
    assert all(param.grad is None for param in model.parameters())

    model.eval()
    prompt = local_batch(0, vocab=VOCAB)
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=state)
            plain = LlamaForCausalLM(base.config)
            plain.load_state_dict(start)
            alone = PeftModel.from_pretrained(plain, folder).eval()
        with torch.no_grad():
            difference = (alone(input_ids=prompt).logits - logits).abs().max().item()
        assert difference < 1e-5, difference
    report.end()


if __name__ == "__main__":
    main()
