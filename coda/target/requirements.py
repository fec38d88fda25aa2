"""What a kernel asks of its tensors, as records that Python and C++ evaluate alike.

``legality.py`` derives the records from a plan; ``failure`` here and ``failed`` in ``templates/host.h`` walk the
same records in the same order and fill the same sentences, so ``can_lower`` and ``NAME_check`` give one answer.
tests/property/test_legality_agreement.py holds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy

from coda.dtypes import TABLE, DType

MAX_RANK = 8

# (code, bits) of DLPack -> name, for messages; host.h has the same list.
DTYPE_NAMES = {d.dlpack: d.name for d in TABLE.values()} | {(2, 64): "f64", (1, 8): "u8", (0, 16): "i16"}
_TORCH_CODES = {d.torch: d.dlpack for d in TABLE.values()} | {"float64": (2, 64), "uint8": (1, 8), "int16": (0, 16)}


@dataclass(frozen=True)
class Extent:
    """A size: ``coefficient * variable + offset``. ``variable`` indexes ``Checks.variables``; None for a constant."""

    text: str
    coefficient: int
    variable: int | None = None
    offset: int = 0

    def value(self, sizes: Sequence[int]) -> int:
        return self.offset + (self.coefficient * sizes[self.variable] if self.variable is not None else 0)


class Kind(Enum):
    """What a record asks: the enum Kind of tables.h. ``arg``, ``dim``, ``value`` are fields of the record."""

    PRESENT = "present"  # the argument is given
    DTYPE = "dtype"  # DLPack (code << 8 | bits) is value
    RANK = "rank"  # it has `value` dims
    DIVISIBLE = "divisible"  # size of dim is extent for some value of its variable
    SIZE = "size"  # size of dim is extent; the first of its variable fixes it
    PRODUCT = "product"  # variable `dim` is the product of those in the mask `value`; gives one that nothing else gave
    AT_LEAST = "at_least"  # extent >= value
    AT_MOST = "at_most"  # extent <= value
    MULTIPLE = "multiple"  # extent % value == 0
    PARTIALS = "partials"  # size of dim is the number of partials of the variant: of rows (value 0) or columns (1)
    COUNT = "count"  # size of dim is at least 1 and at most extent
    ALIGNED = "aligned"  # address % value == 0
    UNIT = "unit"  # stride of dim is 1
    PITCH_BYTES = "pitch_bytes"  # stride of dim, in bytes, % value == 0
    PITCH_MIN = "pitch_min"  # stride of dim >= size of dim `other`
    PITCH_MAX = "pitch_max"  # stride of dim, in bytes, < value
    SAME_PITCH = "same_pitch"  # stride of dim equals that of argument `other`
    LANES = "lanes"  # the address difference to argument `other` is a nonzero multiple of 16 with magnitude < 2^40
    DISTINCT = "distinct"  # no element is stored twice
    APART = "apart"  # shares no memory with argument `other`; value 1: or is the very same tensor


@dataclass(frozen=True)
class Requirement:
    """One question. ``sentence`` is the refusal; it may use {got}, {want}, {by} (the argument that fixed a size),
    {shape} and {dtype} of the argument."""

    kind: Kind
    sentence: str
    arg: int = 0
    dim: int = 0
    other: int = 0
    value: int = 0
    extent: Extent = Extent("0", 0)


@dataclass(frozen=True)
class View:
    """A tensor as the launcher sees it. Strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[int, int]
    address: int = 0

    @classmethod
    def of(cls, value: Any, dtype: DType) -> View | None:
        """From a torch tensor, None, or a Python number standing for a scalar of ``dtype``."""
        if value is None or isinstance(value, View):
            return value
        if isinstance(value, (bool, int, float)):
            return cls((), (), dtype.dlpack)
        code = _TORCH_CODES.get(str(value.dtype).removeprefix("torch."), (255, 0))
        return cls(tuple(value.shape), tuple(value.stride()), code, _address(value))

    @property
    def itemsize(self) -> int:
        return self.dtype[1] // 8

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def pitch(self, dim: int) -> int:
        """Stride of a dim; 0 where the dim does not exist or has one element, whose stride says nothing."""
        return self.strides[dim] if dim < len(self.shape) and self.shape[dim] != 1 else 0

    def span(self) -> tuple[int, int]:
        """First and one past the last byte it can touch."""
        steps = [(size - 1) * self.pitch(i) for i, size in enumerate(self.shape)]
        low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
        return self.address + low * self.itemsize, self.address + (high + 1) * self.itemsize


def _address(tensor: Any) -> int:
    """Where the data starts. A fake or meta tensor has no address: its storage counts as aligned."""
    fake = tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor"
    return tensor.storage_offset() * tensor.element_size() if fake else tensor.data_ptr()


@dataclass(frozen=True)
class Arg:
    """What the evaluation needs to know of an argument. ``vector``: one element may stand for all."""

    name: str
    vector: bool = False


