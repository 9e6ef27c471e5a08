"""config.json <-> QwenConfig. Raises ValueError naming the file and what cannot be used in it."""
from dataclasses import asdict
from typing import Any

from minits.qwen import QwenConfig

SUPPORTED = ("qwen2",)
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


def read_config(raw: dict[str, Any], where: str = "config.json") -> QwenConfig:
    """The configuration in the parsed file; `where` names it in messages."""
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(
            f"{where}: model_type is {kind!r}; supported: {', '.join(SUPPORTED)}. Use a Qwen2 or "
            "Qwen2.5 checkpoint."
        )
    missing = [key for key in NEEDED if raw.get(key) is None]
    if missing:
        raise ValueError(
            f"{where}: lacks {', '.join(missing)}; download the checkpoint's config.json again."
        )
    for key in NEEDED:
        kinds = (int, float) if key == "rms_norm_eps" else (int,)
        if type(raw[key]) not in kinds or not raw[key] > 0:
            words = "number" if len(kinds) > 1 else "whole number"
            raise ValueError(
                f"{where}: {key} is {raw[key]!r}, not a positive {words}; download the "
                "checkpoint's config.json again."
            )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported.")
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads or (raw.get("head_dim") is None and raw["hidden_size"] % heads):
        raise ValueError(
            f"{where}: {heads} heads do not divide by {kv_heads} kv heads, or hidden_size "
            f"{raw['hidden_size']} by the heads."
        )
    window, sliding = sliding_attention(raw, layers, where)
    return QwenConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=rope_theta(raw, where),
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=window,
        sliding_layers=sliding,
    )


def write_config(config: QwenConfig) -> dict[str, Any]:
    """The content of a config.json that reads back to `config`, here and in transformers."""
    raw = asdict(config)
    sliding, layers = raw.pop("sliding_layers"), config.num_hidden_layers
    kinds = [
        "sliding_attention" if layer in sliding else "full_attention" for layer in range(layers)
    ]
    return raw | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": bool(sliding),
        # Older readers know only this: from there on, layers slide. layer_types says it exactly.
        "max_window_layers": min(sliding, default=layers),
        "layer_types": kinds,
    }


def rope_theta(raw: dict[str, Any], where: str) -> float:
    """The rotary base from either spelling.

    Silence about it is an error, for the usual 10000 would be wrong without a sign.
    """
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for settings in (nested, scaling):
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"{where}: rope type {kind!r} is not supported, only 'default' (no context "
                "extension)."
            )
    bases = (raw.get("rope_theta"), nested.get("rope_theta"))
    found = {float(base) for base in bases if base is not None}
    if len(found) != 1:
        problem = "neither rope_theta nor rope_parameters"
        if found:
            problem = f"contradictory rotary bases {sorted(found)}"
        raise ValueError(f"{where}: {problem}; set the one value that the model was trained with.")
    return found.pop()


def sliding_attention(
    raw: dict[str, Any], layers: int, where: str
) -> tuple[int | None, tuple[int, ...]]:
    """(window in tokens, sliding layers); the window counts only where it is switched on."""
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window") is None:
        return None, ()
    kinds = raw.get("layer_types")
    if not kinds:
        return raw["sliding_window"], tuple(range(raw.get("max_window_layers", layers), layers))
    if len(kinds) != layers:
        raise ValueError(f"{where}: layer_types has {len(kinds)} entries for {layers} layers.")
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return raw["sliding_window"], sliding
