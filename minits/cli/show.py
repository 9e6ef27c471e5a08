"""What `infer` shows: prompt and answer with thoughts in place, a table of chunks, counters."""
import json
from collections.abc import Sequence

import torch

from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import Event, GenerationResult
from minits.thinking import Engine, Thought


class InlineText:
    """Prompt and answer of one row, each non-trivial thought after the last token of its chunk.

    Told the events of the row: first the thoughts of the prompt's complete chunks, then tokens and
    thoughts as they come. It also knows where the answer is to end: at EOS, or where one of
    `stops` begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        chunk_size: int,
        *,
        thinks: bool,
        at_once: bool = False,  # print each piece as soon as it is certain
        stops: Sequence[str] = (),  # texts that end the answer, which is cut before them
    ) -> None:
        self.tokenizer, self.prompt, self.chunk_size = tokenizer, prompt, chunk_size
        self.decoder = tokenizer.decoder()
        self.at_once, self.stops = at_once, stops
        self.pieces: list[str] = []
        self.ids: list[int] = []  # of the answer
        self.said = ""  # their text
        self.stopped = False  # by one of `stops`
        self.ended = False
        self.expected = len(prompt) // chunk_size if thinks else 0
        self.thoughts: list[Thought] = []
        if not self.expected:
            self.show_prompt()

    def tell(self, event: Event) -> None:
        """Takes the next event; none counts after the end."""
        if self.ended:
            return
        if isinstance(event, Thought):
            self.thoughts.append(event)
            if len(self.thoughts) > self.expected:
                self.show_thought(event)
            elif len(self.thoughts) == self.expected:
                self.show_prompt()
            return
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

    def show_prompt(self) -> None:
        """The prompt, with its thoughts."""
        for read, token in enumerate(self.prompt, 1):
            self.show(self.decoder.put(token))
            if read % self.chunk_size == 0 and self.thoughts:
                self.show_thought(self.thoughts[read // self.chunk_size - 1])
        self.show(self.decoder.end() + "  ->")

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
        self.show(self.decoder.end())
        print("" if self.at_once else "".join(self.pieces))


def chunk_table(
    engine: Engine, tokenizer: Tokenizer, prompt: Sequence[int], result: GenerationResult
) -> str:
    """Each complete chunk: its text, its thought, and the norm of the state that it gives.

    Beside that of the embeddings, to which states are added.
    """
    c, ids = engine.config.chunk_size, [*prompt, *result.ids]
    with torch.no_grad():
        states = engine.states(result.thought_ids).float() if result.thought_ids else torch.zeros(0)
        norms = states.norm(dim=-1).mean(-1).tolist() if result.thought_ids else []
        embedded = engine.backbone.model.embed_tokens(torch.tensor(ids, device=engine.device))
        usual = embedded.float().norm(dim=-1).mean().item()
    lines = [f"chunk  state norm (embeddings: {usual:.2f})  text -> thought"]
    for k, (thought, norm) in enumerate(zip(result.thought_ids, norms)):
        text = tokenizer.decode(ids[k * c : (k + 1) * c])
        cut = "  (cut)" if k in result.cut_thoughts else ""
        said = tokenizer.decode(thought[:-1])
        lines.append(f"{k:5}  {norm:10.2f}  {text!r} -> {said!r}{cut}")
    return "\n".join(lines)


def counters(
    result: GenerationResult,
    prompt: Sequence[int],
    chunk_size: int,
    seconds: float | None = None,  # None: not told
) -> str:
    """How the prefill went and why the answer ended."""
    chunks = -(-len(prompt) // chunk_size)
    reasons = {"eos": "EOS", "length": "the limit --max-new-tokens", "stop": "--stop"}
    why = reasons[result.stop_reason]
    cut = len(result.cut_thoughts)
    cut_words = f", {cut} thoughts cut by --max-thought-tokens" if cut else ""
    took = "" if seconds is None else f"; {seconds:.2f} s"
    return (
        f"{len(prompt)} tokens in {chunks} chunks; {result.nontrivial} non-trivial thoughts "
        f"entered the prompt; {result.rounds} rounds, {result.chunk_passes} chunk passes; "
        f"{len(result.ids)} new tokens, stopped by {why}{cut_words}{took}"
    )
