"""Model FLOPs utilization: what fraction of a peak the model's own arithmetic reaches.

It means nothing without its counting, so a `Utilization` carries the convention that its FLOPs follow
(`spec.model.FlopConvention`) and the peak that it is a fraction of, stands beside absolute FLOP/s, and
compares only with another of the same counting. HFU counts recomputed FLOPs too (PaLM, arXiv:2204.02311
appendix B).
"""

from trainwright.spec.base import NonNegative, Noun, Positive
from trainwright.spec.errors import reject
from trainwright.spec.model import CONVENTION_TEXT, FlopConvention, ModelSpec
from trainwright.spec.units import scaled


class Utilization(Noun):
    """FLOP/s of one device against a peak."""

    flops_per_s: NonNegative
    """Per device, under the convention."""
    peak_flops_per_s: Positive
    peak_format: str
    """Number format whose dense peak it is."""
    convention: FlopConvention
    recompute_counted: bool = False
    """True for HFU."""

    @property
    def fraction(self) -> float:
        return self.flops_per_s / self.peak_flops_per_s

    def ratio_to(self, other: "Utilization") -> float:
        """This fraction over another one. `InvalidSpec` where the two count differently."""
        for field in ("convention", "peak_format", "peak_flops_per_s", "recompute_counted"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                reject(field, mine, f"does not compare with {theirs}; count both the same way first")
        return self.fraction / other.fraction

    def __str__(self) -> str:
        name = "HFU" if self.recompute_counted else "MFU"
        counted = CONVENTION_TEXT[self.convention]
        if self.recompute_counted:
            counted = counted.replace("recompute not counted", "recompute counted")
        return (
            f"{name} {self.fraction:.1%} of {scaled(self.peak_flops_per_s, 'FLOP/s')} (dense {self.peak_format} "
            f"peak), {scaled(self.flops_per_s, 'FLOP/s')}; {counted}"
        )


def utilization(
    model: ModelSpec,
    *,
    seq_len: int,
    tokens_per_s_per_device: float,
    convention: FlopConvention,
    peak_format: str,
    peak_flops_per_s: float,
) -> Utilization:
    """The MFU of a model trained at a speed on devices of a peak."""
    return Utilization(
        flops_per_s=tokens_per_s_per_device * model.flops_per_token(seq_len, convention),
        peak_flops_per_s=peak_flops_per_s,
        peak_format=peak_format,
        convention=convention,
    )


def hardware_utilization(mfu: Utilization, *, recomputed_flops_per_s: float) -> Utilization:
    """The HFU that belongs to an MFU: recomputed FLOPs per second and device are counted as work too."""
    return mfu.changed(flops_per_s=mfu.flops_per_s + recomputed_flops_per_s, recompute_counted=True)
