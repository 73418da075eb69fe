"""Types of tensor elements, by the names that requests use.

Owns what each type is called, how wide it is, which field of InferTensorContents may hold it, and
what numpy makes of it. BYTES has no width: its elements bring their lengths.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from headrace_protos.inference import model_config_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Datatype:
    """One data type of tensors, with its name on the wire.

    Attributes:
        name: as tensors name it, for example "INT32".
        number: as ModelConfig names it.
        size: bytes of an element; 0 for BYTES.
        contents: field of InferTensorContents; None for types that come raw only.
        array: numpy's type; None for BYTES, and for BF16, which numpy lacks.
    """

    name: str
    number: int
    size: int
    contents: str | None
    array: np.dtype[np.generic] | None


def _number(name: str, array: str, contents: str | None) -> Datatype:
    dtype = np.dtype(array)
    return Datatype(name, model_config_pb2.DataType.Value(f"TYPE_{name}"), dtype.itemsize, contents, dtype)


_ALL = (
    _number("BOOL", "?", "bool_contents"),
    _number("UINT8", "u1", "uint_contents"),
    _number("UINT16", "<u2", "uint_contents"),
    _number("UINT32", "<u4", "uint_contents"),
    _number("UINT64", "<u8", "uint64_contents"),
    _number("INT8", "i1", "int_contents"),
    _number("INT16", "<i2", "int_contents"),
    _number("INT32", "<i4", "int_contents"),
    _number("INT64", "<i8", "int64_contents"),
    _number("FP16", "<f2", None),
    _number("FP32", "<f4", "fp32_contents"),
    _number("FP64", "<f8", "fp64_contents"),
    Datatype("BYTES", model_config_pb2.TYPE_STRING, 0, "bytes_contents", None),
    Datatype("BF16", model_config_pb2.TYPE_BF16, 2, None, None),
)
BY_NAME = {datatype.name: datatype for datatype in _ALL}
