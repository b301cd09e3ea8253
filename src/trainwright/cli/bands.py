"""The band of a predicted step: which of the catalogue's bands a run is in, and what is unusual about it."""

from trainwright.cli import catalogue
from trainwright.spec.answers import Prediction, StepBand
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.model import ModelSpec


def with_band(prediction: Prediction, model: ModelSpec, cluster: ClusterSpec) -> Prediction:
    """The prediction with its band; as it is on CPUs, of which no run was published."""
    if cluster.device.kind == "cpu":
        return prediction
    bands, devices, seq_len = catalogue.bands(), prediction.layout.world, prediction.recipe.seq_len
    notes = bands.far(software=cluster.software, device=cluster.device.name, devices=devices, seq_len=seq_len)
    beyond = any("measured run" in note for note in notes)
    low, high = bands.class_of(
        is_moe=model.is_moe,
        software=cluster.software or None,
        device=cluster.device.name,
        is_doubtful=beyond or cluster.software == "untuned",
    )
    step_s = prediction.step_s
    band = StepBand(low_s=low * step_s, high_s=high * step_s, share=bands.share, notes=tuple(notes))
    return prediction.changed(band=band)
