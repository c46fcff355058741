"""Names for the NumPy arrays that columns are made of, and how values are found in a sorted one."""

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


def locate(rising: Int64s, wanted: Int64s) -> Int64s:
    """The index of each wanted value in an array of rising values; -1 where it is not there."""
    if not len(rising):
        return np.full(len(wanted), -1, np.int64)
    index = np.minimum(rising.searchsorted(wanted), len(rising) - 1)
    return np.where(rising[index] == wanted, index, -1)
