"""A small run that the tests change one field of at a time, and the plain program that they hold it against."""

from typing import Any

import torch
from torch import nn

from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.run import Run
from trainwright.train.data import Batch, documents_of
from trainwright.train.model.initialize import global_name
from trainwright.train.verify.plain import PlainProgram, Sample, plain_model

__all__ = [
    "example_batches",
    "example_run",
    "part_of",
    "plain_model",
    "plain_step",
    "whole_name",
    "with_documents",
]
from trainwright.train.model.experts import mixtures

CLUSTER = ClusterSpec.parse(
    {
        "name": "test-cpu",
        "device": {
            "name": "core",
            "kind": "cpu",
            "peak_flops_per_s": {"fp32": 1e11, "bf16": 5e11, "fp8": 5e11},
            "memory_bytes": 2**32,
            "memory_bytes_per_s": 2e10,
            "num_sms": 1,
        },
        "node": {"devices": 64, "concurrent_devices": 2},
        "fabric": {"link": "shared memory", "link_domain": 64, "link_bytes_per_s": 1e9},
        "rates": {
            "matmul": {"fp32": {"size": [1e6], "fraction": [0.8]}, "bf16": {"size": [1e6], "fraction": [0.8]}},
            "attention_forward": {
                "fp32": {"size": [128], "fraction": [0.4]},
                "bf16": {"size": [128], "fraction": [0.4]},
            },
            "attention_backward": {
                "fp32": {"size": [128], "fraction": [0.3]},
                "bf16": {"size": [128], "fraction": [0.3]},
            },
            "memory": 0.8,
            "launch_s": 3e-6,
            "link": 0.5,
            "link_latency_s": 1e-4,
            "network": 0.5,
            "network_latency_s": 1e-4,
        },
        "provenance": {
            field: {"kind": "assumed", "source": "test"}
            for field in ("device", "node", "fabric", "rates", "framework_bytes")
        },
    }
)

END_OF_DOCUMENT = 7
"""A token of the example's vocabulary."""


def example_run(
    *,
    attention: dict[str, Any] | None = None,
    mlp: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **layout: Any,
) -> Run:
    """A checked run of a four-layer model in float64, with changes to each part."""
    layer = {
        "attention": {"num_heads": 4, "num_kv_heads": 2, "d_head": 8, **(attention or {})},
        "mlp": {"kind": "dense", "d_ff": 48, **(mlp or {})},
    }
    layer["attention"].setdefault("kind", "gqa")
    if layer["attention"]["kind"] == "mla":
        del layer["attention"]["num_kv_heads"], layer["attention"]["d_head"]
    return Run.parse(
        {
            "layout": layout,
            "recipe": {
                "seq_len": 16,
                "global_batch": 8,
                "micro_batch": 1,
                "precision": "fp64",
                "zero": 0,
                "grad_clip": 0.5,
                "optimizer": {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"},
                **(recipe or {}),
            },
            "model": {
                "name": "test",
                "d_model": 32,
                "vocab_size": 259,
                "rope": {"theta": 10000.0},
                "layer_groups": [{"repeat": 4, "pattern": [layer]}],
                **(model or {}),
            },
            "data": {"vocab_size": 258, **(data or {})},
            "cluster": CLUSTER,
        }
    )


def example_batches(run: Run, *, ignored: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of every sequence of a step, on every rank the same. With `ignored` the sequences have
    different numbers of targets; documents, where they are masked, have four tokens to eight."""
    generator = torch.Generator().manual_seed(1)
    recipe = run.recipe
    tokens = torch.randint(run.model.vocab_size, (recipe.global_batch, recipe.seq_len + 1), generator=generator)
    if run.data.document_mask:
        for number in range(recipe.global_batch):
            tokens[number, number % 4 :: 4 + number % 5] = END_OF_DOCUMENT
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if ignored:
        for number in range(recipe.global_batch):
            targets[number, : number * 3 % recipe.seq_len] = -100
    return [(inputs[number], targets[number]) for number in range(recipe.global_batch)]


def part_of(run: Run, dp_rank: int, sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """The batch of one data-parallel rank."""
    recipe = run.recipe
    per_rank = recipe.global_batch // run.layout.dp
    mine = sequences[dp_rank * per_rank : (dp_rank + 1) * per_rank]
    inputs = torch.stack([each[0] for each in mine]).split(recipe.micro_batch)
    targets = torch.stack([each[1] for each in mine]).split(recipe.micro_batch)
    count = sum(int((each[1] != -100).sum()) for each in sequences)
    return Batch(list(inputs), list(targets), count, documents(run, list(inputs)), dp_rank * per_rank)


def documents(run: Run, inputs_BS: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Documents of some sequences, where the run masks them."""
    return [documents_of(each, END_OF_DOCUMENT) for each in inputs_BS] if run.data.document_mask else None


@torch.no_grad()
def steer(model: nn.Module) -> None:
    """Set balance biases, which begin at zero, to values that change the choice of experts, by layer."""
    for name, mixture in mixtures(model):
        if mixture.balance_bias is not None:
            experts = mixture.mlp.num_experts
            place_X = (torch.arange(experts) * 5 + int(name.split(".")[1])) % experts
            mixture.balance_bias.copy_(place_X * (0.06 / experts))


def plain_step(run: Run, sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """What a textbook program gets: loss, gradients, norm and weights after one step, in float64."""
    step = PlainProgram(run).step(with_documents(run, sequences), run.recipe.optimizer.lr)
    return {"loss": step.loss, "gradients": step.gradients, "norm": step.grad_norm, "weights": step.weights}


def with_documents(run: Run, sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Sample]:
    """Sequences with the documents that their tokens are of, where the run masks them."""
    samples = [Sample(number, *each) for number, each in enumerate(sequences)]
    if not run.data.document_mask:
        return samples
    return [each._replace(documents_S=documents_of(each.inputs_S[None], END_OF_DOCUMENT)[0]) for each in samples]


def whole_name(run: Run, name: str) -> str:
    return global_name(run.model, name)
