"""Trains tiny models of timm and transformers on two ranks, and holds each against one process on both batches.

    python model_sweep.py [--only NAME ...] [--write]

Each model is annotated as a whole: ``fully_shard`` with a policy of its block classes, then ``replicate``. Two steps of
SGD; losses, the gradients of the last step and the parameters must be those of one process. Ranks are threads
(``composable.testing.simulate``), so there is nothing to launch. Nothing is downloaded: weights are random.

Models are in eval mode: no dropout, and batch norm takes the statistics it has, not those of a batch, since those of
half a batch are others than those of all of it.

``--only timm`` or ``--only transformers`` runs one library; ``--write`` puts the table into models.md.
"""

import argparse
import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import ComposableError, ModuleWrapPolicy, fully_shard, replicate
from composable.testing import simulate

__all__ = ["CASES", "Case", "Verdict", "block_classes", "judge"]

PAGE = Path(__file__).parent / "models.md"
RANKS, SAMPLES, STEPS, LR = 2, 2, 2, 0.01
Batch = dict[str, Any]


# -- what is trained


@dataclass(frozen=True)
class Case:
    """One model: how to build it, and what it takes.

    Attributes:
        library: The distribution that has it.
        build: Makes it, with random weights.
        batch: Called with the model and a generator, returns the keyword arguments of one forward.
    """

    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, torch.Generator], Batch]


