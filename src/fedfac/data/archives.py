"""The official CIFAR archives, binary and Python, as streams: nothing is unpacked and no pickle runs anything."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfac.data.images import Bytes, ImageSet, Labels, check_labels, damaged
from fedfac.errors import DataError

_LARGEST = 2**28  # bytes of a member; the largest real one has 155 million
_WHOLE = 2**28  # bytes of an archive that is unpacked; the largest real one has 186 million


def read_archive(path: Path, members: Sequence[str], images: ImageSet) -> dict[str, Tensor]:
    """The members in the given order, in whichever order the archive has them."""
    read = _read_records if path.name.endswith("-binary.tar.gz") else _read_pickle
    parts: dict[str, tuple[Bytes, Labels]] = {}
    try:
        with (
            gzip.open(path) as unpacked,
            tarfile.open(fileobj=(stream := _Bounded(unpacked, path)), mode="r|") as archive,  # type: ignore[call-overload]
        ):
            for member in archive:
                name = _member_name(path, member)
                if name not in members:
                    continue
                content = archive.extractfile(member) if member.isreg() and member.size <= _LARGEST else None
                if content is None or name in parts:
                    raise DataError(f"{path}: {member.name} is not one plain file of at most {_LARGEST} bytes")
                parts[name] = read(content, f"{path}, {name}", images)
                check_labels(parts[name][1], f"{path}, {name}, record", 0, images)
            while stream.read(2**20):  # to the end, where the checksum is
                pass
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise DataError(damaged(path, "a gzipped tar archive", error)) from error
    absent = [name for name in members if name not in parts]
    if absent:
        raise DataError(f"{path} lacks {', '.join(absent)}; fetch the official {path.name} again")
    return _joined([parts.pop(name) for name in members], images)


class _Bounded:
    """A stream that ends in an error where no official archive goes on."""

    def __init__(self, stream: gzip.GzipFile, path: Path) -> None:
        self._stream, self._path, self._read = stream, path, 0

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes."""
        if self._read + size > _WHOLE + 2**20:
            raise DataError(f"{self._path} unpacks to more than {_WHOLE} bytes: this is not the official archive")
        content = self._stream.read(size)
        self._read += len(content)
        return content


def _joined(parts: list[tuple[Bytes, Labels]], images: ImageSet) -> dict[str, Tensor]:
    """One after the other in one tensor; each part is forgotten once it is copied."""
    targets = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    inputs = torch.empty((len(targets), *images.shape), dtype=torch.uint8)
    pixels, start = inputs.numpy(), 0
    while parts:
        part, _ = parts.pop(0)
        pixels[start : start + len(part)] = part.reshape(-1, *images.shape)
        start += len(part)
    return {"inputs": inputs, "targets": targets}


def _member_name(path: Path, member: tarfile.TarInfo) -> str:
    """A member's name without its folder; one that points out of the archive is refused, though nothing is unpacked."""
    name = PurePosixPath(member.name.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or ":" in member.name:
        raise DataError(f"{path} holds {member.name!r}, a path out of the archive: this is not the official archive")
    return name.name


def _read_records(content: IO[bytes], where: str, images: ImageSet) -> tuple[Bytes, Labels]:
    """The binary form: label bytes (CIFAR-100: coarse, fine), then the pixels, channel by channel."""
    raw = np.frombuffer(content.read(), dtype=np.uint8)
    length = images.label_bytes + prod(images.shape)
    if len(raw) == 0 or len(raw) % length:
        raise DataError(f"{where} has {len(raw)} bytes; wanted: a multiple of {length}. Fetch the archive again")
    records = raw.reshape(-1, length)
    return records[:, images.label_bytes :], records[:, images.label_bytes - 1].astype(np.int64)


def _read_pickle(content: IO[bytes], where: str, images: ImageSet) -> tuple[Bytes, Labels]:
    """The Python form: a pickled dictionary with the pixels as an array and the labels as a list."""
    try:
        made = _ArraysOnly(io.BytesIO(content.read()), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in made.items()}
        pixels, labels = fields["data"].value, fields[images.pickled_label]
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where} is not a batch of the official archive ({reason}); fetch it again") from error
    if pixels.shape != (len(labels), prod(images.shape)) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{where} has pixels of shape {pixels.shape} and {len(labels)} labels; wanted: one row of "
            f"{prod(images.shape)} bytes and one whole number per image"
        )
    return pixels, np.array(labels, dtype=np.int64)


class _Array:
    """What a pickled array of bytes is read into."""

    __slots__ = ("value",)
    value: Bytes

    def __setstate__(self, state: tuple[int, tuple[int, ...], str, bool, bytes]) -> None:
        _, shape, dtype, fortran, data = state
        if dtype != "u1" or not isinstance(data, bytes):
            raise DataError(f"an array of {dtype!r} is in the place of bytes")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype(str):
    """The name of an array's type; what else a pickle says about it does not matter for bytes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


_NO_DATA = (*(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET), *(pickle.EXT1, pickle.EXT2, pickle.EXT4))
_Plain = pickle._Unpickler  # in Python: the other one allocates what a pickle asks for


class _ArraysOnly(_Plain):
    """Reads plain values and arrays of bytes. Whatever else a pickle asks for is refused, and never imported.

    The few names that a pickled numpy array needs lead to methods of this class, not to numpy's.
    """

    dispatch: ClassVar[dict[int, Any]] = {k: v for k, v in _Plain.dispatch.items() if bytes([k]) not in _NO_DATA}
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    encoded = 0  # characters that were

    def load_setitems(self) -> None:
        """Entries of a dictionary; keys that take for ever to compare are no names."""
        items = self.pop_mark()
        self.stack[-1].update(_named(items))

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_setitem(self) -> None:
        """One of them."""
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].update(_named([key, value]))

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_dict(self) -> None:
        """A dictionary with its entries."""
        items = self.pop_mark()  # which changes where things are put
        self.append(_named(items))

    dispatch[pickle.DICT[0]] = load_dict

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global name."""
        allowed = {
            "numpy.core.multiarray._reconstruct": self._reconstruct,
            "numpy._core.multiarray._reconstruct": self._reconstruct,
            "numpy.ndarray": "ndarray",
            "numpy.dtype": self._dtype,
            "_codecs.encode": self._encode,
        }
        wanted = f"{module}.{name}"
        if wanted not in allowed:
            raise DataError(f"the pickle asks for {wanted}; only arrays are read: this is not the official archive")
        return allowed[wanted]

    def _reconstruct(self, *_: object) -> _Array:
        return _Array()

    def _dtype(self, name: bytes | str, *_: object) -> _Dtype:
        return _Dtype(name.decode("ascii") if isinstance(name, bytes) else name)

    def _encode(self, text: str, encoding: bytes | str) -> bytes:
        """How Python 3 writes bytes into old pickles."""
        if encoding not in ("latin1", b"latin1"):
            raise DataError(f"the pickle asks for the encoding {encoding!r}; allowed: latin1")
        self.encoded += len(text)
        if self.encoded > _LARGEST:
            raise DataError(f"the pickle holds more than {_LARGEST} bytes: this is not the official archive")
        return text.encode("latin1")


def _named(items: Sequence[Any]) -> dict[str | bytes, Any]:
    if not all(isinstance(key, str | bytes) for key in items[::2]):
        raise DataError("the pickle holds a dictionary whose keys are no names: this is not the official archive")
    return dict(zip(items[::2], items[1::2], strict=True))
