"""Sizes of models: parameters as published, configs of Hugging Face, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn.errors import InvalidInput
from ringattn.lab.models.config import MODELS, ModelConfig, from_hugging_face, load_model

#: Parameters as published: model cards of Meta, Mistral AI, DeepSeek, Zhipu and OpenAI (arXiv 2508.10925, table 1). Of
#: Kimi K2, arXiv 2507.20534 says 1.04e12, as if all 61 layers had experts; the first has none.
PUBLISHED = {
    **{"llama3_8b": 8.03e9, "llama3_70b": 70.6e9, "llama3_405b": 405e9, "mistral_7b": 7.24e9},
    **{"gpt_oss_20b": 20.91e9, "gpt_oss_120b": 116.83e9, "qwen3_next_80b": 79.67e9},
    **{"kimi_linear_48b": 49.1e9, "nemotron_h_8b": 8_100_852_736, "falcon_h1_34b": 33.6e9},
    **{"deepseek_v2_lite": 15.7e9, "deepseek_v3": 671e9, "kimi_k2": 1.03e12, "glm5": 744e9},
}
#: A small model that keeps latents.
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"qk_nope_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "topk_group": 1},
}
SMALL: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80, "vocab_size": 100},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
}


def test_models_have_the_published_parameters() -> None:
    assert {*PUBLISHED} == {*MODELS}
    for name, parameters in PUBLISHED.items():
        assert load_model(name).parameters == pytest.approx(parameters, rel=0.01)
    assert load_model("gpt_oss_20b").active_parameters == pytest.approx(3.61e9, rel=0.01)
    assert load_model("gpt_oss_120b").active_parameters == pytest.approx(5.13e9, rel=0.01)
    assert [round(load_model(name).active_parameters / 1e9) for name in ("deepseek_v3", "kimi_k2")] == [37, 32]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 8}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"use_sliding_window": False}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
        ("gemma2", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8}),
        ("phi3", {"sliding_window": 8}),
        ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 16}),
        (
            "qwen3_next",
            {
                **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
                **{"num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 4, "full_attention_interval": 3},
            },
        ),
        (
            "kimi_linear",
            {
                **{key: LATENT[key] for key in LATENT if key.startswith(("kv_", "qk_", "v_"))},
                **{"num_key_value_heads": 6, "moe_intermediate_size": 16, "num_experts": 4, "num_shared_experts": 1},
                **{"first_k_dense_replace": 1, "num_experts_per_token": 2},
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 4},
            },
        ),
        (
            "nemotron_h",
            {
                **{"layers_block_type": ["mamba", "mlp", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8},
                **{"ssm_state_size": 16, "n_groups": 2},
            },
        ),
        *(
            ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_rms_norm": normed})
            for normed in (False, True)
        ),
        ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
        ("deepseek_v3", LATENT),
        ("deepseek_v32", {**LATENT, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 5}),
        ("glm_moe_dsa", {**LATENT, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 5}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    ],
)
def test_parameters_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    """A model of the same config on the meta device, which has shapes and no numbers."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = {**SMALL, "model_type": kind, "pad_token_id": 0, **more}
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    ours = from_hugging_face(made.to_dict(), kind)
    assert ours.parameters == model.num_parameters() and ours.windows == from_hugging_face(config, kind).windows


def test_quantized_weights_have_the_published_bytes() -> None:
    """Checkpoints of 12.8 and 60.8 GiB (arXiv 2508.10925, table 1), which are larger by 16-bit embeddings and norms."""
    for name, published in (("gpt_oss_20b", 12.8), ("gpt_oss_120b", 60.8)):
        model = load_model(name)
        assert model.stored_bytes(2) / 2**30 == pytest.approx(published, rel=0.005)
        assert replace(model, mlp_item=None).stored_bytes(2) == 2 * model.parameters
    plain = from_hugging_face(SMALL, "x")
    fp8 = from_hugging_face({**SMALL, "quantization_config": {"quant_method": "fp8"}}, "x")
    tables = 2 * 4800 + 48 + 3 * 96
    assert fp8.stored_bytes(2) == pytest.approx(2 * tables + (1 + 2**-12) * (plain.parameters - tables))


def test_the_text_part_of_a_model_of_images_is_read() -> None:
    """google/gemma-3-4b-it, whose config leaves out what transformers has as a default; 3.88e9 parameters of text."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    model = from_hugging_face({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "gemma")
    assert model.parameters == pytest.approx(3.88e9, rel=0.001) and model.windows[4:7] == (1024, None, 1024)


def test_layers_have_the_windows_of_the_config(tmp_path: Path) -> None:
    assert load_model("gpt_oss_20b").windows == (128, None) * 12
    assert load_model("mistral_7b").windows == (4096,) * 32
    qwen = {**SMALL, "model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2}
    assert from_hugging_face(qwen, "qwen").windows == (None,) * 3, "qwen2 has windows only where its config says so"
    assert from_hugging_face({**qwen, "use_sliding_window": True}, "qwen").windows == (None, None, 7)
    path = tmp_path / "hybrid.json"
    types = ["full_attention", "sliding_attention", "full_attention"]
    path.write_text(json.dumps({**SMALL, "layer_types": types, "sliding_window": 7}))
    hybrid = load_model(str(path))
    assert (hybrid.name, hybrid.windows) == ("hybrid", (None, 7, None))
    # By hand: q and out 48 x 96, k and v 48 x 32, three of 48 x 80, two norms; a final norm, two tables of 100 x 48.
    assert hybrid.parameters == 3 * (2 * 48 * 96 + 2 * 48 * 32 + 3 * 48 * 80 + 96) + 48 + 2 * 4800


def test_configs_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "lama"}, "model_type='lama' .*did you mean 'llama'"),
        ({"model_type": "deepseek_v4"}, "model_type='deepseek_v4' is not modelled; did you mean 'deepseek_v3'"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank: Expected int, got null"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared"]}, r"indexer_types\[0\]: .*shared"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size: Expected int, got null"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not modelled"),
        ({"mlp_bias": True}, "mlp_bias=True is not modelled"),
        ({"layer_types": ["conv"] * 3}, r"layer_types\[0\]: .*conv"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window=None"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4"),
        ({"head_dim": 0}, "head_dim: Expected int >= 1, got 0"),
        ({"num_experts_per_tok": 2}, "experts_per_token=2 exceeds the 1"),
    ]
    cases = [(json.dumps({**SMALL, **change}), message) for change, message in wrong]
    cases += [("[]", "Expected object, got array")]
    for text, message in cases:
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            load_model(str(path))
    with pytest.raises(InvalidInput, match="unknown model 'llama3_8'; did you mean 'llama3_8b'"):
        load_model("llama3_8")
    with pytest.raises(InvalidInput, match=r"windows: \[0\]: Expected int >= 1, got 0"):
        ModelConfig("x", 1, 8, 1, 1, 8, 8, 8, windows=(0,))
