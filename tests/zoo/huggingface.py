"""Hugging Face models of many families, tiny, from their configurations with random weights.

Import it after ``pytest.importorskip("transformers")``. A family is data: no code depends on it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97
Settings = dict[str, Any]

WIDTH: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENCODER: Settings = {
    **WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER: Settings = {**ENCODER, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: Settings = {**DECODER, "num_key_value_heads": 2}
WITH_HEAD_DIM: Settings = {**GROUPED, "head_dim": 8}
VISION: Settings = {**WIDTH, "image_size": 32, "patch_size": 8}
EXPERTS: Settings = {"num_experts_per_tok": 2}
TOKENS: Settings = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT_NAMES: Settings = {
    **TOKENS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 64,
}
ENCODER_DECODER: Settings = {
    **TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: Settings = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SPEECH: Settings = {
    **ENCODER,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}

Inputs = Literal["text", "causal", "image", "text to text", "speech", "speech to text", "both"]


@dataclass(frozen=True)
class Family:
    """A class of models, tiny.

    Attributes:
        name: of its test.
        model: the class.
        config: the class of its configuration.
        settings: of the configuration.
        kind: which inputs it takes.
        heads: whether its attention heads are units.
        describes: which units a configuration of the class can describe when they are uniform.
        tokens: the length of text.
        form: of a small model whose widths are any numbers. The kernel of stacked experts takes
            multiples of 16 bytes only, so there it is the graph.
        dtype: float64, or float32 where an operator has no other on a CPU.
    """

    name: str
    model: str
    config: str
    settings: Settings = field(repr=False)
    kind: Inputs = "text"
    heads: bool = True
    describes: Literal["all", "feed-forward", "nothing"] = "all"
    form: Literal["module", "graph"] = "module"
    tokens: int = 7
    dtype: torch.dtype = torch.float64

    def build(self) -> Any:
        """A model in evaluation mode, without dropout and without constant tensors."""
        config: Any = getattr(transformers, self.config)(**self.settings)
        _without_dropout(config)
        model: Any = getattr(transformers, self.model)(config).to(self.dtype).eval()
        for tensor in model.parameters():
            if tensor.numel() > 1 and bool((tensor == tensor.max()).all()):
                nn.init.uniform_(tensor, 0.5, 1.5)
        return model

    def inputs(self, batch: int) -> tuple[tuple[()], dict[str, Any]]:
        """Keyword inputs without a cache."""
        text, image = self._text(batch), torch.randn(batch, 3, 32, 32, dtype=self.dtype)
        mask = torch.ones_like(text)
        mels = torch.randn(batch, 16, 32, dtype=self.dtype)
        decoder: Settings = {"decoder_input_ids": text[:, :5], "use_cache": False}
        inputs: dict[str, Settings] = {
            "text": {"input_ids": text, "attention_mask": mask},
            "causal": {"input_ids": text, "attention_mask": mask, "use_cache": False},
            "image": {"pixel_values": image},
            "text to text": {"input_ids": text, **decoder},
            "speech": {"input_values": torch.randn(batch, 200, dtype=self.dtype)},
            "speech to text": {"input_features": mels, **decoder},
            "both": {"input_ids": text, "pixel_values": image},
        }
        return (), inputs[self.kind]

    def prompt(self, batch: int) -> dict[str, Tensor]:
        """What ``generate`` takes; nothing where a model generates no text."""
        _, inputs = self.inputs(batch)
        if self.kind not in ("causal", "text to text", "speech to text"):
            return {}
        left_out = ("decoder_input_ids", "use_cache")
        return {name: value for name, value in inputs.items() if name not in left_out}

    def _text(self, batch: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (batch, self.tokens))


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if "drop" in name and type(value) is float:
            setattr(config, name, 0.0)
        elif isinstance(value, transformers.PretrainedConfig):
            _without_dropout(value)


def _encoder(name: str, model: str, **settings: Any) -> Family:
    kind: Any = {"heads": True, "describes": "feed-forward", **settings.pop("facts", {})}
    config = f"{model}Config"
    return Family(name, f"{model}ForMaskedLM", config, {**ENCODER, **settings}, **kind)


def _causal(name: str, model: str, base: Settings, **settings: Any) -> Family:
    facts: Any = settings.pop("facts", {})
    config = f"{model}{settings.pop('config', 'Config')}"
    return Family(name, f"{model}ForCausalLM", config, {**base, **settings}, kind="causal", **facts)


def _image(name: str, model: str, settings: Settings, **facts: Any) -> Family:
    kind: Any = {"kind": "image", **facts}
    return Family(name, f"{model}ForImageClassification", f"{model}Config", settings, **kind)


WIDTHS_ONLY = {"describes": "feed-forward"}
NOTHING = {"describes": "nothing"}
NO_HEADS = {"heads": False}

FAMILIES = [
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("xlm-roberta", "XLMRoberta"),
    _encoder("camembert", "Camembert"),
    _encoder("ernie", "Ernie"),
    _encoder("electra", "Electra", embedding_size=24),
    _encoder("albert", "Albert", embedding_size=24),
    _encoder("mpnet", "MPNet"),
    _encoder("roformer", "RoFormer"),
    _encoder("modernbert", "ModernBert", global_attn_every_n_layers=2),
    _encoder("deberta-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"],
             facts={**NO_HEADS, "describes": "all"}),
    _encoder("fnet", "FNet", facts={**NO_HEADS, "describes": "all"}),
    _encoder("convbert", "ConvBert", embedding_size=24, facts={**NO_HEADS, "describes": "all"}),
    _encoder("mobilebert", "MobileBert", hidden_size=48, embedding_size=16,
             intra_bottleneck_size=32, true_hidden_size=32, facts=NOTHING),
    Family("distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
           {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
            "max_position_embeddings": 64}, describes="feed-forward"),
    _image("vit", "ViT", VISION),
    _image("deit", "DeiT", VISION),
    _image("beit", "Beit", VISION),
    _image("dinov2", "Dinov2", {**VISION, "mlp_ratio": 2}, describes="nothing"),
    _image("swin", "Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
                            "num_heads": [2, 4], "window_size": 4}, describes="nothing"),
    _image("segformer", "Segformer",
           {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
            "patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 16},
           describes="nothing"),
    _image("convnext", "ConvNext", {"hidden_sizes": [16, 24], "depths": [1, 2], "num_stages": 2},
           heads=False, describes="nothing"),
    _image("resnet", "ResNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]},
           heads=False, describes="nothing"),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", SHORT_NAMES, "causal",
           describes="feed-forward"),
    _causal("gpt-j", "GPTJ", SHORT_NAMES, rotary_dim=4, facts=WIDTHS_ONLY),
    _causal("gpt-bigcode", "GPTBigCode", SHORT_NAMES, facts=WIDTHS_ONLY),
    _causal("gpt-neo", "GPTNeo", TOKENS, hidden_size=32, num_layers=2, num_heads=4,
            attention_types=[[["global", "local"], 1]], intermediate_size=48,
            max_position_embeddings=64, facts=WIDTHS_ONLY),
    _causal("gpt-neox", "GPTNeoX", DECODER, facts=WIDTHS_ONLY),
    _causal("opt", "OPT", TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32, facts=WIDTHS_ONLY),
    _causal("bloom", "Bloom", TOKENS, hidden_size=32, n_layer=2, n_head=4,
            facts={**NO_HEADS, **NOTHING}),
    _causal("falcon", "Falcon", TOKENS, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, facts=NO_HEADS),
    _causal("mpt", "Mpt", TOKENS, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2,
            max_seq_len=64, facts={**NO_HEADS, **NOTHING}),
    _causal("phi", "Phi", DECODER),
    _causal("phi3", "Phi3", GROUPED),
    _causal("llama", "Llama", GROUPED),
    _causal("mistral", "Mistral", GROUPED),
    _causal("qwen2", "Qwen2", GROUPED),
    _causal("qwen3", "Qwen3", WITH_HEAD_DIM),
    _causal("gemma", "Gemma", WITH_HEAD_DIM),
    _causal("gemma2", "Gemma2", WITH_HEAD_DIM, query_pre_attn_scalar=8),
    _causal("gemma3", "Gemma3", WITH_HEAD_DIM, config="TextConfig", query_pre_attn_scalar=8),
    _causal("olmo2", "Olmo2", GROUPED, facts=NO_HEADS),
    _causal("stablelm", "StableLm", GROUPED, facts=WIDTHS_ONLY),
    _causal("starcoder2", "Starcoder2", GROUPED),
    _causal("cohere", "Cohere", GROUPED),
    _causal("granite", "Granite", GROUPED),
    _causal("smollm3", "SmolLM3", GROUPED),
    _causal("mixtral", "Mixtral", GROUPED, **EXPERTS, num_local_experts=4,
            facts={"dtype": torch.float32, "form": "graph"}),
    _causal("qwen3-moe", "Qwen3Moe", WITH_HEAD_DIM, **EXPERTS, num_experts=4,
            moe_intermediate_size=24, facts={"dtype": torch.float32, "form": "graph"}),
    _causal("mamba", "Mamba", {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8,
                               "num_hidden_layers": 2}, facts=NO_HEADS),
    Family("t5", "T5ForConditionalGeneration", "T5Config", T5, "text to text"),
    Family("t5-gated", "T5ForConditionalGeneration", "T5Config",
           {**T5, "feed_forward_proj": "gated-gelu"}, "text to text"),
    Family("bart", "BartForConditionalGeneration", "BartConfig", ENCODER_DECODER, "text to text",
           describes="feed-forward"),
    Family("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", ENCODER_DECODER,
           "text to text", describes="feed-forward"),
    Family("marian", "MarianMTModel", "MarianConfig", ENCODER_DECODER, "text to text",
           describes="feed-forward"),
    Family("whisper", "WhisperForConditionalGeneration", "WhisperConfig",
           {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 16,
            "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None},
           "speech to text", describes="nothing"),
    Family("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, "speech",
           describes="feed-forward"),
    Family("hubert", "HubertForCTC", "HubertConfig", SPEECH, "speech", describes="nothing"),
    Family("clip", "CLIPModel", "CLIPConfig",
           {"text_config": DECODER, "vision_config": VISION, "projection_dim": 16}, "both",
           describes="feed-forward"),
    Family("siglip", "SiglipModel", "SiglipConfig",
           {"text_config": {**ENCODER, "projection_size": 32}, "vision_config": VISION}, "both",
           tokens=64, describes="feed-forward"),
]  # fmt: skip
"""Every family; ``EVERY_DAY`` is tested by default."""

EVERY_DAY = ("bert", "gpt2", "qwen2", "t5")
