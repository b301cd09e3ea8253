"""How one layer's tensors are quantized: the recipe's operands, largest values that ranks agree on, and for NVFP4
the seeds of its transform and of chance in its rounding.

Scales are taken from values in bf16 or fp32; a run whose activations are float64, for proofs, has the same codes
but where rounding to fp32 decides.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainwright.spec.recipe import Precision
from trainwright.train.precision.hadamard import transformed
from trainwright.train.precision.health import Health
from trainwright.train.precision.largest import Largest, Role
from trainwright.train.precision.noise import Noise
from trainwright.train.precision.product import product
from trainwright.train.precision.quantized import Quantized, quantize
from trainwright.train.precision.recipes import RECIPES, Operand


@dataclass
class UnderWay:
    """Whoever runs a piece says here, before each act, which sequences are on their way through it."""

    samples_B: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Global number of each sequence, counted through all steps."""


@dataclass
class Kernels:
    """What transforms and rounds a matrix and what multiplies two of them: of all layers, so that a run without
    numbers can have others."""

    transform: Callable[[torch.Tensor, int], torch.Tensor] = transformed
    quantize: Callable[..., Quantized] = quantize
    product: Callable[[Quantized, Quantized, torch.dtype], torch.Tensor] = product


@dataclass(frozen=True)
class Arithmetic:
    """Of one layer, named as in the whole model. `largest` is asked where a scale is the whole tensor's."""

    name: str
    precision: Precision
    largest: Largest
    under_way: UnderWay
    seed: int = 0
    part: tuple[int, ...] = ()
    """Which part of tensors this rank has: chance is another one in each."""
    kernels: Kernels = field(default_factory=Kernels)
    health: Health = field(default_factory=Health)

    def both(self, role: Role, x: torch.Tensor) -> tuple[Quantized, Quantized]:
        """x (..., N, K) as a product reads it that sums over K, and x^T as one does that sums over N."""
        along, across = self._operands(role)
        made = self._quantized(role, along, x, "along")
        if along.serves(across):
            return made, made.transposed()
        return made, self._quantized(role, across, x.mT, "across")

    @property
    def weight_operand(self) -> Operand:
        """The weight as Fprop reads it."""
        return self._operands("weight")[0]

    def along(self, role: Role, x: torch.Tensor) -> Quantized:
        """x (..., N, K) as a product reads it that sums over K."""
        return self._quantized(role, self._operands(role)[0], x, "along")

    def across(self, role: Role, x: torch.Tensor) -> Quantized:
        """x^T (..., K, N), of x (..., N, K), as a product reads it that sums over N."""
        return self._quantized(role, self._operands(role)[1], x.mT, "across")

    def runs(
        self, role: Role, row_RK: torch.Tensor, counts: Sequence[int]
    ) -> tuple[Quantized, tuple[Quantized, ...]]:
        """Rows x (R, K) as a product reads them that sums over K; and of each run of them its x^T (K, rows of the
        run), as one does that sums over the run. What is of the whole tensor is so of all rows together."""
        along, across = self._operands(role)
        made = self._quantized(role, along, row_RK, "along")
        if along.serves(across):
            return made, tuple(run.transposed() for run in made.split(counts))
        runs = [self.prepared(across, run.mT) for run in row_RK.split(list(counts))]
        amax = self.largest.of(role, torch.cat(runs, dim=1)) if _asks(across) else None
        return made, tuple(self.rounded(across, run, amax, "across") for run in runs)

    def multiplied(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """a b^T; in float64 sums are too, for proofs."""
        if dtype == torch.float64:
            return a.dequantize(dtype) @ b.dequantize(dtype).mT
        return self.kernels.product(a, b, dtype)

    def _operands(self, role: Role) -> tuple[Operand, Operand]:
        of = RECIPES[self.precision]
        return {
            "input": (of.fprop_input, of.wgrad_input),
            "weight": (of.fprop_weight, of.dgrad_weight),
            "gradient": (of.dgrad_gradient, of.wgrad_gradient),
        }[role]

    def _quantized(self, role: Role, operand: Operand, x: torch.Tensor, way: str) -> Quantized:
        x = self.prepared(operand, x)
        quantized = self.rounded(operand, x, self.largest.of(role, x) if _asks(operand) else None, way)
        if way == "along":
            self.health.saw(self.name, role, x, quantized)
        return quantized

    def prepared(self, operand: Operand, x: torch.Tensor) -> torch.Tensor:
        """What is rounded, and has the largest value that counts."""
        x = x.detach()
        x = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
        return self.kernels.transform(x, self.seed) if operand.is_transformed else x

    def rounded(self, operand: Operand, x: torch.Tensor, amax: torch.Tensor | None, way: str) -> Quantized:
        """x, ready to be rounded, in an operand's format; amax: what scales of the whole tensor are made from."""
        noise = None
        if operand.is_stochastic:
            place = f"{self.seed}/{self.name}/{way}/{self.part}/{self.under_way.samples_B.tolist()}"
            noise = Noise(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little"))
        return self.kernels.quantize(x, operand.format, operand.scaling, amax=amax, noise=noise)


def _asks(operand: Operand) -> bool:
    """Whether a scale is the whole tensor's."""
    return operand.scaling.rows is None or operand.scaling.rule == "e4m3"
