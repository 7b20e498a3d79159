"""The linear layer of every projection."""

from flax import nnx
from jaxtyping import Array, Float


class Linear(nnx.Linear):
    """x W + b over rows: XLA's CPU products with several leading axes take half as long again, and their weight
    gradients twice as long (`python -m benchmarks.recurrent rows`).
    """

    def __call__(self, inputs: Float[Array, "... D"], *args, **kwargs) -> Float[Array, "... E"]:
        rows = inputs.reshape(-1, self.in_features)
        return super().__call__(rows, *args, **kwargs).reshape(*inputs.shape[:-1], self.out_features)
