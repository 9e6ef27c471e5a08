"""What `infer` shows: prompt and answer with each thought where it arose, a table of chunks, counters."""
from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from minits.generation import GenerationResult
from minits.thinking import ThinkingStates, Thought
from minits.checkpoint.tokenizer import Tokenizer


class InlineText:
    """Prints prompt and answer with each non-trivial thought where it arose, after the last token of its chunk.

    Told the events of one row: first the thoughts of the prompt's complete chunks, then tokens and thoughts as they
    come. `at_once` shows each piece as soon as it is certain, else all is shown at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], chunk_size: int, *, thinks: bool,
                 at_once: bool) -> None:
        self.tokenizer, self.stream, self.prompt, self.chunk_size = tokenizer, tokenizer.stream(), prompt, chunk_size
        self.at_once, self.pieces = at_once, []
        self.expected, self.thoughts = len(prompt) // chunk_size if thinks else 0, []
        if not self.expected:
            self.show_prompt()

    def tell(self, event: int | Thought) -> None:
        """Takes the next event."""
        if len(self.thoughts) < self.expected:
            self.thoughts.append(event)
            if len(self.thoughts) == self.expected:
                self.show_prompt()
        elif isinstance(event, Thought):
            self.show_thought(event)
        elif event not in self.tokenizer.eos_ids:
            self.show(self.stream.put(event))

    def show_prompt(self) -> None:
        """The prompt, with its thoughts."""
        for t, token in enumerate(self.prompt, 1):
            self.show(self.stream.put(token))
            if t % self.chunk_size == 0 and self.thoughts:
                self.show_thought(self.thoughts[t // self.chunk_size - 1])
        self.show(self.stream.end() + "  ->")

    def show_thought(self, thought: Thought) -> None:
        """A thought, kept on one line."""
        if not thought.trivial:
            text = self.tokenizer.decode(thought.ids[:-1])
            self.show(f" [T:{json.dumps(text, ensure_ascii=False)[1:-1]}]")

    def show(self, text: str) -> None:
        """A piece of the line."""
        self.pieces.append(text)
        if self.at_once:
            print(text, end="", flush=True)

    def end(self) -> None:
        """What is still held back."""
        self.show(self.stream.end())
        print("" if self.at_once else "".join(self.pieces), flush=True)


def chunk_table(model: ThinkingStates, tokenizer: Tokenizer, prompt: Sequence[int], result: GenerationResult) -> str:
    """Each complete chunk: its text, its thought, and the norm of the state it gives beside that of the embeddings."""
    c = model.config.chunk_size
    ids = [*prompt, *result.ids]
    with torch.no_grad():
        norms = model.states(result.thought_ids).float().norm(dim=-1).mean(-1).tolist()
        size = model.backbone.model.embed_tokens(torch.tensor(ids, device=model.device)).float().norm(dim=-1).mean().item()
    lines = [f"chunk  state norm (embeddings: {size:.2f})  text -> thought"]
    lines += [f"{k:5}  {norm:10.2f}  {tokenizer.decode(ids[k * c:(k + 1) * c])!r} -> {tokenizer.decode(z[:-1])!r}"
              + ("  (cut)" if k in result.cut_thoughts else "")
              for k, (z, norm) in enumerate(zip(result.thought_ids, norms))]
    return "\n".join(lines)


def counters(result: GenerationResult, prompt: Sequence[int], model: ThinkingStates, seconds: float) -> str:
    """How the prefill went and why the answer ended."""
    chunks = -(-len(prompt) // model.config.chunk_size)
    why = {"eos": "EOS", "length": "the limit --max-new-tokens"}[result.stop_reason]
    cut = f", {len(result.cut_thoughts)} thoughts cut by --max-thought-tokens" if result.cut_thoughts else ""
    return (f"{len(prompt)} tokens in {chunks} chunks; {result.nontrivial} non-trivial thoughts entered the prompt; "
            f"{result.rounds} rounds, {result.chunk_passes} chunk passes; {len(result.ids)} new tokens, stopped by "
            f"{why}{cut}; {seconds:.2f} s")