def import_library(name: str) -> Any:
    """Import timm or transformers, also where torchvision is installed without operators for this build of torch."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except (RuntimeError, OSError):
            for operator in ("nms", "qnms"):  # no model here calls them, but the import asks for their names
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
    return importlib.import_module(name)


def _timm(name: str, size: int, options: Mapping[str, Any]) -> Case:
    def build() -> nn.Module:
        # Batch norm over few pixels multiplies the rounding of float32 by large factors.
        return import_library("timm").create_model(name, pretrained=False, num_classes=10, **options).double()

    def batch(model: nn.Module, generator: torch.Generator) -> Batch:
        return {"x": torch.randn(SAMPLES, 3, size, size, generator=generator, dtype=torch.float64)}

    return Case("timm", build, batch)


# Name, side of the images in pixels, options of ``create_model`` that make it small or let it take small images.
_SIZED = {"img_size": 32}
_WINDOWS = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2), "num_heads": (2, 2, 2)}
# fmt: off
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {**_SIZED, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "botnet26t_256": (64, {"img_size": 64}),
    "cait_xxs24_224": (32, {**_SIZED, "depth": 2}),
    "coat_lite_tiny": (32, _SIZED),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "convit_tiny": (32, {**_SIZED, "depth": 3}),
    "convnext_atto": (32, {}),
    "convnextv2_atto": (32, {}),
    "crossvit_tiny_240": (240, {}),
    "cspresnet50": (64, {}),
    "darknet17": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1), "embed_dims": (12, 24, 48, 96), "num_heads": (3, 3, 3, 3)}),
    "deit_tiny_distilled_patch16_224": (32, {**_SIZED, "depth": 2}),
    "densenet121": (32, {"block_config": (2, 2, 2, 2)}),
    "dla46_c": (64, {}),
    "edgenext_xx_small": (64, {}),
    "efficientnet_b0": (32, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (224, {}),
    "ese_vovnet19b_slim": (32, {}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "fastvit_t8": (64, {}),
    "ghostnet_050": (32, {}),
    "gmlp_ti16_224": (32, _SIZED),
    "hgnetv2_b0": (32, {}),
    "hiera_tiny_224": (224, {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 2, 1)}),
    "hrnet_w18_small": (64, {}),
    "inception_next_atto": (64, {}),
    "lcnet_035": (32, {}),
    "levit_128s": (224, {}),
    "mambaout_femto": (64, {}),
    "maxvit_pico_rw_256": (64, {"img_size": 64}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "mnasnet_small": (32, {}),
    "mobilenetv3_small_050": (32, {}),
    "mobilenetv4_conv_small_050": (32, {}),
    "mobileone_s0": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "nf_regnet_b0": (64, {}),
    "pit_ti_224": (64, {"img_size": 64}),
    "poolformer_s12": (64, {}),
    "pvt_v2_b0": (64, {}),
    "regnetx_002": (32, {}),
    "regnety_002": (32, {}),
    "repghostnet_050": (32, {}),
    "repvgg_a0": (32, {}),
    "repvit_m0_9": (64, {}),
    "res2net50_14w_8s": (32, {}),
    "resmlp_12_224": (32, _SIZED),
    "resnest14d": (32, {}),
    "resnet18": (32, {}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (32, 64, 96, 128)}),
    "rexnetr_100": (32, {}),
    "selecsls42": (64, {}),
    "sequencer2d_s": (64, {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48)}),
    "shvit_s1": (64, {}),
    "skresnet18": (32, {}),
    "starnet_s050": (32, {}),
    "swiftformer_xs": (64, {}),
    "swin_tiny_patch4_window7_224": (64, _WINDOWS),
    "swinv2_tiny_window8_256": (64, _WINDOWS),
    "test_vit": (160, {}),
    "tnt_s_legacy_patch16_224": (32, {**_SIZED, "depth": 2}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 128)}),
    "vit_relpos_small_patch16_224": (32, {**_SIZED, "depth": 2}),
    "vit_tiny_patch16_224": (32, {**_SIZED, "depth": 3}),
    "xception41": (64, {}),
    "xcit_nano_12_p16_224": (32, {**_SIZED, "depth": 2}),
}
# fmt: on


def _transformers(name: str, inputs: str, options: Mapping[str, Any]) -> Case:
    def build() -> nn.Module:
        kind = getattr(import_library("transformers"), name)
        config = {name: value for name, value in {**_SMALL, **options}.items() if value is not ...}
        return kind(kind.config_class(**config))

    def batch(model: nn.Module, generator: torch.Generator) -> Batch:
        return {what: _INPUTS[what](model.config, generator) for what in inputs.split()}

    return Case("transformers", build, batch)


def _tokens(config: Any, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, 60, (SAMPLES, 12), generator=generator)


def _floats(*shape: int) -> Callable[[Any, torch.Generator], torch.Tensor]:
    return lambda config, generator: torch.randn(SAMPLES, *shape, generator=generator)


# Keyword arguments of forward.
_INPUTS: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _floats(3, 32, 32),
    "input_values": _floats(800),
    "input_features": _floats(8, 32),
    "past_values": _floats(16, 2),
}
# Names of a configuration; each takes those that it knows.
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 8}
_MOE = {**_GQA, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_TWO = {**_SMALL, "projection_dim": 16}
_CLIP = {"text_config": _TWO, "vision_config": _TWO, "projection_dim": 16}
_WAVE = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_SWIN = {
    "num_hidden_layers": ...,
    "num_attention_heads": ...,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 2),
    "window_size": 2,
    "patch_size": 4,
}
_TEXT, _PAIR, _IMAGE, _SOUND = "input_ids", "input_ids decoder_input_ids", "pixel_values", "input_values"
_BOTH = "input_ids pixel_values"
# Class, arguments of forward, what its configuration needs beside ``_SMALL``; an ellipsis: not the entry there.
# fmt: off
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AlbertForMaskedLM": (_TEXT, {"embedding_size": 16}),
    "BambaForCausalLM": (_TEXT, {**_GQA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 8, "attn_layer_indices": [1]}),
    "BartForConditionalGeneration": (_PAIR, _BART),
    "BeitForImageClassification": (_IMAGE, {}),
    "BertForMaskedLM": (_TEXT, {}),
    "BigBirdForMaskedLM": (_TEXT, {"attention_type": "original_full"}),
    "BloomForCausalLM": (_TEXT, {"n_layer": 2, "n_head": 4}),
    "CLIPModel": (_BOTH, _CLIP),
    "CanineModel": (_TEXT, {"num_hash_buckets": 64, "local_transformer_stride": 4, "downsampling_rate": 2}),
    "CodeGenForCausalLM": (_TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64,
        "n_ctx": 64}),
    "CohereForCausalLM": (_TEXT, _GQA),
    "ConvBertForMaskedLM": (_TEXT, {"embedding_size": 32}),
    "ConvNextForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1],
        "patch_size": 2, "num_hidden_layers": ...}),
    "ConvNextV2ForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1],
        "patch_size": 2, "num_hidden_layers": ...}),
    "DebertaV2ForMaskedLM": (_TEXT, {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c",
        "c2p"]}),
    "DeepseekV3ForCausalLM": (_TEXT, {**_MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8}),
    "DeiTForImageClassification": (_IMAGE, {}),
    "Dinov2ForImageClassification": (_IMAGE, {}),
    "DistilBertForMaskedLM": (_TEXT, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "ElectraForMaskedLM": (_TEXT, {"embedding_size": 16}),
    "FNetForMaskedLM": (_TEXT, {}),
    "FalconForCausalLM": (_TEXT, {}),
    "FalconMambaForCausalLM": (_TEXT, {"state_size": 4}),
    "FunnelForMaskedLM": (_TEXT, {"num_hidden_layers": ..., "num_attention_heads": ..., "hidden_size": ...,
        "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}),
    "GPT2LMHeadModel": (_TEXT, {}),
    "GPTBigCodeForCausalLM": (_TEXT, {}),
    "GPTJForCausalLM": (_TEXT, {"rotary_dim": 4}),
    "GPTNeoForCausalLM": (_TEXT, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "GPTNeoXForCausalLM": (_TEXT, {}),
    "Gemma2ForCausalLM": (_TEXT, {**_GQA, "sliding_window": 4}),
    "Gemma3ForCausalLM": (_TEXT, {**_GQA, "sliding_window": 4}),
    "GptOssForCausalLM": (_TEXT, {**_MOE, "sliding_window": 4}),
    "GraniteForCausalLM": (_TEXT, _GQA),
    "GraniteMoeForCausalLM": (_TEXT, _MOE),
    "HubertModel": (_SOUND, _WAVE),
    "JambaForCausalLM": (_TEXT, {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "LEDForConditionalGeneration": (_PAIR, {**_BART, "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}),
    "Lfm2ForCausalLM": (_TEXT, {**_GQA, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Llama4ForCausalLM": (_TEXT, {**_MOE, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8}),
    "LlamaForCausalLM": (_TEXT, _GQA),
    "LongformerForMaskedLM": (_TEXT, {"attention_window": 4}),
    "MBartForConditionalGeneration": (_PAIR, _BART),
    "MPNetForMaskedLM": (_TEXT, {}),
    "Mamba2ForCausalLM": (_TEXT, {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 4}),
    "MambaForCausalLM": (_TEXT, {"state_size": 4}),
    "MistralForCausalLM": (_TEXT, {**_GQA, "sliding_window": 4}),
    "MixtralForCausalLM": (_TEXT, _MOE),
    "MobileBertForMaskedLM": (_TEXT, {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
        "num_feedforward_networks": 2}),
    "MobileViTForImageClassification": (_IMAGE, {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24,
        32, 32], "patch_size": 2}),
    "ModernBertForMaskedLM": (_TEXT, {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1,
        "sep_token_id": 2}),
    "MptForCausalLM": (_TEXT, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "NemotronForCausalLM": (_TEXT, _GQA),
    "OPTForCausalLM": (_TEXT, {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Olmo2ForCausalLM": (_TEXT, _GQA),
    "OlmoeForCausalLM": (_TEXT, _MOE),
    "PatchTSTForPrediction": ("past_values", {"d_model": 32, "num_input_channels": 2, "context_length": 16,
        "patch_length": 4, "patch_stride": 4, "prediction_length": 4, "num_attention_heads": 4, "ffn_dim": 64}),
    "PegasusForConditionalGeneration": (_PAIR, _BART),
    "PersimmonForCausalLM": (_TEXT, {}),
    "Phi3ForCausalLM": (_TEXT, _GQA),
    "PhiForCausalLM": (_TEXT, {}),
    "PoolFormerForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "PvtForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4], "patch_sizes": [4, 2, 2, 2], "sequence_reduction_ratios": [2, 1, 1, 1]}),
    "Qwen2ForCausalLM": (_TEXT, _GQA),
    "Qwen2MoeForCausalLM": (_TEXT, {**_MOE, "shared_expert_intermediate_size": 32}),
    "Qwen3ForCausalLM": (_TEXT, _GQA),
    "Qwen3MoeForCausalLM": (_TEXT, _MOE),
    "RecurrentGemmaForCausalLM": (_TEXT, {**_GQA, "lru_width": 32, "attention_window_size": 4, "num_hidden_layers": 3}),
    "ResNetForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1],
        "embedding_size": 8}),
    "RoFormerForMaskedLM": (_TEXT, {"embedding_size": 32}),
    "RobertaForMaskedLM": (_TEXT, {}),
    "RwkvForCausalLM": (_TEXT, {"attention_hidden_size": 32}),
    "SEWForCTC": (_SOUND, {**_WAVE, "squeeze_factor": 2}),
    "SegformerForImageClassification": (_IMAGE, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4], "patch_sizes": [7, 3, 3, 3]}),
    "SiglipModel": (_BOTH, _CLIP),
    "SqueezeBertForMaskedLM": (_TEXT, {"embedding_size": 32}),
    "StableLmForCausalLM": (_TEXT, _GQA),
    "Starcoder2ForCausalLM": (_TEXT, _GQA),
    "Swin2SRModel": (_IMAGE, {**_SWIN, "image_size": 16, "patch_size": 1}),
    "SwinForImageClassification": (_IMAGE, _SWIN),
    "Swinv2ForImageClassification": (_IMAGE, _SWIN),
    "SwitchTransformersForConditionalGeneration": (_PAIR, {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}),
    "T5ForConditionalGeneration": (_PAIR, _T5),
    "ViTForImageClassification": (_IMAGE, {}),
    "ViTMSNForImageClassification": (_IMAGE, {}),
    "VisualBertModel": (_TEXT, {"visual_embedding_dim": 32}),
    "Wav2Vec2ForCTC": (_SOUND, _WAVE),
    "WavLMModel": (_SOUND, _WAVE),
    "WhisperForConditionalGeneration": ("input_features decoder_input_ids", {**_BART, "num_mel_bins": 8,
        "max_source_positions": 16, "max_target_positions": 32}),
    "XGLMForCausalLM": (_TEXT, {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    "XLMRobertaForMaskedLM": (_TEXT, {}),
    "XLNetLMHeadModel": (_TEXT, {"max_position_embeddings": ..., "d_model": 32, "n_layer": 2, "n_head": 4,
        "d_inner": 64}),
    "Zamba2ForCausalLM": (_TEXT, {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "attention_head_dim": 16,
        "num_key_value_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1, "chunk_size": 4}),
}
# fmt: on
CASES: dict[str, Case] = {
    **{name: _timm(name, *spec) for name, spec in TIMM.items()},
    **{name: _transformers(name, *spec) for name, spec in TRANSFORMERS.items()},
}


# -- how it is judged


@dataclass
class Verdict:
    """What became of one model under one annotation.

    Attributes:
        outcome: ``equal``, ``wrong``, ``refused`` (an error of this library's) or ``raises`` (any other).
        detail: The error, or what differs.
        differs: The largest difference of a gradient or parameter, in units of the largest gradient or update.
        handles: How many there were.
    """

    outcome: str
    detail: str = ""
    differs: float = 0.0
    handles: int = 0


@dataclass
class Run:
    """Mean losses of the steps; gradients of the last step and parameters, whole, by kind and FQN."""

    losses: list[float] = field(default_factory=list)
    values: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)


def block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of a model's blocks.

    Those are the members of a ``ModuleList``, and the members of a ``Sequential`` that are not alone of their class;
    the outermost, where one block holds others; none of ``torch.nn`` itself.
    """
    members = [child for child in model.children() if not type(child).__module__.startswith("torch.nn.")]
    count = Counter(type(child) for child in members)
    found: set[type[nn.Module]] = set()
    if isinstance(model, nn.ModuleList):
        found = set(count)
    elif isinstance(model, nn.Sequential):
        found = {kind for kind, times in count.items() if times > 1}
    found = {kind for kind in found if any(next(one.parameters(), None) is not None for one in members)}
    return found.union(*(block_classes(child) for child in model.children() if type(child) not in found))


def _fully_sharded(model: nn.Module) -> nn.Module:
    classes = block_classes(model)
    return fully_shard(model, policy=ModuleWrapPolicy(classes) if classes else None)


def _fully_sharded_by_torch(model: nn.Module) -> nn.Module:
    from torch.distributed import fsdp

    classes = tuple(block_classes(model))
    for module in reversed(list(model.modules())[1:]):  # children before their parents
        if isinstance(module, classes):
            fsdp.fully_shard(module)
    return fsdp.fully_shard(model)


# What makes a model parallel, and returns what is to be called.
ANNOTATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": _fully_sharded,
    "replicate": replicate,
    "replicate, find_unused_parameters": functools.partial(replicate, find_unused_parameters=True),
    "torch's fully_shard": _fully_sharded_by_torch,
    "torch's DDP": nn.parallel.DistributedDataParallel,
}