@dataclass(frozen=True)
class Checks:
    """All requirements of a program, and the sizes that its kernels need, over the variables that arguments fix.
    ``rows`` and ``columns`` are those of the kernel whose partial results are outputs."""

    args: tuple[Arg, ...]
    variables: tuple[str, ...]
    requirements: tuple[Requirement, ...]
    rows: Extent
    columns: Extent  # of one lane
    extents: tuple[tuple[Any, Extent], ...]  # by the size as an expression

    def extent(self, size: Any) -> Extent:
        return dict(self.extents)[sympy.sympify(size)]


@dataclass
class Binding:
    """Arguments and the sizes they fixed so far. ``partials`` are (row, column) counts, known once the sizes are."""

    checks: Checks
    views: Sequence[View | None]
    partials: Any  # Callable[[int rows, int columns], tuple[int, int]]
    got: int = 0
    want: int = 0

    def __post_init__(self) -> None:
        self.sizes: list[int] = [-1] * len(self.checks.variables)
        self.fixed_by: list[int] = [-1] * len(self.checks.variables)


def failure(binding: Binding) -> str | None:
    """The sentence of the first requirement that is not met, or None. Leaves the sizes in ``binding``."""
    for need in binding.checks.requirements:
        view = binding.views[need.arg]
        if need.kind is Kind.PRESENT:
            binding.got = 0 if view is None else 1
            met = view is not None
        elif need.kind in _OF_SIZES:
            met = _OF_SIZES[need.kind](binding, need)
        else:
            met = view is None or _OF_TENSORS[need.kind](binding, need, view)
        if not met:
            return _sentence(binding, need, view)
    return None


def _sentence(binding: Binding, need: Requirement, view: View | None) -> str:
    by = binding.fixed_by[need.extent.variable] if need.extent.variable is not None else -1
    words = {"got": str(binding.got), "want": str(binding.want), "by": binding.checks.args[by].name if by >= 0 else ""}
    if view is not None:
        words["shape"] = "[" + ", ".join(map(str, view.shape[:MAX_RANK])) + "]"
        words["dtype"] = DTYPE_NAMES.get(view.dtype, "dlpack({}, {})".format(*view.dtype))
    text = need.sentence
    for word, value in words.items():
        text = text.replace("{" + word + "}", value)
    return text


def _compare(binding: Binding, got: int, want: int, met: bool) -> bool:
    binding.got, binding.want = got, want
    return met


# -- of sizes -------------------------------------------------------------------------------------------------------


def _product(binding: Binding, need: Requirement) -> bool:
    sizes = binding.sizes
    factors = [i for i in range(len(sizes)) if need.value >> i & 1]
    unknown = [i for i in factors if sizes[i] < 0]
    total = math.prod(sizes[i] for i in factors if sizes[i] >= 0)
    size = sizes[need.dim]
    if size < 0 and not unknown:
        sizes[need.dim] = total
    elif size >= 0 and len(unknown) == 1:
        sizes[unknown[0]] = size // total if total else 0
        return _compare(binding, size, total, size == sizes[unknown[0]] * total)
    return _compare(binding, size, total, size < 0 or bool(unknown) or size == total)


def _extent(binding: Binding, need: Requirement) -> int:
    return need.extent.value(binding.sizes)


def _at_least(binding: Binding, need: Requirement) -> bool:
    got = _extent(binding, need)
    return _compare(binding, got, need.value, got >= need.value)


def _at_most(binding: Binding, need: Requirement) -> bool:
    got = _extent(binding, need)
    return _compare(binding, got, need.value, got <= need.value)


def _multiple(binding: Binding, need: Requirement) -> bool:
    got = _extent(binding, need)
    return _compare(binding, got, need.value, got % need.value == 0)


_OF_SIZES = {Kind.PRODUCT: _product, Kind.AT_LEAST: _at_least, Kind.AT_MOST: _at_most, Kind.MULTIPLE: _multiple}


# -- of one tensor --------------------------------------------------------------------------------------------------


def _stands_for_all(binding: Binding, need: Requirement, view: View) -> bool:
    """Whether this is the one element of a vector that broadcasts (case C11)."""
    return binding.checks.args[need.arg].vector and view.shape in ((), (1,))


def _dtype(binding: Binding, need: Requirement, view: View) -> bool:
    got = view.dtype[0] << 8 | view.dtype[1]
    return _compare(binding, got, need.value, got == need.value)


def _rank(binding: Binding, need: Requirement, view: View) -> bool:
    rank = len(view.shape)
    one = _stands_for_all(binding, need, view) or (need.value == 0 and view.shape == (1,))
    sane = min(view.shape, default=0) >= 0
    return _compare(binding, rank, need.value, sane and (rank == need.value or one))


