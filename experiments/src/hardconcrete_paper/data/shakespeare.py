"""Tiny Shakespeare, character by character."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hardconcrete.demo.data import RemoteFile, Source, Split, check_split, obtain

SHAKESPEARE = Source(
    title="Tiny Shakespeare",
    folder="tinyshakespeare",
    places=("tinyshakespeare", ""),
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)

SHAKESPEARE_FILE = RemoteFile(
    "input.txt", md5_plain="6fb458f1232090904fb40fe944165e91", max_bytes=1_115_394
)

TRAINING_SHARE = 0.9
"""The fraction of the text for training. The rest is for testing."""


@dataclass(frozen=True)
class Text:
    """A text as numbers.

    Args:
        numbers: int64 [length], of characters in ``alphabet``.
        alphabet: the different characters, sorted.
        name: of the data set.

    Example:
        >>> import torch
        >>> text = Text(torch.tensor([1, 0, 1]), "ab", "small")
        >>> len(text), text.decode(text.numbers)
        (3, 'bab')
    """

    numbers: Tensor
    alphabet: str
    name: str

    def __len__(self) -> int:
        return len(self.numbers)

    def decode(self, numbers: Tensor) -> str:
        """The characters of numbers."""
        return "".join(self.alphabet[number] for number in numbers.tolist())

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Pieces [N, length] that begin at ``starts``, and the character that follows each entry.

        Both are gathered on the device of the text, without waiting for it.

        Example:
            >>> import torch
            >>> text = Text(torch.arange(6), "abcdef", "small")
            >>> text.windows(torch.tensor([0, 2]), 3)
            (tensor([[0, 1, 2],
                    [2, 3, 4]]), tensor([[1, 2, 3],
                    [3, 4, 5]]))
        """
        index = starts.unsqueeze(1) + torch.arange(length + 1, device=starts.device)
        pieces = self.numbers[index]
        return pieces[:, :-1], pieces[:, 1:]


def load_shakespeare(split: Split, data: Path | None = None) -> Text:
    """Tiny Shakespeare: 1,003,854 characters for training, 111,540 for testing, 65 different ones.

    Args:
        split: the first nine tenths of the text, or the rest.
        data: a directory that holds ``input.txt`` or ``input.txt.gz``, itself or in
            ``tinyshakespeare``; or else the one that ``HARDCONCRETE_DATA`` names. Without either
            the text comes from the cache, and into it from a public mirror.

    Example:
        With ``text = load_shakespeare("train")``, ``text.decode(text.numbers[:13])`` is
        ``"First Citizen"``. A directory that is named and does not hold the file is refused;
        nothing is fetched then.

        >>> from pathlib import Path
        >>> from hardconcrete.errors import DataError
        >>> try:
        ...     load_shakespeare("train", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).splitlines()[0])
        input.txt (or .gz) is not in nowhere (given as data), which is not a directory
    """
    check_split(split)
    (content,) = obtain(SHAKESPEARE, [SHAKESPEARE_FILE], data)
    alphabet = bytes(sorted(set(content)))  # it is all ASCII: a byte is a character
    number_of = torch.zeros(256, dtype=torch.long)
    number_of[list(alphabet)] = torch.arange(len(alphabet))
    numbers = number_of[torch.frombuffer(bytearray(content), dtype=torch.uint8).long()]
    cut = int(TRAINING_SHARE * len(numbers))
    part = numbers[:cut] if split == "train" else numbers[cut:]
    return Text(part, alphabet.decode("ascii"), "tinyshakespeare")
