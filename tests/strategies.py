"""Random models, prompts and checkpoints for the tests. Everything random comes from integers that hypothesis draws.

All parameters are random, biases and norms too: fresh ones (0 and 1) would hide a swapped or dropped one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minits.checkpoint.config_json import write_config
from minits.qwen import Qwen2ForCausalLM, QwenConfig
from minits.supervision import Row
from minits.thinking import ThinkingConfig, ThinkingStates

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]

# For properties of which each example is a whole generation or a folder of files.
half = settings(max_examples=settings().max_examples // 2)


@dataclass(frozen=True)
class Shape:
    """A random model, up to its weights: hypothesis prints it whole."""

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    tie: bool = True
    window: int | None = None
    first_sliding: int = 0  # layers from this one on use the window
    chunk_size: int = 4
    inject_after: int = 1
    extract_after: int = 2
    vocab: int = 24
    limit: int = 256
    seed: int = 0

    def qwen(self) -> QwenConfig:
        """The backbone's configuration."""
        sliding = tuple(range(self.first_sliding, self.layers)) if self.window else ()
        return QwenConfig(
            vocab_size=self.vocab,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=40,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=self.limit,
            tie_word_embeddings=self.tie,
            sliding_window=self.window if sliding else None,
            sliding_layers=sliding,
        )

    def thinking(self) -> ThinkingConfig:
        """The choices of Thinking States."""
        return ThinkingConfig(
            self.chunk_size,
            self.inject_after,
            self.extract_after,
            eos_ids=(0, 2),
            pad_id=1,
            max_thought_tokens=min(64, self.limit - self.chunk_size),
        )


@st.composite
def shapes(draw, max_chunk: int = 16) -> Shape:
    """Any small model: grouped heads or not, tied or not, dense, sliding or mixed, any chunk size and layers."""
    layers = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2]))
    inject = draw(st.integers(0, layers))
    window = draw(st.sampled_from([None, 1, 5, 16]))
    return Shape(
        layers=layers,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        head_dim=8,
        tie=draw(st.booleans()),
        window=window,
        first_sliding=draw(st.integers(0, layers - 1)) if window else 0,
        chunk_size=draw(st.integers(1, max_chunk)),
        inject_after=inject,
        extract_after=draw(st.integers(inject, layers)),
        seed=draw(st.integers(0, 5)),
    )


@lru_cache(maxsize=64)
def build(
    shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu", thinks: bool = True
) -> ThinkingStates:
    """The model of a shape. Cached: do not change what it returns."""
    return fresh(shape, dtype, device, thinks)


def fresh(
    shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu", thinks: bool = True
) -> ThinkingStates:
    """As `build`, but the caller's own."""
    model = ThinkingStates(Qwen2ForCausalLM(shape.qwen()), shape.thinking(), thinks=thinks)
    randomise(model, shape.seed)
    return model.to(dtype=dtype, device=device).eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter, in the order of the names: matrices about 0, norms about 1, biases about 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = 0.3 if parameter.dim() > 1 else 0.5
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name)
            )


class steer:
    """While it is open, T's logit of the closing EOS is raised by `bias`, so that more or fewer thoughts are trivial."""

    def __init__(self, model: ThinkingStates, bias: float) -> None:
        self.model, self.bias = model, bias

    def __enter__(self) -> None:
        def raise_eos(_module, _inputs, logits):
            logits[..., self.model.config.thought_end] += self.bias
            return logits

        self.handle = self.model.thinking_block.lm_head.register_forward_hook(raise_eos)

    def __exit__(self, *_error) -> None:
        self.handle.remove()


# From "nearly always trivial" over mixed to "never": the spread of T's logits on these models is about 3.
biases = st.sampled_from([1e4, 8.0, 5.0, 3.0, 1.5, 0.0, -1e4])


def prompts(shape: Shape, rows: int = 4, chunks: int = 5) -> st.SearchStrategy[list[list[int]]]:
    """1 … rows prompts, their lengths around multiples of the chunk size more often than not."""
    c = shape.chunk_size
    lengths = st.one_of(
        st.builds(
            lambda k, off: max(1, k * c + off), st.integers(0, chunks), st.sampled_from([-1, 0, 1])
        ),
        st.integers(1, chunks * c),
    )
    row = lengths.flatmap(
        lambda n: st.lists(st.integers(0, shape.vocab - 1), min_size=n, max_size=n)
    )
    return st.lists(row, min_size=1, max_size=rows)


@st.composite
def training_rows(draw, shape: Shape, rows: int = 4, chunks: int = 4) -> list[Row]:
    """Rows with random ids, answer lengths and thoughts (trivial ones among them), as `encode_example` makes them."""
    made = []
    for ids in draw(prompts(shape, rows, chunks)):
        answer = draw(st.lists(st.integers(3, shape.vocab - 1), min_size=0, max_size=6))
        whole = [*ids, *answer, 0]
        complete = (len(whole) - 1) // shape.chunk_size
        thought = st.lists(st.integers(3, shape.vocab - 1), max_size=6)
        thoughts = [[*draw(thought), 0] for _ in range(complete)]
        made.append(Row(whole, len(ids), thoughts))
    return made


# -- checkpoints on disk -------------------------------------------------------------------------------------------------


def write_tokenizer(path: Path, size: int) -> None:
    """A byte-level tokenizer.json without merges, 256 bytes and one control token: ids 0 … 256, if `size` allows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    assert size > 256, "the vocabulary must hold 256 bytes and <|endoftext|>"
    backend.save(str(path))


def write_checkpoint(
    folder: Path,
    shape: Shape = Shape(vocab=260),
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    rope: str = "theta",
    eos: object = 256,
    change=None,
    **config,
) -> Path:
    """A Hugging Face folder with a random backbone of `shape` (vocabulary: 256 bytes, EOS, 3 rows of padding).

    rope: "theta" (rope_theta) or "parameters" (rope_parameters). change: a function that edits the dict of tensors
    before it is written. config: keys of config.json to replace (None: left out).
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone = Qwen2ForCausalLM(shape.qwen())
    randomise(backbone, shape.seed)
    tensors = {
        name: t.detach().to(dtype).contiguous()
        for name, t in backbone.state_dict().items()
        if not (shape.tie and name == "lm_head.weight")
    }
    if change:
        change(tensors)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        files = {
            name: f"model-{i * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors"
            for i, name in enumerate(names)
        }
        for file in set(files.values()):
            save_file(
                {n: tensors[n] for n in names if files[n] == file},
                folder / file,
                metadata={"format": "pt"},
            )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": files})
        )
    raw = write_config(shape.qwen()) | {"eos_token_id": eos}
    if rope == "parameters":
        raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"}
    raw |= config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    write_tokenizer(folder / "tokenizer.json", shape.vocab)
    return folder


def with_seed(shape: Shape, seed: int) -> Shape:
    """The same shape with other weights."""
    return replace(shape, seed=seed)
