"""torchtitan's ``apply_fsdp`` on its Llama 3, with the import of ``fully_shard`` in its module changed.

torchrun --standalone --nproc-per-node 2 torchtitan_llama3.py [--engine torch]
"""

import torch
import torch.distributed as dist
from engine import Report, local_batch, parse_engine, redirected
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

VOCAB, STEPS = 96, 6


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("torchtitan_llama3", engine)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for policy in ("default", "always", "never"):
        torch.manual_seed(0)
        args = TransformerModelArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, max_seq_len=64)
        with torch.no_grad():
            plain = Transformer(args)
            plain.init_weights()
        with torch.device("meta"):
            model = Transformer(args)
        with redirected(engine, parallelize):
            parallelize.apply_fsdp(
                model,
                mesh,
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
                pp_enabled=False,
                reshard_after_forward_policy=policy,
            )
        for module in model.modules():
            if isinstance(module, engine.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing before it sums
        # As torchtitan's trainer does; then values that do not depend on how a random draw is sharded.
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            tokens = local_batch(step, vocab=VOCAB)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="mean")
            (loss / dist.get_world_size()).backward()  # apply_fsdp lets gradients be summed
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report.add(loss, norm)
    report.end()


if __name__ == "__main__":
    main()
