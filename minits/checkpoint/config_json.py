"""config.json <-> QwenConfig. Raises ValueError naming the file and what cannot be used in it."""
import warnings
from dataclasses import asdict, dataclass, fields

from minits.checkpoint.files import Json, printable, read_values
from minits.qwen import QwenConfig
from minits.settings import setting

FULL, SLIDING = KINDS = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ConfigFile:
    """What config.json says that matters here; no other key is read.

    The ranges leave out only what no model can have.
    """

    model_type: str = setting(choices=("qwen2",))
    vocab_size: int = setting(least=1, most=2**24)
    hidden_size: int = setting(least=1, most=2**16)
    intermediate_size: int = setting(least=1, most=2**20)
    num_hidden_layers: int = setting(least=1, most=1024)
    num_attention_heads: int = setting(least=1, most=2**12)
    rms_norm_eps: float = setting(above=0, most=0.01)
    max_position_embeddings: int = setting(least=2, most=2**24)
    num_key_value_heads: int | None = setting(None, least=1)
    head_dim: int | None = setting(None, least=2, most=2**12)
    hidden_act: str = setting("silu", choices=("silu",))
    tie_word_embeddings: bool = setting(False)
    is_causal: bool = setting(True, choices=(True,))  # some embedding models see both ways
    attention_dropout: float = setting(0.0, least=0, most=1)
    rope_theta: float | None = setting(None, least=1, most=1e12)
    rope_parameters: dict | None = setting(None)
    rope_scaling: dict | None = setting(None)
    use_sliding_window: bool = setting(False)
    sliding_window: int | None = setting(None, least=1, most=2**24)
    max_window_layers: int | None = setting(None, least=0)
    layer_types: list | None = setting(None)
    quantization_config: dict | None = setting(None)


@dataclass(frozen=True)
class RopeFile:
    """What stands in rope_parameters or rope_scaling."""

    rope_type: str = setting("default", choices=("default",))  # others extend the context
    type: str = setting("default", choices=("default",))  # its older name
    rope_theta: float | None = setting(None, least=1, most=1e12)
    partial_rotary_factor: float = setting(1.0, choices=(1,))


def read_config(raw: Json, where: str = "config.json") -> QwenConfig:
    """The configuration in the parsed file; `where` names it in messages."""
    file = read_values(ConfigFile, raw, where)
    if file.quantization_config:
        how = printable(file.quantization_config.get("quant_method", "in some way"), 40)
        raise ValueError(
            f"{where}: quantization_config says that the weights are quantised ({how}). Use the "
            "checkpoint that they were made from."
        )
    if file.attention_dropout:
        warnings.warn(f"{where}: attention_dropout {file.attention_dropout} is not applied here.")
    heads = file.num_attention_heads
    kv_heads = file.num_key_value_heads or heads
    head_dim = file.head_dim or file.hidden_size // heads
    if heads % kv_heads or (file.head_dim is None and file.hidden_size % heads) or head_dim % 2:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}, or hidden_size {file.hidden_size} none of the heads, or head_dim "
            f"{head_dim} is odd."
        )
    window, sliding = sliding_attention(file, where)
    values = asdict(file) | {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": rope_theta(file, where),
        "sliding_window": window,
        "sliding_layers": sliding,
    }
    return QwenConfig(**{each.name: values[each.name] for each in fields(QwenConfig)})


def write_config(config: QwenConfig) -> Json:
    """The content of a config.json that reads back to `config`, here and in transformers."""
    raw = asdict(config)
    sliding, layers = raw.pop("sliding_layers"), config.num_hidden_layers
    return raw | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": bool(sliding),
        # Older readers know only this: from there on, layers slide. layer_types says it exactly.
        "max_window_layers": min(sliding, default=layers),
        "layer_types": [SLIDING if layer in sliding else FULL for layer in range(layers)],
    }


def rope_theta(file: ConfigFile, where: str) -> float:
    """The rotary base from either spelling.

    Silence about it is an error, for the usual 10000 would be wrong without a sign.
    """
    bases = {file.rope_theta}
    for key in ("rope_parameters", "rope_scaling"):
        rope = read_values(RopeFile, getattr(file, key) or {}, f"{where}, {key}")
        bases.add(rope.rope_theta)
    found = set(map(float, bases - {None}))
    if len(found) != 1:
        problem = "neither rope_theta nor rope_parameters"
        if found:
            problem = f"contradictory values {sorted(found)} of rope_theta"
        raise ValueError(f"{where}: {problem}; set the one value that the model was trained with.")
    return found.pop()


def sliding_attention(file: ConfigFile, where: str) -> tuple[int | None, tuple[int, ...]]:
    """(window in tokens, sliding layers); the window counts only where it is switched on."""
    layers, kinds = file.num_hidden_layers, file.layer_types
    switched = file.use_sliding_window and file.sliding_window
    first = file.max_window_layers
    if kinds is None:
        sliding = tuple(range(28 if first is None else first, layers))  # 28: as in transformers
        return (file.sliding_window, sliding) if switched and sliding else (None, ())
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or len(kinds) != layers:
        raise ValueError(
            f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers {layers}"
            + (f", among them {printable(repr(wrong[0]))}, not one of {KINDS}." if wrong else ".")
        )
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if not sliding:
        return None, ()
    if not switched or sliding[0] < (first or 0):
        raise ValueError(
            f"{where}: layer_types lets layer {sliding[0]} slide, but use_sliding_window is "
            f"{file.use_sliding_window}, sliding_window {file.sliding_window} and "
            f"max_window_layers {first}. Put back what they were."
        )
    return file.sliding_window, sliding