def judge(name: str, annotation: str) -> Verdict:
    """Train one model under one of ``ANNOTATIONS`` and in one process, and compare."""
    try:
        model, expected, moved = _reference(name)
    except Exception as error:
        return Verdict("raises", f"in one process, {type(error).__name__}: {error}")
    try:
        run, handles = simulate(RANKS, _train_annotated, name, model, ANNOTATIONS[annotation], timeout_s=300.0)[0]
    except Exception as error:
        is_ours = isinstance(error, ComposableError)
        return Verdict("refused" if is_ours else "raises", f"{type(error).__name__}: {error}")
    return _compared(run, expected, moved, handles)


@functools.lru_cache(maxsize=1)  # for the next annotation
def _reference(name: str) -> tuple[nn.Module, Run, dict[str, float]]:
    """Return the model, its training in one process, and how far each parameter moved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CASES[name].build().eval()
        _give_statistics(model, _joined([_batch(name, model, -1, rank) for rank in range(8)]))
    trained = copy.deepcopy(model)
    run = _train(
        trained, [_joined([_batch(name, model, step, rank) for rank in range(RANKS)]) for step in range(STEPS)]
    )
    moved = {
        fqn: (run.values["parameter", fqn] - param.detach()).abs().max().item()
        for fqn, param in model.named_parameters()
        if param.numel()
    }
    if not all(map(_is_finite, [torch.tensor(run.losses), *run.values.values()])):
        raise ValueError(f"{name}: its training in one process gives numbers that are not finite")
    if sum(amount > 0 for amount in moved.values()) < len(moved) / 2:
        raise ValueError(f"{name}: most parameters do not move, so that nothing is compared")
    return model, run, moved


def _give_statistics(model: nn.Module, batch: Batch) -> None:
    """Let batch norm take those of a batch, as a trained model has them: else numbers vanish layer by layer."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
            norm.train()
        with torch.no_grad():
            model(**batch)
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
            norm.eval()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _batch(name: str, model: nn.Module, step: int, rank: int) -> Batch:
    return CASES[name].batch(model, torch.Generator().manual_seed(1000 * (step + 1) + rank))


