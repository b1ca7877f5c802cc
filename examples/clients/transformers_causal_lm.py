"""Llama and GPT-2 of transformers: train, checkpoint activations, generate under sharding, save and reload.

torchrun --standalone --nproc-per-node 2 transformers_causal_lm.py [--engine torch]
"""

import tempfile

import torch
import torch.distributed as dist
from engine import Report, local_batch, parse_engine
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB, STEPS = 96, 6


def llama():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    return model, model.model.layers


def gpt2():
    # The output layer is tied to the embedding.
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    return model, model.transformer.h


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("transformers_causal_lm", engine)
    for make in (llama, gpt2):
        for is_checkpointed in (False, True):
            torch.manual_seed(0)
            model, layers = make()
            if is_checkpointed:
                model.gradient_checkpointing_enable()
            for layer in layers:
                engine.fully_shard(layer)
            engine.fully_shard(model)
            engine.register_fsdp_forward_method(model, "generate")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model.train()
            for step in range(STEPS):
                tokens = local_batch(step, vocab=VOCAB)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                report.add(loss, norm)
        model.eval()
        prompt = local_batch(STEPS, vocab=VOCAB, length=4)
        made = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            logits = model(made).logits
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder, state_dict=state)
                alone = AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                difference = (alone(made).logits - logits).abs().max().item()
            again = alone.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert difference < 1e-5 and torch.equal(again, made), (difference, again, made)
        dist.barrier()
    report.end()


if __name__ == "__main__":
    main()
