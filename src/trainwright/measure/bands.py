"""Bands of predicted step times, by class of run: split conformal prediction (arXiv:2107.07511 s1.1).

They come from residuals of rows that the constants had not been fitted to. Rows weigh as in the fit, so that a
long table counts as a few runs.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.measure.fit import source_weights
from trainwright.spec.published import Band, Bands
from trainwright.spec.validation import Judged

SHARE = 0.8
"""Of measured step times that a band is to cover."""

EXPONENTS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Widenings that are tried for doubtful runs."""


def bands_of(by_source: Sequence[Judged], by_publisher: Sequence[Judged]) -> Bands:
    """Bands from rows judged without their source (the software is known from others where it can be) and without
    their publisher (it mostly isn't)."""
    parts = {
        f"{architecture}_{seen}": _band([each for each in judged if each.published.architecture == architecture])
        for seen, judged in (("seen", by_source), ("unseen", by_publisher))
        for architecture in ("dense", "moe")
    }
    narrow = Bands(
        share=SHARE,
        **parts,
        widening=1.0,
        # What has no name of its own is of no known kind.
        software=tuple(
            sorted({name for each in by_source if not (name := each.published.software).startswith("generic")})
        ),
        devices=tuple(sorted({each.device for each in by_source})),
        most_devices=max(each.published.layout.world for each in by_source),
        longest_seq=max(each.published.recipe.seq_len for each in by_source),
    )
    return narrow.changed(widening=_widening(narrow, [each for each in by_source if each.published.is_doubtful]))


def _band(judged: Sequence[Judged]) -> Band:
    """Quantiles of published / predicted, moved out by the place that one more run may take. A band holds 1."""
    ratios = np.array([1 / (1 + each.error) for each in judged])
    weights = source_weights([each.published.siblings for each in judged])
    low = _quantile(ratios, weights, (1 - SHARE) / 2)
    high = 1 / _quantile(1 / ratios, weights, (1 - SHARE) / 2)
    return Band(low=min(low, 1.0), high=max(high, 1.0), rows=len(judged))


def _quantile(values: NDArray[np.float64], weights: NDArray[np.float64], share: float) -> float:
    """The largest value that at most `share` of the weight, one more run of mean weight included, lies below."""
    order = np.argsort(values)
    total = weights.sum() + weights.mean()
    below = np.cumsum(weights[order]) - weights[order] + weights.mean()
    return float(values[order][max(int(np.searchsorted(below / total, share, side="right")) - 1, 0)])


def _widening(bands: Bands, doubtful: Sequence[Judged]) -> float:
    """The least exponent with which bands cover their share of doubtful rows."""
    for exponent in EXPONENTS:
        wider = bands.changed(widening=exponent)
        weights = source_weights([each.published.source for each in doubtful])
        inside = np.array([each.is_inside(wider) for each in doubtful])
        if not len(doubtful) or np.sum(weights * inside) >= SHARE * np.sum(weights):
            return exponent
    return EXPONENTS[-1]
