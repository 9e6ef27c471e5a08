"""How samples are laid into the rows of a batch, and sizes that repeat.

- "rows": one sample a row.
- "pack": several samples a row, blind to one another, each at positions from 0: the same losses
  with less padding.
- "long_rows": several samples a row, and attention, positions and chunks run on over all of them:
  another training than the paper's.
"""
from collections.abc import Sequence

LAYOUTS = ("rows", "pack", "long_rows")


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


class ExactSizes:
    """Sizes of a batch as they are, or `least` where that is more.

    Training T and C uses 1: a batch without thoughts would leave them out, and other processes
    wait for their gradients.
    """

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def width(self, tokens: int, chunk_size: int) -> int:
        """Tokens a row, at least `tokens` (a multiple of `chunk_size`)."""
        return tokens

    def room(self, tokens: int) -> int:
        """Tokens of a row for several samples, at least `tokens`."""
        return tokens

    def size(self, width: int, name: str, needed: int, step: int = 16) -> int:
        """Entries of what is called `name` in batches of that width; step: its granularity."""
        return max(needed, self.least)


class BucketedSizes(ExactSizes):
    """Sizes with some room that only grow, so that batches of one width soon have one shape.

    CUDA graphs and compiled layers need shapes that repeat.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__(least)
        self.known: dict[tuple[int, str], int] = {}
        self.most_room = 0

    def width(self, tokens: int, chunk_size: int) -> int:
        """A multiple of about 32, nearly always the next one: rows of few different widths.

        Never 64 past a multiple of 128. There cuDNN's attention under a mask, torch's choice on an
        H100 since 2.11, has gradients that may not be finite (PyTorch's issue 196678; seen at 320).
        """
        step = round_up(32, chunk_size)
        width = round_up(tokens, step)
        return width + step if width % 128 == 64 else width

    def room(self, tokens: int) -> int:
        """The largest so far: a graph of another width would take the place of this one."""
        self.most_room = max(self.most_room, tokens)
        return self.most_room

    def size(self, width: int, name: str, needed: int, step: int = 16) -> int:
        """The largest size so far, or a twentieth more than `needed`."""
        if needed > self.known.get((width, name), -1):
            with_room = max(int(needed * 1.05), self.least)
            self.known[width, name] = round_up(with_room, step)
        return self.known[width, name]


def first_fit(spans: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(row, start) of samples of `spans` tokens: each in the first row with room for it."""
    used: list[int] = []
    places = []
    for span in spans:
        fitting = (row for row, tokens in enumerate(used) if tokens + span <= width)
        row = next(fitting, len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += span
    return places


def lay_out(
    spans: Sequence[int],  # tokens of each sample, in whole chunks
    layout: str,
    row_tokens: int,  # of a row for several samples; a longer sample makes all rows as wide
    chunk_size: int,
    sizes: ExactSizes,
) -> tuple[int, int, list[tuple[int, int]]]:
    """(tokens a row, rows, (row, start) of each sample)."""
    if layout == "rows":
        places = [(row, 0) for row in range(len(spans))]
        return sizes.width(max(spans), chunk_size), len(spans), places
    needed = max(*spans, round_up(row_tokens, chunk_size))
    room = sizes.room(needed)
    width = sizes.width(room, chunk_size)
    # What shares a long row is what is trained: a function of these samples, not of those before.
    places = first_fit(spans, room if layout == "pack" else needed)
    rows = 1 + max(row for row, _ in places)
    return width, sizes.size(width, "rows", rows, step=1), places