def _joined(batches: list[Batch]) -> Batch:
    return {key: torch.cat([one[key] for one in batches]) for key in batches[0]}


def _train_annotated(
    rank: int, name: str, model: nn.Module, annotate: Callable[[nn.Module], nn.Module]
) -> tuple[Run, int]:
    model = copy.deepcopy(model)
    batches = [_batch(name, model, step, rank) for step in range(STEPS)]
    called = annotate(model)
    state = fully_shard.state(model)
    return _train(model, batches, called), len(state.plan.handles) if state is not None else 0


def _train(model: nn.Module, batches: list[Batch], called: nn.Module | None = None) -> Run:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)
    run = Run()
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss_of((called or model)(**batch))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        run.losses.append(mean.item())
    for fqn, param in model.named_parameters():
        run.values["parameter", fqn] = _whole(param)
        run.values["gradient", fqn] = _whole(torch.zeros_like(param) if param.grad is None else param.grad)
    return run


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _loss_of(output: Any) -> torch.Tensor:
    """Return the mean distance of what a model returns to fixed numbers, bounded in slope; a mean over samples."""
    if isinstance(output, Mapping):
        # Scores of each text for each image compare samples with each other.
        output = [value for name, value in output.items() if not name.startswith("logits_per")]
    if isinstance(output, torch.Tensor):
        if not output.requires_grad:
            return torch.zeros(())
        wanted = torch.arange(output[0].numel(), dtype=output.dtype).sin().view(output[0].shape)
        return nn.functional.smooth_l1_loss(output, wanted.expand_as(output))
    if isinstance(output, Iterable):
        return torch.stack([_loss_of(one) for one in output]).sum()
    return torch.zeros(())


