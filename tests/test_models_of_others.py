"""Models of timm and transformers train under both annotations as in one process.

All of them: ``examples/clients/model_sweep.py``, whose table is in examples/clients/models.md.
"""

import importlib.util

import pytest

from tests.test_clients import client

sweep = client("model_sweep")
# The fastest of those that are most unlike each other.
NAMES = [
    "convnext_atto",
    "efficientnet_b0",  # swish, squeeze and excite, batch norm
    "resnet18",
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
    "AlbertForMaskedLM",  # one block, run twice
    "BertForMaskedLM",
    "GPT2LMHeadModel",  # tied
    "LlamaForCausalLM",
    "MambaForCausalLM",
    "MixtralForCausalLM",  # experts
    "T5ForConditionalGeneration",  # encoder and decoder, tied three times
    "WhisperForConditionalGeneration",  # sound in, text out
]


def skip_without(name: str) -> None:
    library = sweep.CASES[name].library
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_as_in_one_process(name: str) -> None:
    skip_without(name)
    verdicts = {annotation: sweep.judge(name, annotation) for annotation in ("fully_shard", "replicate")}
    assert {verdict.outcome for verdict in verdicts.values()} == {"equal"}, verdicts
    assert verdicts["fully_shard"].handles > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "BertForMaskedLM"])
def test_ranks_that_do_not_meet_are_found_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(name)
    monkeypatch.setitem(sweep.ANNOTATIONS, "nothing", lambda model: model)
    assert sweep.judge(name, "nothing").outcome == "wrong"
