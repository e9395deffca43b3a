"""As much of torch as a caller of the fake TensorRT-LLM needs: a vector, to pass on."""

from collections.abc import Iterable

float32 = "float32"


class Tensor:
    """Numbers in one dimension."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = [float(value) for value in values]

    def tolist(self) -> list[float]:
        return list(self._values)


def tensor(values: Iterable[float], dtype: str = float32) -> Tensor:
    """Raises TypeError for another type than float32, the only one here."""
    if dtype != float32:
        raise TypeError(f"the fake has no {dtype}")
    return Tensor(values)