def _compared(run: Run, expected: Run, moved: Mapping[str, float], handles: int) -> Verdict:
    """Hold a run against one process.

    To be equal, a tensor must be so within a thousandth of its own largest element (of a parameter: of its largest
    update), or within the rounding of the largest of all. What is mathematically zero is held to the second alone.
    """
    if list(run.values) != list(expected.values):
        return Verdict("wrong", "other names of parameters", handles=handles)
    largest = {"parameter": max(moved.values())}
    largest["gradient"] = max(
        value.abs().max().item() for (kind, _), value in expected.values.items() if kind == "gradient" and value.numel()
    )
    worst, wrong = 0.0, ""
    for step, (loss, wanted) in enumerate(zip(run.losses, expected.losses)):
        if not abs(loss - wanted) <= 1e-5 * max(1.0, abs(wanted)):
            wrong = f"loss {loss:.9g} for {wanted:.9g} in step {step}"
    for (kind, fqn), wanted in expected.values.items():
        if not wanted.numel():
            continue
        distance = (run.values[kind, fqn] - wanted).abs().max().item()
        size = wanted.abs().max().item()
        allowed = 1e-3 * (moved[fqn] if kind == "parameter" else size) + 1e-5 * largest[kind]
        allowed += 4 * torch.finfo(wanted.dtype).eps * size
        worst = max(worst, distance / largest[kind])
        if not distance <= allowed:
            wrong = wrong or f"{kind} of {fqn} by {distance:.2g}, of {size:.2g}"
    return Verdict("wrong" if wrong else "equal", wrong, worst, handles)


