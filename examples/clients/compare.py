"""Runs clients on both engines and prints a row of README.md's table for each.

python compare.py [CLIENT ...]
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Script, the distributions whose versions matter, ranks.
CLIENTS: dict[str, tuple[list[str], int]] = {
    "transformers_causal_lm": (["transformers"], 2),
    "transformers_trainer": (["transformers", "accelerate"], 2),
    "trl_sft": (["trl", "transformers"], 2),
    "peft_lora": (["peft", "transformers"], 2),
    "peft_qlora": (["peft", "bitsandbytes"], 2),
    "quantized_base": (["torch"], 2),
    "accelerate_fsdp2": (["accelerate", "transformers"], 2),
    "fabric_model_parallel": (["lightning", "transformers"], 2),
    "litgpt_pretrain": (["litgpt", "lightning"], 2),
    "trl_grpo": (["trl", "transformers"], 2),
    "torchtitan_llama3": (["torchtitan"], 2),
    "pipelining": (["torch"], 4),
}


def run(client: str, engine: str, ranks: int) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = os.environ | {"PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(HERE / f"{client}.py"), "--engine", engine], env=env, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"client"')]
    if not lines:
        sys.exit(f"{client} on {engine} failed:\n{done.stderr}")
    return json.loads(lines[-1])


def main() -> None:
    print("| Client | Versions | Steps | Loss differs by | Gradient norm by | Seconds, ours / torch's |")
    print("|---|---|---|---|---|---|")
    for client in sys.argv[1:] or CLIENTS:
        names, ranks = CLIENTS[client]
        ours, theirs = run(client, "composable", ranks), run(client, "torch", ranks)
        loss = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        norms = [abs(a - b) / b for a, b in zip(ours["norms"], theirs["norms"], strict=True)]
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
        norm = f"{max(norms):.1e}, relative" if norms else "-"
        seconds = f"{ours['seconds']} / {theirs['seconds']}"
        print(f"| `{client}` | {versions} | {len(ours['losses'])} | {loss:.1e} | {norm} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
