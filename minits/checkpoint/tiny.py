"""The offline default: a small Qwen2.5-shaped model, made on the spot, with a tokenizer of words.

Real Qwen2.5 weights are what the method is for. This model is for seeing all of it work in a minute
on a laptop. For texts of one's own the tokenizer is made from them: pairs of bytes, so that it can
spell any text.
"""
import json
from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import nn

from minits.checkpoint.tokenizer import UNKNOWN, Tokenizer
from minits.checkpoint.weights import blocked_ids
from minits.qwen import Qwen2ForCausalLM, QwenConfig
from minits.thinking import ThinkingConfig, ThinkingStates

ASSETS = Path(__file__).parents[1] / "assets"
ENTRIES = 2000  # most entries of a tokenizer that is made on the spot
LETTERS = ascii_lowercase[:8]  # variables that the vocabulary knows
WORDS = [
    "<eos>", "<pad>", UNKNOWN,
    "The", " The", " coin", " starts", " at", " state", " heads", " tails", ".",
    " Alice", " Bob", " flips", " doesn't", " flip", " the", " final", " of", " is",
    "Track", " variables", " values", " Final", ":", ";", "=", "+",
    *"0123456789", *LETTERS, *(" " + letter for letter in LETTERS),
]


def tiny_config(window: int | None, vocab_size: int = len(WORDS)) -> QwenConfig:
    """4 layers of 64; `window` tokens of sliding attention in all of them, or dense for None.

    A window makes the length generalise: dense attention meets distances in a long prompt that it
    never saw in training, and breaks there.
    """
    layers = 4
    return QwenConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        sliding_window=window,
        sliding_layers=tuple(range(layers)) if window else (),
    )


def make_tiny(
    *,
    seed: int,
    window: int | None,  # see `tiny_config`
    thinks: bool,
    texts: Iterable[str] | None = None,  # as for `tiny_tokenizer`
    spare: int = 0,  # rows of the vocabulary that no token uses
) -> tuple[ThinkingStates, Tokenizer]:
    """A fresh tiny model and its tokenizer; T and C start as copies, as on real weights.

    Its choices of Thinking States are the usual ones; a training puts its own in `model.config`.
    """
    tokenizer = tiny_tokenizer(texts)
    vocab_size = len(tokenizer.known_ids) + spare
    config = ThinkingConfig(8, 1, 3, tokenizer.eos_ids, tokenizer.pad_id)
    backbone = Qwen2ForCausalLM(tiny_config(window, vocab_size))
    model = ThinkingStates(backbone, config, thinks=thinks)
    init_random(model.backbone, seed)
    if thinks:
        model.copy_blocks()
    model.blocked = blocked_ids(tokenizer, vocab_size)
    return model, tokenizer


def init_random(model: nn.Module, seed: int) -> None:
    """A fresh start: matrices from a normal distribution, biases 0, norms 1.

    A standard deviation of 0.02, usual for large models, leaves one this small on a plateau for 500
    steps.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def tiny_tokenizer(texts: Iterable[str] | None = None) -> Tokenizer:
    """A tokenizer made from `texts`, always the same one; for None that which ships.

    Raises ValueError if that which ships is not that of WORDS.
    """
    shipped = ASSETS / "tokenizer.json"
    text = shipped.read_text(encoding="utf-8") if texts is None else learned_definition(texts)
    tokenizer = Tokenizer(text, eos_ids=(0,), pad_id=1)
    if texts is None and tokenizer.known_ids != set(range(len(WORDS))):
        raise ValueError(
            f"{shipped} has {len(tokenizer.known_ids)} words, WORDS in "
            f"minits/checkpoint/tiny.py has {len(WORDS)}: write what tokenizer_definition() gives "
            "into that file."
        )
    return tokenizer


def tokenizer_definition() -> str:
    """The JSON of assets/tokenizer.json: words with a leading space, digits one by one, signs."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, UNKNOWN))
    pattern = Regex(r" ?[A-Za-z]+(?:'[a-z]+)?| ?[0-9]| ?[^\sA-Za-z0-9]|\s")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(WORDS[:2])
    return json.dumps(json.loads(backend.to_str()), indent=1, ensure_ascii=False) + "\n"


def learned_definition(texts: Iterable[str]) -> str:
    """The JSON of a byte-level BPE tokenizer trained on `texts`; digits stay single, as Qwen's."""
    backend = Backend(models.BPE())
    pattern = Regex(r" ?\p{L}+(?:'\p{L}+)?| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(pattern, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        min_frequency=2,
        special_tokens=WORDS[:2],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()