# -- the table


def judge_both(name: str) -> dict[str, Verdict]:
    """Judge a model under both annotations, and where one is not equal, under torch's as well."""
    verdicts = {}
    for ours, theirs in (("fully_shard", "torch's fully_shard"), ("replicate", "torch's DDP")):
        verdict = judge(name, ours)
        if ours == "replicate" and "backward ended without a gradient" in verdict.detail:
            verdict = judge(name, "replicate, find_unused_parameters")
            verdict.detail = verdict.detail or "with `find_unused_parameters`"
        if verdict.outcome != "equal":
            other = judge(name, theirs)
            print(f"{name}\n  {ours}: {verdict}\n  {theirs}: {other}", file=sys.stderr)
            verdict.detail = f"{verdict.detail.splitlines()[0]}; {theirs}: {other.outcome}"
        verdicts[ours] = verdict
    return verdicts


def table(library: str, names: Iterable[str]) -> str:
    """Judge models of one library; return a heading with its version, the counts, and a row for each outcome."""
    alike: dict[tuple[str, str], dict[str, float]] = {}
    outcomes = {"fully_shard": Counter[str](), "replicate": Counter[str]()}
    for name in names:
        start = time.perf_counter()
        verdicts = judge_both(name)
        for annotation, verdict in verdicts.items():
            outcomes[annotation][verdict.outcome] += 1
        ours, copies = (
            verdict.outcome + (f", {verdict.detail}" if verdict.detail else "") for verdict in verdicts.values()
        )
        alike.setdefault((ours, copies), {})[name] = worst = max(verdict.differs for verdict in verdicts.values())
        handles = verdicts["fully_shard"].handles
        seconds = time.perf_counter() - start
        print(f"{name}: {handles} handles; {ours}; {copies}; {worst:.0e}; {seconds:.1f} s", file=sys.stderr, flush=True)
    counts = "; ".join(
        f"`{annotation}`: " + ", ".join(f"{count} {outcome}" for outcome, count in counted.most_common())
        for annotation, counted in outcomes.items()
    )
    version = importlib.metadata.version(library)
    return "\n".join(
        [
            f"## {library} {version}",
            "",
            f"{sum(map(len, alike.values()))} models. {counts}.",
            "",
            "<details>\n<summary>The models</summary>\n",
            "| `fully_shard` | `replicate` | Differs by at most | Models |",
            "|---|---|---|---|",
            *rows_of(alike),
            "\n</details>",
        ]
    )


def rows_of(alike: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """Return a row for each pair of outcomes, of the models that have it and how far each differs."""
    return [
        f"| {ours} | {copies} | {max(differs.values()):.0e} | {' '.join(f'`{name}`' for name in differs)} |"
        for (ours, copies), differs in alike.items()
    ]


def write(library: str, text: str) -> None:
    """Put a library's table between its marks on the page."""
    begin, end = f"<!-- begin: {library}, by examples/clients/model_sweep.py --write -->", f"<!-- end: {library} -->"
    before, found, rest = PAGE.read_text().partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{PAGE} has no marks for {library}")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["timm", "transformers"], metavar="NAME")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for library in ("timm", "transformers"):
        names = [name for name, case in CASES.items() if case.library == library and {name, library} & set(args.only)]
        if names:
            text = table(library, names)
            print(text, end="\n\n", flush=True)
            if args.write:
                write(library, text)


if __name__ == "__main__":
    main()
