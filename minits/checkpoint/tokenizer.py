"""Text <-> ids with the `tokenizers` package: user text never turns into control ids."""
from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend

from minits.checkpoint.files import require

UNKNOWN = "<unk>"


class Tokenizer:
    """A Hugging Face `tokenizer.json` with the ids that end a text.

    Control tokens (`<|endoftext|>` and the like) that stand in a text stay text: a prompt is data.
    Qwen2.5 has no start token and none is added.
    """

    def __init__(self, definition: str, eos_ids: tuple[int, ...], pad_id: int) -> None:
        """definition: the JSON of tokenizer.json. eos_ids: the first closes answers, thoughts."""
        self.definition, self.eos_ids, self.pad_id = definition, eos_ids, pad_id
        self._decoder = Backend.from_str(definition)
        # Encoding goes through a copy without added tokens, so that no spelling of one can be
        # recognised in a text.
        plain = json.loads(definition) | {"added_tokens": [], "post_processor": None}
        self._encoder = Backend.from_str(json.dumps(plain))
        self._unknown = self._decoder.token_to_id(UNKNOWN)
        self.known_ids = frozenset(self._decoder.get_vocab(with_added_tokens=True).values())

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: tuple[int, ...], pad_id: int) -> Tokenizer:
        """Reads folder/tokenizer.json.

        Raises FileNotFoundError or ValueError saying what is there instead.
        """
        path = require(folder / "tokenizer.json")
        try:
            return cls(path.read_text(encoding="utf-8"), eos_ids, pad_id)
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise ValueError(
                f"{path} is not a readable tokenizer: {error}. Download it again."
            ) from error

    @property
    def eos_id(self) -> int:
        """The id that closes answers and thoughts."""
        return self.eos_ids[0]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Raises as `encode_with_offsets`."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and (start, end) of each in characters of `text` as given, not as normalised.

        Control tokens in it stay text. Raises ValueError for a word that the vocabulary lacks, or
        for what is no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            # So Python shows bytes of another encoding, on the command line for one.
            raise ValueError(
                f"{text!r} is not UTF-8 text: {error.reason}. Convert it first."
            ) from error
        encoded = self._encoder.encode(text, add_special_tokens=False)
        if self._unknown is not None and self._unknown in encoded.ids:
            start, end = encoded.offsets[encoded.ids.index(self._unknown)]
            vocabulary = self._encoder.get_vocab()
            words = sorted(token for token in vocabulary if not token.startswith("<"))
            raise ValueError(
                f"the word {text[start:end]!r} is not in this small vocabulary, where a space "
                f"belongs to the word after it: {words}. Use these words, or a real model with "
                "--model."
            )
        return encoded.ids, encoded.offsets

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

    def decoder(self) -> TextDecoder:
        """A decoder for ids that come one by one."""
        return TextDecoder(self)


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
