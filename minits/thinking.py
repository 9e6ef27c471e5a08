"""Thinking States (paper, section 3): the thinking block T, the compression block C, and the teacher-forced loss.

Inference is in prefill.py and generation.py. All use the same `lower`, `middle` and `upper` parts of the backbone, so
that the state enters and leaves at the same place in training and in inference.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from minits.cache import KVCache
from minits.fast.cross_entropy import IGNORED, cross_entropy_sum
from minits.qwen import DecoderLayer, Frame, Qwen2ForCausalLM, QwenConfig, RMSNorm


@dataclass(frozen=True)
class ThinkingConfig:
    """The choices of Thinking States on top of a backbone; symbols as in the paper."""

    chunk_size: int  # c: tokens a chunk
    inject_after: int  # L_in: the state is added after this many layers
    extract_after: int  # L_out: H is taken after this many layers
    eos_ids: tuple[int, ...]  # every id that ends an answer; the first one ends a thought
    pad_id: int  # fills thoughts shorter than c before C reads them

    def check(self, config: QwenConfig) -> ThinkingConfig:
        """Returns self; raises ValueError naming the value that does not fit the backbone `config`."""
        layers = config.num_hidden_layers
        if not 1 <= self.chunk_size <= config.max_position_embeddings // 2:
            raise ValueError(f"chunk size {self.chunk_size}: must lie in 1 … {config.max_position_embeddings // 2} "
                             "(half of max_position_embeddings); 8 is the paper's choice.")
        if not 0 <= self.inject_after <= self.extract_after <= layers:
            raise ValueError(f"inject_after {self.inject_after}, extract_after {self.extract_after}: must satisfy "
                             f"0 <= inject_after <= extract_after <= {layers} (the model's layers).")
        return self

    @property
    def thought_end(self) -> int:
        """The id that closes every thought."""
        return self.eos_ids[0]


@dataclass(frozen=True)
class Thought:
    """One thought's ids, closing EOS included; `cut`: it was closed by the length limit, not by the model."""

    ids: list[int]
    cut: bool = False

    @property
    def trivial(self) -> bool:
        """EOS alone: nothing was thought, and the next state is exactly zero."""
        return len(self.ids) == 1


def closed(rows: Sequence[list[int]], end: int) -> list[Thought]:
    """Thoughts from decoded rows of one length: each up to its first `end`, or closed with one there and cut."""
    return [Thought(row[:row.index(end) + 1]) if end in row else Thought([*row, end], cut=True) for row in rows]


@dataclass
class OpenThoughts:
    """N thoughts that T is decoding, a token at a time; they may have come to different lengths."""

    cache: KVCache  # T's own: one layer, a row a thought
    tokens: Tensor  # [>= N] the newest token of each
    positions: Tensor  # [>= N] the position that T reads it at
    size: int  # N; rows past it are padding
    limit: int  # a thought of so many tokens is closed

    def newest(self) -> list[int]:
        """The newest token of each thought. Waits for the device."""
        return self.tokens[:self.size].tolist()


class ThinkingBlock(nn.Module):
    """T: one decoder layer, its own final norm and unembedding. The embedding is the backbone's."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(config, sliding=config.num_hidden_layers - 1 in config.sliding_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, frame: Frame, last: int = 1) -> Tensor:
        """[N, T, E] (the c vectors of H, then embeddings of thought tokens) -> [N, last, E]: the normed vectors of the
        last places, for `lm_head`."""
        return self.norm(self.layer(x, frame)[:, -last:])


class CompressionBlock(nn.Module):
    """C: one causal decoder layer over the thought's embeddings."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(config, sliding=0 in config.sliding_layers)

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """[N, n, E] -> [N, n, E]."""
        return self.layer(x, frame)