def _divisible(binding: Binding, need: Requirement, view: View) -> bool:
    if _stands_for_all(binding, need, view):
        return True
    got = view.shape[need.dim] - need.extent.offset
    return _compare(binding, view.shape[need.dim], 0, got >= 0 and got % need.extent.coefficient == 0)


def _size(binding: Binding, need: Requirement, view: View) -> bool:
    if _stands_for_all(binding, need, view):
        return True
    size, variable = view.shape[need.dim], need.extent.variable
    if variable is not None and binding.sizes[variable] < 0:
        binding.sizes[variable] = (size - need.extent.offset) // need.extent.coefficient
        binding.fixed_by[variable] = need.arg
        return True
    want = _extent(binding, need)
    return _compare(binding, size, want, size == want)


def _partials(binding: Binding, need: Requirement, view: View) -> bool:
    checks = binding.checks
    counts = binding.partials(checks.rows.value(binding.sizes), checks.columns.value(binding.sizes))
    got, want = view.shape[need.dim], counts[need.value]
    return _compare(binding, got, want, got == want)


def _count(binding: Binding, need: Requirement, view: View) -> bool:
    got, want = view.shape[need.dim], _extent(binding, need)
    return _compare(binding, got, want, 1 <= got <= want)


# -- of layout: an empty tensor has none ----------------------------------------------------------------------------


def _aligned(binding: Binding, need: Requirement, view: View) -> bool:
    got = view.address % need.value
    return _compare(binding, got, 0, view.empty or got == 0)


def _unit(binding: Binding, need: Requirement, view: View) -> bool:
    got = view.strides[need.dim]
    return _compare(binding, got, 1, view.empty or view.shape[need.dim] == 1 or got == 1)


def _pitch_bytes(binding: Binding, need: Requirement, view: View) -> bool:
    got = view.pitch(need.dim) * view.itemsize
    return _compare(binding, got, need.value, view.empty or got % need.value == 0)


def _pitch_min(binding: Binding, need: Requirement, view: View) -> bool:
    got, width = view.pitch(need.dim), view.shape[need.other]
    return _compare(binding, got, width, view.empty or view.shape[need.dim] == 1 or got >= width)


def _pitch_max(binding: Binding, need: Requirement, view: View) -> bool:
    got = view.pitch(need.dim) * view.itemsize
    return _compare(binding, got, need.value, view.empty or got < need.value)


def _distinct(binding: Binding, need: Requirement, view: View) -> bool:
    """Each dim steps over all that the faster ones cover."""
    if view.empty:
        return True
    dims = sorted((abs(view.pitch(i)), size) for i, size in enumerate(view.shape) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


# -- of two tensors -------------------------------------------------------------------------------------------------


def _same_pitch(binding: Binding, need: Requirement, view: View) -> bool:
    other = binding.views[need.other]
    if other is None or view.empty:
        return True
    got, want = view.pitch(need.dim), other.pitch(need.dim)
    return _compare(binding, got, want, got == want)


def _lanes(binding: Binding, need: Requirement, view: View) -> bool:
    other = binding.views[need.other]
    if other is None or view.empty:
        return True
    got = abs(view.address - other.address)
    return _compare(binding, got, 1 << 40, got % 16 == 0 and 0 < got < 1 << 40)


def _apart(binding: Binding, need: Requirement, view: View) -> bool:
    other = binding.views[need.other]
    if other is None or view.empty or other.empty:
        return True
    (low, high), (other_low, other_high) = view.span(), other.span()
    if high <= other_low or other_high <= low:
        return True
    if need.value and view == other:
        return True
    return _interleaved(view, other)


def _interleaved(x: View, y: View) -> bool:
    """Whether two matrices with rows one pitch apart are disjoint column slices of one buffer."""
    if len(x.shape) != 2 or len(y.shape) != 2 or x.pitch(1) != 1 or y.pitch(1) != 1:
        return False
    pitch = x.pitch(0) * x.itemsize
    if pitch <= 0 or pitch != y.pitch(0) * y.itemsize:
        return False
    offset = (y.address - x.address) % pitch
    return offset >= x.shape[1] * x.itemsize and offset + y.shape[1] * y.itemsize <= pitch


_OF_TENSORS = {
    Kind.DTYPE: _dtype,
    Kind.RANK: _rank,
    Kind.DIVISIBLE: _divisible,
    Kind.SIZE: _size,
    Kind.PARTIALS: _partials,
    Kind.COUNT: _count,
    Kind.ALIGNED: _aligned,
    Kind.UNIT: _unit,
    Kind.PITCH_BYTES: _pitch_bytes,
    Kind.PITCH_MIN: _pitch_min,
    Kind.PITCH_MAX: _pitch_max,
    Kind.DISTINCT: _distinct,
    Kind.SAME_PITCH: _same_pitch,
    Kind.LANES: _lanes,
    Kind.APART: _apart,
}
