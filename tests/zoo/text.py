"""Models of the library transformers."""

import torch
import transformers as hf
from torch import nn

from zoo import PAD, WORDS, B, Model, T, classes, images, mask, words

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def of(architecture: str, config: str | None = None, **options):
    """A builder for a class of transformers; config: the name of its configuration, if it has another one."""
    name = config or architecture.partition("For")[0].removesuffix("Model").removesuffix("LMHead")

    def build(dropout: bool) -> nn.Module:
        made = getattr(hf, f"{name}Config")(**{**SIZES, **options})
        if not dropout:
            still(made)
        return getattr(hf, architecture)(made).train()

    return build


def still(config) -> None:
    for name, value in vars(config).items():
        if isinstance(value, hf.PretrainedConfig):
            still(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("_prob")):
            setattr(config, name, 0.0)


def classified():
    return {"input_ids": words(), "attention_mask": mask(), "labels": classes() % 2}


def unmasked():
    return {"input_ids": torch.randint(3, WORDS, (B, T)), "labels": classes() % 2}


def causal():
    x = words()
    return {"input_ids": x, "attention_mask": mask(), "labels": x.masked_fill(mask() == 0, -100)}


def causal_unmasked():
    x = torch.randint(3, WORDS, (B, T))
    return {"input_ids": x, "labels": x}


def filled():
    x, hidden = words(), (torch.arange(T) % 3 == 0) & (mask() > 0)
    return {"input_ids": x, "attention_mask": mask(), "labels": torch.where(hidden, x, -100)}


def tagged():
    return {"input_ids": words(), "attention_mask": mask(), "labels": (words() % 2).masked_fill(mask() == 0, -100)}


def answered():
    return {
        "input_ids": words(), "attention_mask": mask(),
        "start_positions": torch.randint(3, (B,)), "end_positions": torch.randint(3, 5, (B,)),
    }  # fmt: skip


def translated():
    y = words()[:, :6]
    return {"input_ids": words(), "attention_mask": mask(), "labels": y.masked_fill(y == PAD, -100)}


def spoken():
    return {"input_features": torch.randn(B, 8, 2 * T), "labels": torch.randint(3, WORDS, (B, 5))}


def heard():
    y = torch.randint(3, WORDS, (B, 4))
    y[1, 2:] = -100
    return {"input_values": torch.randn(B, 400), "labels": y}


def pictured():
    return {"input_ids": words(), "attention_mask": mask(), "pixel_values": images()}


def likeness(module, batch):
    """A loss of each record's own text and image."""
    return -module(**batch).logits_per_image.mean()


CODING = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
VIEWING = {"image_size": 16, "patch_size": 4}
TOWERS = {
    "text_config": SIZES,
    "vision_config": {k: v for k, v in {**SIZES, **VIEWING}.items() if "token" not in k and "vocab" not in k},
    "projection_dim": 16,
}  # fmt: skip

EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}

MODELS = {
    "BERT, classes": Model(of("BertForSequenceClassification"), unmasked),
    "BERT, classes, mask": Model(of("BertForSequenceClassification"), classified),
    "BERT, masked words": Model(of("BertForMaskedLM"), filled),
    "RoBERTa, tags": Model(of("RobertaForTokenClassification"), tagged),
    "XLM-RoBERTa, masked words": Model(of("XLMRobertaForMaskedLM"), filled),
    "DistilBERT, answers": Model(
        of("DistilBertForQuestionAnswering", dim=32, n_layers=2, n_heads=4, hidden_dim=48), answered
    ),
    "ALBERT": Model(of("AlbertForSequenceClassification", embedding_size=16), classified),
    "ELECTRA": Model(of("ElectraForSequenceClassification", embedding_size=16), classified),
    "ELECTRA, discriminator": Model(of("ElectraForPreTraining", embedding_size=16), tagged),
    "MPNet": Model(of("MPNetForSequenceClassification"), classified),
    "DeBERTa": Model(
        of("DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]), classified
    ),
    "DeBERTa-v2": Model(
        of("DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]), classified
    ),
    "ModernBERT": Model(
        of("ModernBertForSequenceClassification", cls_token_id=1, sep_token_id=2, local_attention=4), classified
    ),
    "GPT-2": Model(of("GPT2LMHeadModel", **GPT2), causal_unmasked),
    "GPT-2, mask": Model(of("GPT2LMHeadModel", **GPT2), causal),
    "GPT-2, classes": Model(of("GPT2ForSequenceClassification", **GPT2), classified),
    "GPT-NeoX": Model(of("GPTNeoXForCausalLM"), causal),
    "OPT": Model(of("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32), causal),
    "Bloom": Model(of("BloomForCausalLM", n_head=4, n_layer=2), causal),
    "Falcon": Model(of("FalconForCausalLM"), causal),
    "Llama": Model(of("LlamaForCausalLM", num_key_value_heads=2), causal),
    "Qwen2": Model(of("Qwen2ForCausalLM", num_key_value_heads=2), causal),
    "Qwen3": Model(of("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8), causal),
    "Mistral": Model(of("MistralForCausalLM", num_key_value_heads=2, sliding_window=4), causal),
    "Gemma": Model(of("GemmaForCausalLM", num_key_value_heads=2, head_dim=8), causal),
    "Gemma 2": Model(of("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=8), causal),
    "Phi": Model(of("PhiForCausalLM"), causal),
    "Mixtral": Model(of("MixtralForCausalLM", **EXPERTS, experts_implementation="eager"), causal),
    "Mixtral, batched experts": Model(of("MixtralForCausalLM", **EXPERTS, experts_implementation="batched_mm"), causal),
    "Mamba": Model(of("MambaForCausalLM", state_size=4), causal),
    "BART": Model(of("BartForConditionalGeneration", **CODING), translated),
    "Marian": Model(of("MarianMTModel", "Marian", **CODING), translated),
    "T5": Model(of("T5ForConditionalGeneration", **T5), translated),
    "Whisper": Model(
        of("WhisperForConditionalGeneration", **CODING, num_mel_bins=8, max_source_positions=T, max_target_positions=T),
        spoken,
    ),
    "Wav2Vec2, CTC": Model(
        of(
            "Wav2Vec2ForCTC", conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
            feat_extract_norm="layer",
        ),
        heard,
    ),
    "ViT": Model(
        of("ViTForImageClassification", **VIEWING), lambda: {"pixel_values": images(), "labels": classes() % 2}
    ),
    "CLIP": Model(of("CLIPModel", **TOWERS), pictured, likeness),
    "SigLIP": Model(
        of("SiglipModel", **{k: v for k, v in TOWERS.items() if k != "projection_dim"}), pictured, likeness
    ),
}  # fmt: skip
