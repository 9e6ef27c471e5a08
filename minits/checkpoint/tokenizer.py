"""Text <-> ids with the `tokenizers` package: user text never turns into control ids."""
from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer as Backend

from minits.checkpoint.files import Json, printable, require

UNKNOWN = "<unk>"


class Tokenizer:
    """A Hugging Face `tokenizer.json` with the ids that end a text.

    Control tokens ("special": `<|endoftext|>` and the like) that stand in a text stay text: a
    prompt is data. Words that were added to the vocabulary without being special are one id each.
    """

    def __init__(
        self,
        definition: str,  # the JSON of tokenizer.json
        eos_ids: tuple[int, ...],  # the first closes answers and thoughts
        pad_id: int,
    ) -> None:
        self.definition, self.eos_ids, self.pad_id = definition, eos_ids, pad_id
        self.companions: dict[str, bytes] = {}  # files that go with it, by name
        raw = json.loads(definition)
        self._decoder, self._encoder = (Backend.from_str(definition) for _ in range(2))
        self._encoder.encode_special_tokens = True  # as text
        # Tokenizers that were called with them keep truncation and padding in the file.
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._encoder.post_processor = None  # it may move offsets
        if hasattr(self._encoder.model, "dropout"):
            self._encoder.model.dropout = None
        self._unknown = self._decoder.token_to_id(raw["model"].get("unk_token") or UNKNOWN)
        self.start_ids = start_ids(raw)  # of a prompt
        vocabulary = self._decoder.get_vocab()
        self.known_ids = frozenset(vocabulary.values())
        check_ids(raw, vocabulary)

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: tuple[int, ...], pad_id: int) -> Tokenizer:
        """Reads folder/tokenizer.json.

        Raises FileNotFoundError or ValueError saying what is there instead.
        """
        path = require(folder / "tokenizer.json")
        try:
            return cls(path.read_bytes().decode(), eos_ids, pad_id)
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise ValueError(
                f"{path} is not a readable tokenizer: {culprit(path)}{printable(error)}. Download "
                "it again."
            ) from error

    @property
    def eos_id(self) -> int:
        """The id that closes answers and thoughts."""
        return self.eos_ids[0]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Raises as `encode_with_offsets`."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(
        self, text: str, start: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and (start, end) of each in characters of `text` as given, not as normalised.

        start: with the tokens that begin a prompt, at (0, 0), if the tokenizer's template has any.

        Raises ValueError for a word that the vocabulary lacks, or for what is no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            # So Python shows bytes of another encoding, on the command line for one.
            raise ValueError(
                f"{printable(repr(text))} is not UTF-8 text: {error.reason}. Convert it first."
            ) from error
        encoded = self._encoder.encode(text, add_special_tokens=False)
        if self._unknown in encoded.ids:
            at, end = encoded.offsets[encoded.ids.index(self._unknown)]
            words = sorted(word for word in self._encoder.get_vocab() if not word.startswith("<"))
            raise ValueError(
                f"the word {printable(repr(text[at:end]))} is not in this small vocabulary, where "
                f"a space belongs to the word after it: {printable(words, 800)}. Use these words, "
                "or name another model (--model, --run); a task of one's own gives the tiny one "
                "its words in `texts`."
            )
        before = self.start_ids if start else []
        return [*before, *encoded.ids], [(0, 0)] * len(before) + encoded.offsets

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; control tokens are shown, ids that the tokenizer lacks are left out."""
        known = [i for i in ids if i in self.known_ids]
        return self._decoder.decode(known, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """The token's own spelling, None where the id stands for nothing."""
        return self._decoder.id_to_token(token_id)

    def without_eos(self, ids: list[int]) -> list[int]:
        """`ids` without a closing EOS."""
        return ids[:-1] if ids and ids[-1] in self.eos_ids else ids

    def pieces(self, ids: list[int]) -> list[str]:
        """The text that becomes certain with each of `ids`: perhaps nothing, where it is a byte."""
        decoder = TextDecoder(self)
        found = [*map(decoder.put, ids)]
        return [*found[:-1], found[-1] + decoder.end()] if found else []


def start_ids(raw: Json) -> list[int]:
    """What a tokenizer.json's template puts before a text."""
    processor, ids = raw.get("post_processor") or {}, []
    for template in processor.get("processors", [processor]):
        for piece in template.get("single", []):
            if "Sequence" in piece:
                break
            ids += template["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return ids


def check_ids(raw: Json, vocabulary: dict[str, int]) -> None:
    """Raises ValueError where a tokenizer.json contradicts itself, which the package lets pass."""
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("vocab gives one id to two tokens")
    for added in raw.get("added_tokens") or []:
        if vocabulary.get(added["content"]) != added["id"]:
            raise ValueError(f"added_tokens has {added['content']!r} with an id {added['id']}")
    unknown = raw["model"].get("unk_token")
    if unknown is not None and unknown not in vocabulary:
        raise ValueError(f"unk_token {unknown!r} is not in vocab")


def culprit(path: Path) -> str:
    """The key of a tokenizer.json without which it could be read, and a colon; else nothing."""
    with suppress(Exception):
        raw = json.loads(path.read_bytes())
        for key in ("", *raw):
            with suppress(Exception):
                Backend.from_str(json.dumps({k: v for k, v in raw.items() if k != key}))
                return f"{key}: " if key else ""
        return "model: "
    return ""


class TextDecoder:
    """Turns ids into text as they come, holding back what may be half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.waiting: list[int] = []

    def put(self, token: int) -> str:
        """The text that became certain with `token`: often one word, sometimes nothing."""
        self.waiting.append(token)
        # The bytes of an unfinished character decode to U+FFFD, so a text without one at its end
        # is whole.
        unfinished = self.tokenizer.decode(self.waiting).endswith("\ufffd")
        return "" if unfinished else self.end()

    def end(self) -> str:
        """What is still held back, an unfinished character as U+FFFD."""
        text, self.waiting = self.tokenizer.decode(self.waiting), []
        return text
