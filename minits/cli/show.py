"""What `infer` shows: prompt and answer with thoughts in place, a table of chunks, counters."""
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from minits.checkpoint.tokenizer import TextDecoder, Tokenizer
from minits.generation import Event, GenerationConfig, GenerationResult
from minits.thinking import Engine, Thought


@dataclass(frozen=True)
class Card:
    """One prompt, and what came of it."""

    title: str
    prompt: Sequence[int]
    result: GenerationResult  # with its texts
    tokenizer: Tokenizer = field(repr=False)
    chunk_size: int
    config: GenerationConfig
    right: bool | None = None  # None: nobody knows
    expected: str | None = None
    golds: Sequence[Sequence[int]] = ()  # thoughts by chunk, where they are known
    given: Mapping[int, Sequence[int]] = field(default_factory=dict)  # what T was made to say

    @cached_property
    def texts(self) -> list[str]:
        """The text that became certain with each token of prompt and answer."""
        return self.tokenizer.pieces(self.prompt) + self.tokenizer.pieces(self.result.ids)

    @cached_property
    def first_wrong(self) -> int | None:
        """The first chunk whose thought is not the gold one."""
        return next((k for k in range(len(self.golds)) if not self.right_thought(k)), None)

    def right_thought(self, k: int) -> bool:
        """Whether the thought after chunk k is the gold one; one that never came is not."""
        return self.result.thought_ids[k : k + 1] == [[*self.golds[k]]]

    def inline(self) -> str:
        """Prompt and answer with the thoughts in place, as `infer` prints them."""
        pieces, c = self.texts.copy(), self.chunk_size
        for k, (ids, text) in enumerate(zip(self.result.thought_ids, self.result.thoughts)):
            if len(ids) > 1:
                pieces[(k + 1) * c - 1] += in_brackets(text)
        pieces[len(self.prompt) - 1] += "  ->"
        return "".join(pieces)


def in_brackets(thought: str) -> str:
    """A thought within the text, kept on one line."""
    return f" [T:{json.dumps(thought, ensure_ascii=False)[1:-1]}]"


class InlineText:
    """Prompt and answer of one row, each non-trivial thought after the last token of its chunk.

    Takes the events of the row as `decode` gives them: the thoughts of the prompt, then tokens and
    thoughts in turn. It also knows where the answer is to end: at EOS, or where one of `stops`
    begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        chunk_size: int,
        *,
        at_once: bool = False,  # print each piece as soon as it is certain
        stops: Sequence[str] = (),  # texts that end the answer, which is cut before them
    ) -> None:
        self.tokenizer = tokenizer
        self.decoder = TextDecoder(tokenizer)
        self.prompt = list(prompt)  # what is not shown yet
        self.chunk_size = chunk_size
        self.at_once, self.stops = at_once, stops
        self.pieces: list[str] = []
        self.ids: list[int] = []  # of the answer
        self.said = ""  # their text
        self.stopped = False  # by one of `stops`
        self.ended = False
        self.thoughts: list[Thought] = []

    def take(self, event: Event) -> None:
        """Takes the next event; after the end it is ignored."""
        if self.ended:
            return
        if isinstance(event, Thought):
            self.thoughts.append(event)
            self.show_prompt(self.chunk_size)
            if not event.trivial:
                self.show(in_brackets(self.tokenizer.decode(event.ids[:-1])))
            return
        if not self.ids:
            self.show_prompt(len(self.prompt))
            self.show(self.decoder.end() + "  ->")
        self.ids.append(event)
        self.ended = event in self.tokenizer.eos_ids
        if not self.ended:
            self.say(self.decoder.put(event))

    def say(self, piece: str) -> None:
        """The next piece of the answer, up to the first stop."""
        before, said = len(self.said), self.said + piece
        places = [said.find(stop) for stop in self.stops if stop in said]
        self.stopped = self.ended = bool(places)
        self.said = said[: min(places, default=None)]
        # What stands before is shown already, the beginning of a longer stop perhaps.
        self.show(self.said[before:])

    def show_prompt(self, tokens: int) -> None:
        """Shows up to so many more tokens of the prompt."""
        for token in self.prompt[:tokens]:
            self.show(self.decoder.put(token))
        del self.prompt[:tokens]

    def show(self, text: str) -> None:
        """Adds a piece to the line; printed at once, or when it ends."""
        self.pieces.append(text)
        if self.at_once:
            print(text, end="", flush=True)

    def end(self) -> None:
        """What is still held back."""
        self.show(self.decoder.end())
        print("" if self.at_once else "".join(self.pieces))


def chunk_table(engine: Engine, card: Card) -> str:
    """Each complete chunk: its text, its thought, and the norm of the state that it gives.

    Beside that of the embeddings, to which states are added.
    """
    result, c = card.result, card.chunk_size
    ids = [*card.prompt, *result.ids]
    norms = []
    with torch.no_grad():
        if result.thought_ids:
            states = engine.states(result.thought_ids).float()
            norms = states.norm(dim=-1).mean(-1).tolist()
        embedded = engine.backbone.model.embed_tokens(torch.tensor(ids, device=engine.device))
        usual = embedded.float().norm(dim=-1).mean().item()
    lines = [f"chunk  state norm (embeddings: {usual:.2f})  text -> thought"]
    for k, (thought, norm) in enumerate(zip(result.thoughts, norms)):
        text = "".join(card.texts[k * c : (k + 1) * c])
        cut = "  (cut)" if k in result.cut_thoughts else ""
        lines.append(f"{k:5}  {norm:10.2f}  {text!r} -> {thought!r}{cut}")
    return "\n".join(lines)


REASONS = {"eos": "EOS", "length": "the limit --max-new-tokens", "stop": "--stop"}


def counters(card: Card, seconds: float | None = None) -> str:
    """How the prefill went and why the answer ended; and how long it took, where that is given."""
    result, cut = card.result, len(card.result.cut_thoughts)
    chunks = -(-len(card.prompt) // card.chunk_size)
    cut_words = f", {cut} thoughts cut by --max-thought-tokens" if cut else ""
    took = "" if seconds is None else f"; {seconds:.2f} s"
    return (
        f"{len(card.prompt)} tokens in {chunks} chunks; {result.nontrivial} non-trivial thoughts "
        f"entered the prompt; {result.rounds} rounds, {result.chunk_passes} chunk passes; "
        f"{len(result.ids)} new tokens, stopped by {REASONS[result.stop_reason]}{cut_words}{took}"
    )
