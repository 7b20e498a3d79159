"""Linear time-invariant state-space models with a diagonal state matrix: LRU, S4D and S5.

All complex numbers are pairs of real arrays. All three have the same gated output, W_o ((y + d * x) * silu(W_g x)),
and not each its paper's, so that a comparison of them compares their recurrences.
"""

from abc import abstractmethod
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.long_convolution import modal_recurrence
from seqlab.mixers.base import Recurrence, Recurrent
from seqlab.recurrence import Marks, linear_recurrence, multiply
from seqlab.types import State

Complex = tuple[Float[Array, "..."], Float[Array, "..."]]


class StateSpace(Recurrent):
    """What surrounds the recurrence: a direct term and the gated output."""

    def surround(self, width: int, rngs: nnx.Rngs) -> None:
        """Draws the parameters, after those of the recurrence."""
        self.d = nnx.Param(jax.random.normal(rngs.params(), (width,)))
        self.gate = Linear(width, width, rngs=rngs)
        self.out = Linear(width, width, rngs=rngs)

    def read(self, y: Float[Array, "T B D"], x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        y = y + x * jnp.broadcast_to(self.d[...], x.shape)
        return self.out(y * jax.nn.silu(self.gate(x)))


class Diagonal(StateSpace):
    """All inputs drive one state of N complex modes, and all outputs are read from it:

        h_t = a * h_{t-1} + drive(x_t),  y_t = copies Re(C h_t)

    `copies` is 2 where each mode stands for itself and its complex conjugate.
    """

    copies: float = 1.0
    scan: str
    chunk: int
    c_re: nnx.Param
    c_im: nnx.Param

    @property
    @abstractmethod
    def decay(self) -> Complex:
        """a [N], in float32."""

    @abstractmethod
    def drive(self, x: Float[Array, "T B D"]) -> Complex:
        """What the tokens add to the state, [T, B, N] in float32."""

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        decay = self.decay

        def coefficients(drive: Complex) -> tuple[Complex, Complex]:
            return (jnp.broadcast_to(decay[0], drive[0].shape), jnp.broadcast_to(decay[1], drive[1].shape)), drive

        state, (re, im) = linear_recurrence(coefficients, state, self.drive(x), marks, scan=self.scan, chunk=self.chunk)
        y = re.astype(x.dtype) @ self.c_re[...] - im.astype(x.dtype) @ self.c_im[...]
        return state, self.read(self.copies * y, x)

    def init_state(self, batch: int, max_length: int) -> State:
        empty = jnp.zeros((batch, self.c_re.shape[0]), jnp.float32)
        return empty, empty


class LRU(Diagonal):
    """The Linear Recurrent Unit (Orvieto et al. 2023):

        h_t = l * h_{t-1} + g * (B x_t),  y_t = Re(C h_t) + d * x_t,  l = exp(-exp(nu) + i exp(theta))

    with l uniform on the ring r_min <= |l| <= r_max, phase in [0, max_phase], and g = sqrt(1 - |l|^2) at the start so
    that the state has the variance of its input.

    Raises:
        ValueError: the ring is none.
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 6.2832,
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        if not 0 <= r_min < r_max < 1:
            raise ValueError(f"an LRU needs 0 <= r_min < r_max < 1, not r_min={r_min}, r_max={r_max}")
        self.scan, self.chunk = scan, chunk

        def uniform() -> Float[Array, " N"]:
            return jax.random.uniform(rngs.params(), (state_size,), minval=1e-6)

        def normal(rows: int, columns: int, variance: float) -> nnx.Param:
            return nnx.Param(variance**0.5 * jax.random.normal(rngs.params(), (rows, columns)))

        # uniform in area on the ring (Orvieto et al. 2023, lemma 3.2)
        nu = -0.5 * jnp.log(uniform() * (r_max**2 - r_min**2) + r_min**2)
        self.nu = Recurrence(jnp.log(nu))
        self.theta = Recurrence(jnp.log(uniform() * max_phase))
        self.gamma = Recurrence(0.5 * jnp.log(-jnp.expm1(-2.0 * nu)))
        self.b_re, self.b_im = (normal(width, state_size, 1 / (2 * width)) for _ in range(2))
        self.c_re, self.c_im = (normal(state_size, width, 1 / state_size) for _ in range(2))
        self.surround(width, rngs)

    @property
    def decay(self) -> Complex:
        magnitude = jnp.exp(-jnp.exp(self.nu[...]))
        phase = jnp.exp(self.theta[...])
        return magnitude * jnp.cos(phase), magnitude * jnp.sin(phase)

    def drive(self, x: Float[Array, "T B D"]) -> Complex:
        gamma = jnp.exp(self.gamma[...])
        re, im = ((x @ b[...]).astype(jnp.float32) for b in (self.b_re, self.b_im))
        return re * jnp.broadcast_to(gamma, re.shape), im * jnp.broadcast_to(gamma, im.shape)


def divide(x: Complex, y: Complex) -> Complex:
    re, im = multiply(x, (y[0], -y[1]))
    size = y[0] ** 2 + y[1] ** 2
    return re / size, im / size


def zero_order_hold(a: Complex, step: Float[Array, "..."]) -> tuple[Complex, Complex]:
    """e^{step a} and (e^{step a} - 1) / a: exact for an input that stays constant during each step."""
    decay, phase = step * a[0], step * a[1]
    magnitude = jnp.exp(decay)
    # e^z - 1 without the cancellation of a small z, which costs 4 of 7 digits at the shortest steps
    grown = jnp.expm1(decay) * jnp.cos(phase) - 2.0 * jnp.sin(0.5 * phase) ** 2, magnitude * jnp.sin(phase)
    return (magnitude * jnp.cos(phase), magnitude * jnp.sin(phase)), divide(grown, a)


def bilinear(a: Complex, step: Float[Array, "..."]) -> tuple[Complex, Complex]:
    """(1 + step a / 2) / (1 - step a / 2) and step / (1 - step a / 2) (Tustin 1947)."""
    re, im = 0.5 * step * a[0], 0.5 * step * a[1]
    below = 1.0 - re, -im
    return divide((1.0 + re, im), below), divide((step, jnp.zeros_like(step)), below)


DISCRETIZATIONS: dict[str, Callable[[Complex, Float[Array, "..."]], tuple[Complex, Complex]]] = {
    "zoh": zero_order_hold,
    "bilinear": bilinear,
}
"""By the user's word: a-bar and b-bar of h_t = a-bar h_{t-1} + b-bar u_t, from a of h' = a h + u and the step."""

FREQUENCIES: dict[str, Callable[[int, np.ndarray], np.ndarray]] = {
    "lin": lambda size, n: np.pi * n,
    "inv": lambda size, n: size / np.pi * (size / (2 * n + 1) - 1),
}
"""By the user's word: the imaginary parts of S4D's modes n < N/2 (Gu et al. 2022, sec. 4.4)."""


def named(choices: dict[str, Callable], option: str, word: str) -> Callable:
    if word not in choices:
        raise ValueError(f"{option}={word} is unknown; use one of {', '.join(choices)}")
    return choices[word]


class Modes(nnx.Module):
    """Continuous modes h' = a h + u with Re a < 0, sampled at steps that are log-uniform on [.001, .1] at the start."""

    def __init__(self, a: np.ndarray, *, steps: tuple[int, ...], discretization: str, rngs: nnx.Rngs):
        self.discretise = named(DISCRETIZATIONS, "discretization", discretization)
        self.log_decay = Recurrence(jnp.asarray(np.log(-np.real(a)), jnp.float32))
        self.frequency = Recurrence(jnp.asarray(np.imag(a), jnp.float32))
        low, high = float(np.log(1e-3)), float(np.log(1e-1))
        self.log_step = Recurrence(jax.random.uniform(rngs.params(), steps, minval=low, maxval=high))

    def sampled(self) -> tuple[Complex, Complex]:
        """a-bar and b-bar, in the shape of a."""
        a = -jnp.exp(self.log_decay[...]), self.frequency[...]
        return self.discretise(a, jnp.broadcast_to(jnp.exp(self.log_step[...]), a[0].shape))


class S4D(StateSpace):
    """A diagonal state-space model for each channel (Gu et al. 2022), of N modes in conjugate pairs:

        h' = a h + x,  y = 2 Re(sum_n c_n h_n) + d x,  sampled by `discretization`

    Only N/2 modes are stored, one of each pair. They start as S4D-Lin, a_n = -1/2 + i pi n, or
    S4D-Inv, a_n = -1/2 + i (N / pi) (N / (2n + 1) - 1). The state is [B, D, N/2]; the default form stores one a chunk.

    Raises:
        ValueError: the state size is odd or below 2, or `init` or `discretization` is unknown.
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int,
        init: str = "lin",
        discretization: str = "zoh",
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        frequencies = named(FREQUENCIES, "init", init)
        check_pairs("an S4D", state_size)
        self.scan, self.chunk = scan, chunk
        half = state_size // 2
        a = np.tile(-0.5 + 1j * frequencies(state_size, np.arange(half)), (width, 1))
        self.modes = Modes(a, steps=(width, 1), discretization=discretization, rngs=rngs)
        self.c_re, self.c_im = (nnx.Param(0.5**0.5 * jax.random.normal(rngs.params(), a.shape)) for _ in range(2))
        self.surround(width, rngs)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        a, scale = self.modes.sampled()
        # b-bar multiplies c and not each input: outputs see only their product
        c = multiply((2.0 * self.c_re[...].astype(jnp.float32), 2.0 * self.c_im[...].astype(jnp.float32)), scale)
        drive = x.astype(jnp.float32)
        state, y = modal_recurrence(a, c, state, drive, marks, scan=self.scan, chunk=self.chunk)
        return state, self.read(y.astype(x.dtype), x)

    def init_state(self, batch: int, max_length: int) -> State:
        empty = jnp.zeros((batch, *self.c_re.shape), jnp.float32)
        return empty, empty


def check_pairs(model: str, size: int) -> None:
    if size < 2 or size % 2:
        raise ValueError(f"{model} has pairs of modes, and state_size={size} is odd or below 2")


def normal_hippo(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues [N/2] and eigenvectors [N, N/2], one of each conjugate pair, of the normal part of HiPPO-LegS:

    S = -1/2 I - K,  K_nk = -K_kn = sqrt((n + 1/2) (k + 1/2)) for n > k  (Gu et al. 2022; Smith et al. 2023, B.1)
    """
    root = np.sqrt(np.arange(size) + 0.5)
    skew = -np.tril(np.outer(root, root), -1)
    # i S is Hermitian but for its shift: real eigenvalues, in ascending order and so in pairs around 0
    frequency, vectors = np.linalg.eigh(-1j * (skew - skew.T))
    return -0.5 + 1j * frequency[size // 2 :], vectors[:, size // 2 :]


class S5(Diagonal):
    """A diagonal state-space model with all channels as input and as output (Smith et al. 2023), of N modes in
    conjugate pairs of which one is stored:

        h' = a h + B x,  y = 2 Re(C h) + d x,  sampled by `discretization` with a step for each mode

    At the start it is the real system h' = S h + B x, y = C h with the normal part S of HiPPO-LegS in each of `blocks`
    equal blocks, B ~ N(0, 1/D) and C ~ N(0, 1/N), in the basis of the eigenvectors of S.

    Raises:
        ValueError: the state size does not split into blocks of pairs, or `discretization` is unknown.
    """

    copies = 2.0

    def __init__(
        self,
        width: int,
        *,
        state_size: int,
        blocks: int = 1,
        discretization: str = "zoh",
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        if blocks < 1 or state_size % blocks:
            raise ValueError(f"state_size={state_size} cannot be split into blocks={blocks}")
        check_pairs("each block of an S5", state_size // blocks)
        self.scan, self.chunk = scan, chunk
        a, vectors = normal_hippo(state_size // blocks)
        self.modes = Modes(np.tile(a, blocks), steps=(state_size // 2,), discretization=discretization, rngs=rngs)
        re, im = (jnp.asarray(part(vectors), jnp.float32) for part in (np.real, np.imag))

        def rotated(variance: float, sign: float) -> Complex:
            """Real [D, N] matrices times the eigenvectors, or with sign -1 times their conjugates, block by block."""
            real = variance**0.5 * jax.random.normal(rngs.params(), (width, blocks, state_size // blocks))
            return (real @ re).reshape(width, -1), (real @ (sign * im)).reshape(width, -1)

        self.b_re, self.b_im = map(nnx.Param, rotated(1 / width, -1.0))
        self.c_re, self.c_im = (nnx.Param(part.T) for part in rotated(1 / state_size, 1.0))
        self.surround(width, rngs)

    @property
    def decay(self) -> Complex:
        return self.modes.sampled()[0]

    def drive(self, x: Float[Array, "T B D"]) -> Complex:
        re, im = ((x @ b[...]).astype(jnp.float32) for b in (self.b_re, self.b_im))
        scale = self.modes.sampled()[1]
        return multiply((re, im), (jnp.broadcast_to(scale[0], re.shape), jnp.broadcast_to(scale[1], re.shape)))
