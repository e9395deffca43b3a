"""The part of torch that callers of the fake TensorRT-LLM need: a vector."""

from collections.abc import Iterable

float32 = "float32"


class Tensor:
    """A one-dimensional tensor."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = [float(value) for value in values]

    def tolist(self) -> list[float]:
        return list(self._values)


def tensor(values: Iterable[float], dtype: str = float32) -> Tensor:
    """Create a tensor. Raises TypeError unless `dtype` is float32, the only supported type."""
    if dtype != float32:
        raise TypeError(f"the fake has no {dtype}")
    return Tensor(values)