@dataclass(frozen=True)
class Batch:
    """Samples of one forward pass, as tensors. A flat position is row * T + t, a flat chunk row * K + k, T = K * c.

    A sample begins on a chunk border. Rows are padded on the right and attention is causal, so no real token ever sees
    padding. Index tensors may be filled up too, so that shapes repeat: such places have the label `IGNORED`, or -1 in
    `state_at`, and change nothing.
    """

    ids: Tensor  # [B, T] backbone input: each sample without its last token, which is never read
    positions: Tensor  # [B or 1, T]
    segments: Tensor  # [B, T] the sample of each token, where samples share a row and must not see one another; else [0]
    lm_at: Tensor  # [M] flat positions whose next token is supervised (answer and closing EOS)
    lm_labels: Tensor  # [M]
    trivial_at: Tensor  # [N] flat chunks whose thought is EOS alone
    trivial_labels: Tensor  # [N] that EOS
    thought_at: Tensor  # [R] flat chunks with any other thought
    thoughts: Tensor  # [R, n] ids incl. EOS, padded with pad_id to n >= c
    lengths: Tensor  # [R] tokens in each thought, EOS included
    thought_tokens_at: Tensor  # [P] flat places in [R, n] that hold a real token, not padding
    thought_labels: Tensor  # [P] those tokens
    state_of: Tensor  # [R'] the thoughts (0 … R-1) that have a next chunk in their sample, whole or partial
    state_at: Tensor  # [R'] that chunk, flat

    @property
    def counts(self) -> Tensor:
        """[2]: the tokens that L_LM and L_T are means over, every closing EOS included."""
        real = [(labels != IGNORED).sum() for labels in (self.lm_labels, self.trivial_labels, self.thought_labels)]
        return torch.stack([real[0], real[1] + real[2]])

    @property
    def tensors(self) -> list[Tensor]:
        """All fields, in order."""
        return [getattr(self, f.name) for f in fields(self)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `function` of every tensor."""
        return Batch(*map(function, self.tensors))


@dataclass(frozen=True)
class Losses:
    """Summed cross-entropies in nats; divide by the token counts of the whole optimizer step."""

    lm: Tensor
    thought: Tensor


class ThinkingStates(nn.Module):
    """A backbone with T and C; without them (`thinking_block` is None) it is plain Qwen2.5, the baselines' model."""

    def __init__(self, backbone: Qwen2ForCausalLM, config: ThinkingConfig, *, thinks: bool = True) -> None:
        super().__init__()
        self.config = config.check(backbone.config)
        self.backbone = backbone
        self.thinking_block = ThinkingBlock(backbone.config) if thinks else None
        self.compression_block = CompressionBlock(backbone.config) if thinks else None
        # Ids that the tokenizer lacks (the vocabulary is padded for speed) are never emitted, nor thought.
        self.register_buffer("blocked", torch.zeros(backbone.config.vocab_size, dtype=torch.bool), persistent=False)

    @property
    def thinks(self) -> bool:
        """Whether T and C exist."""
        return self.thinking_block is not None

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """All of them: the backbone's, T's and C's."""
        return [module for module in self.modules() if isinstance(module, DecoderLayer)]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.model.embed_tokens.weight.device

    def copy_blocks(self) -> None:
        """Initialises T and C as independent copies of parts of the backbone (paper, appendix A.1)."""
        model = self.backbone.model
        self.thinking_block.layer.load_state_dict(model.layers[-1].state_dict())
        self.thinking_block.norm.load_state_dict(model.norm.state_dict())
        self.thinking_block.lm_head.load_state_dict(self.backbone.lm_head.state_dict())
        self.compression_block.layer.load_state_dict(model.layers[0].state_dict())

    # -- the backbone in three parts; the frame says at which positions and with which cache ------------------------

    def frame(self, positions: Tensor, cache: KVCache, span: int) -> Frame:
        """What the layers share in one pass over tokens at `positions` [B, T], of which the last is below `span`."""
        return self.backbone.frame(positions, cache, span)

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """A cache for `rows` rows of up to `slots` tokens; `layers` None: those of the backbone."""
        return self.backbone.new_cache(rows, slots, layers)

    def lower(self, ids: Tensor, frame: Frame) -> Tensor:
        """X: ids [B, T] -> [B, T, E] after layer L_in. Depends on no state."""
        return self.backbone.run(self.backbone.model.embed_tokens(ids), frame, range(self.config.inject_after))

    def middle(self, x: Tensor, frame: Frame) -> Tensor:
        """H: X + S [B, T, E] -> [B, T, E] after layer L_out (eqs. 1, 2)."""
        return self.backbone.run(x, frame, range(self.config.inject_after, self.config.extract_after))

    def upper(self, h: Tensor, frame: Frame) -> Tensor:
        """H [B, T, E] -> final normed vectors [B, T, E], ready for the unembedding."""
        return self.backbone.model.norm(self.last_layers(h, frame))

    def last_layers(self, h: Tensor, frame: Frame) -> Tensor:
        """H [B, T, E] -> the last layer's outputs [B, T, E]."""
        return self.backbone.run(h, frame, range(self.config.extract_after, self.backbone.config.num_hidden_layers))

    # -- thoughts ----------------------------------------------------------------------------------------------------

    def pick(self, logits: Tensor) -> Tensor:
        """The one argmax rule: [..., V] -> the highest logit's id, the lowest id at ties, never a blocked one."""
        return logits.masked_fill(self.blocked, -torch.inf).argmax(-1)

    def new_thoughts(self, rows: int, max_thought_tokens: int) -> OpenThoughts:
        """Room for `rows` thoughts of up to `max_thought_tokens` tokens, the c vectors of H before them."""
        cache = self.new_cache(rows, self.config.chunk_size + max_thought_tokens, layers=1)
        positions = torch.full((rows,), self.config.chunk_size, device=self.device)
        return OpenThoughts(cache, torch.zeros_like(positions), positions, rows, max_thought_tokens)

    def begin_thoughts(self, h: Tensor, max_thought_tokens: int) -> OpenThoughts:
        """The thoughts after N chunks, h [N, c, E], with the first token of each. One pass, no loop."""
        N, c, _ = h.shape
        thoughts = self.new_thoughts(N, max_thought_tokens)
        positions = torch.arange(c, device=h.device)[None].expand(N, c)
        out = self.thinking_block(h, self.backbone.frame(positions, thoughts.cache, span=c))[:, 0]
        thoughts.tokens.copy_(self.pick(self.thinking_block.lm_head(out)))
        return thoughts

    def think_step(self, thoughts: OpenThoughts) -> None:
        """One step of T: the next token of every open thought takes the place of its newest one (eq. 3)."""
        x = self.backbone.model.embed_tokens(thoughts.tokens)[:, None]  # [N, 1, E]
        out = self.thinking_block(x, self.backbone.frame(thoughts.positions[:, None], thoughts.cache))[:, 0]
        thoughts.tokens.copy_(self.pick(self.thinking_block.lm_head(out)))
        thoughts.positions += 1

    def gather_thoughts(self, parts: Sequence[tuple[OpenThoughts, Sequence[int]]]) -> OpenThoughts:
        """The thoughts with those numbers of each part, as one batch, in that order; the parts are used up."""
        if len(parts) == 1 and list(parts[0][1]) == list(range(parts[0][0].size)):
            return parts[0][0]
        joined = self.new_thoughts(sum(len(chosen) for _, chosen in parts), parts[0][0].limit)
        start = 0
        for source, chosen in parts:
            index, to = on_device(chosen, self.device), slice(start, start + len(chosen))
            joined.cache.k[:, to], joined.cache.v[:, to] = source.cache.k[:, index], source.cache.v[:, index]
            joined.tokens[to], joined.positions[to] = source.tokens[index], source.positions[index]
            start = to.stop
        return joined

    def finish_thoughts(self, thoughts: OpenThoughts) -> list[Thought]:
        """Decodes N thoughts to their ends, greedily and as one batch."""
        end, tokens = self.config.thought_end, [thoughts.newest()]
        ended = [token == end for token in tokens[0]]
        while not all(ended) and len(tokens) < thoughts.limit:
            self.think_step(thoughts)
            tokens.append(thoughts.newest())
            ended = [before or token == end for before, token in zip(ended, tokens[-1])]
        return closed([list(row) for row in zip(*tokens)], end)

    def compress(self, thoughts: Tensor, lengths: Tensor) -> Tensor:
        """C over padded thoughts [R, n], n >= c: the last c outputs of each, [R, c, E] (eq. 4)."""
        return self.compress_embedded(self.backbone.model.embed_tokens(thoughts), lengths)

    def compress_embedded(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The same from the thoughts' embeddings [R, n, E].

        A thought shorter than c is padded to c, and its padding is attended like any token; padding past
        max(length, c) only rounds out the batch and lies after everything that is used.
        """
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self.last_outputs(self.compression_block(x, self.backbone.frame(positions)), lengths)

    def last_outputs(self, out: Tensor, lengths: Tensor) -> Tensor:
        """The state [R, c, E] in C's outputs [R, n, E]: those of the last c places of max(length, c)."""
        c, rows = self.config.chunk_size, torch.arange(len(out), device=out.device)[:, None]
        starts = lengths.clamp(min=c) - c  # [R]
        return out[rows, starts[:, None] + torch.arange(c, device=out.device)]

    def states(self, thoughts: Sequence[Sequence[int]]) -> Tensor:
        """The states [N, c, E] that follow N thoughts (ids incl. EOS); exactly zero after a trivial one."""
        weight = self.backbone.model.embed_tokens.weight
        states = weight.new_zeros(len(thoughts), self.config.chunk_size, weight.shape[1])
        if full := [i for i, ids in enumerate(thoughts) if len(ids) > 1]:
            lengths = [len(thoughts[i]) for i in full]
            width = max(self.config.chunk_size, *lengths)
            padded = pad([thoughts[i] for i in full], self.config.pad_id, width, self.device)  # [R, n], n >= c
            states[on_device(full, self.device)] = self.compress(padded, on_device(lengths, self.device))
        return states

    # -- decoding ----------------------------------------------------------------------------------------------------

    def read_tokens(self, tokens: Tensor, positions: Tensor, state: Tensor, open_h: Tensor, cache: KVCache, *,
                    steps: int, span: int) -> Tensor:
        """Reads one token of each row and picks the next, `steps` times over: the picked ids [steps, B].

        tokens [B] at `positions` [B] (rows at the waste slot stay there: they have ended). state [B, c, E] is that of
        the rows' current chunks, which must not end before the last step; their H goes to `open_h` [B, c, E].
        """
        rows, picked = torch.arange(len(tokens), device=tokens.device), []
        for _ in range(steps):
            frame = self.frame(positions[:, None], cache, span)
            places = positions % self.config.chunk_size
            x = self.lower(tokens[:, None], frame) + state[rows, places][:, None]  # [B, 1, E]
            h = self.middle(x, frame)
            open_h[rows, places] = h[:, 0]
            tokens = self.pick(self.backbone.lm_head(self.upper(h, frame)[:, 0]))
            picked.append(tokens)
            positions = torch.where(positions == cache.waste, positions, positions + 1)
        return torch.stack(picked)

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        """The teacher-forced pass: all chunks at once, each with the state of its gold predecessor (section 3.2)."""
        tokens, thoughts = self.embed(batch)
        h, out = self.teacher_forced(batch, tokens, thoughts)
        answers = self.backbone.model.norm(out.flatten(0, 1)[batch.lm_at])
        lm = cross_entropy_sum(answers, self.backbone.lm_head.weight, batch.lm_labels)
        return Losses(lm, self.thought_loss(h, batch, thoughts) if self.thinks else torch.zeros_like(lm))

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings of the tokens [B, T, E] and of the thoughts [R, n, E].

        One look-up for both, since the backward pass of each fills a gradient as large as the vocabulary.
        """
        (B, T), (R, n) = batch.ids.shape, batch.thoughts.shape
        x = self.backbone.model.embed_tokens(torch.cat([batch.ids.flatten(), batch.thoughts.flatten()]))
        return x[:B * T].view(B, T, x.shape[1]), x[B * T:].view(R, n, x.shape[1])

    def teacher_forced(self, batch: Batch, tokens: Tensor, thoughts: Tensor,
                       cache: KVCache | None = None) -> tuple[Tensor, Tensor]:
        """(H, the last layer's outputs), both [B, T, E], under the batch's gold thoughts; fills `cache` if one is given."""
        B, T = batch.ids.shape
        positions = batch.positions.clamp(max=self.backbone.config.max_position_embeddings - 1)  # padding may lie past it
        frame = self.backbone.frame(positions.expand(B, T) if cache is not None else positions, cache, span=T,
                                    segments=batch.segments if len(batch.segments) else None)
        x = self.backbone.run(tokens, frame, range(self.config.inject_after))
        if len(batch.state_of):
            states = self.compress_embedded(thoughts[batch.state_of], batch.lengths[batch.state_of])
            states = states * (batch.state_at >= 0)[:, None, None]
            chunks = x.reshape(-1, self.config.chunk_size, x.shape[-1])  # [B * K, c, E]
            x = chunks.index_add(0, batch.state_at.clamp(min=0), states.to(x.dtype)).view_as(x)
        h = self.middle(x, frame)
        return h, self.last_layers(h, frame)

    def thought_loss(self, h: Tensor, batch: Batch, thoughts: Tensor) -> Tensor:
        """Summed cross-entropy of T on the gold thoughts, given H [B, T, E] and their embeddings [R, n, E].

        A trivial thought is one prediction, made at the chunk's last vector: it takes no thought tokens as input, so
        those chunks run apart from the others.
        """
        c = self.config.chunk_size
        chunks = h.reshape(-1, c, h.shape[-1])  # [B * K, c, E]
        vectors, labels = [], []
        if len(batch.trivial_at):
            frame = self.backbone.frame(torch.arange(c, device=h.device)[None])
            vectors.append(self.thinking_block(chunks[batch.trivial_at], frame)[:, 0])
            labels.append(batch.trivial_labels)
        if len(batch.thought_at):
            given = thoughts[:, :-1]  # the last token is only predicted
            x = torch.cat([chunks[batch.thought_at].to(given.dtype), given], dim=1)  # [R, c + n - 1, E]
            frame = self.backbone.frame(torch.arange(x.shape[1], device=h.device)[None])
            vectors.append(self.thinking_block(x, frame, last=thoughts.shape[1]).flatten(0, 1)[batch.thought_tokens_at])
            labels.append(batch.thought_labels)
        if not labels:  # a batch without a complete chunk
            return h.new_zeros(())
        return cross_entropy_sum(torch.cat(vectors), self.thinking_block.lm_head.weight, torch.cat(labels))


def on_device(values: Sequence, device: torch.device | str) -> Tensor:
    """Whole numbers (or nested rows of them) as an int64 tensor on `device`, without waiting for the device.

    A plain `torch.tensor(values, device="cuda")` waits until the card has done all it was given before (measured: a
    third of a speculative prefill); from pinned memory the copy takes its place in the queue.
    """
    tensor = torch.tensor(values, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def pad(rows: Sequence[Sequence[int]], value: int, width: int, device: torch.device | str) -> Tensor:
    """Rows of ids, padded on the right with `value`: [len(rows), width], int64."""
    return on_device([[*row, *[value] * (width - len(row))] for row in rows], device).view(len(rows), width)
