"""A small run that the tests change one field of at a time, and the plain program that they hold it against."""

from typing import Any

import torch
from torch import nn

from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.run import Run
from trainwright.train.data import Batch
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.experts import mixtures, set_routing
from trainwright.train.model.initialize import global_name, initial_value
from trainwright.train.model.routing import moved_bias
from trainwright.train.model.transformer import Transformer
from trainwright.train.optimizer import is_decayed

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
            "matmul": {"fp32": {"size": [1e6], "fraction": [0.8]}},
            "attention_forward": {"fp32": {"size": [128], "fraction": [0.4]}},
            "attention_backward": {"fp32": {"size": [128], "fraction": [0.3]}},
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


def example_run(
    *,
    attention: dict[str, Any] | None = None,
    mlp: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    **layout: Any,
) -> Run:
    """A checked run of a four-layer model in float64, with changes to each part."""
    layer = {
        "attention": {"num_heads": 4, "num_kv_heads": 2, "d_head": 8, **(attention or {})},
        "mlp": {"kind": "dense", "d_ff": 48, **(mlp or {})},
    }
    layer["attention"]["kind"] = "gqa"
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
            "data": {"vocab_size": 258},
            "cluster": CLUSTER,
        }
    )


def example_batches(run: Run, *, ignored: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of every sequence of a step, on every rank the same. With `ignored` the sequences have
    different numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    recipe = run.recipe
    tokens = torch.randint(run.model.vocab_size, (recipe.global_batch, recipe.seq_len + 1), generator=generator)
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
    return Batch(list(inputs), list(targets), count)


def plain_model(run: Run, dtype: torch.dtype) -> Transformer:
    """The whole model on one device, with the initial weights that every layout starts from."""
    model = Transformer(run.model).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(run.model, run.recipe.seed, name, parameter.shape, dtype))
    model.tie()
    set_routing(model, run.recipe)
    return model


@torch.no_grad()
def steer(model: nn.Module) -> None:
    """Set balance biases, which begin at zero, to values that change the choice of experts, by layer."""
    for name, mixture in mixtures(model):
        if mixture.balance_bias is not None:
            experts = mixture.mlp.num_experts
            place_X = (torch.arange(experts) * 5 + int(name.split(".")[1])) % experts
            mixture.balance_bias.copy_(place_X * (0.06 / experts))


def plain_step(run: Run, sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """What a textbook program gets in float64: loss, gradients, norm, weights and balance biases after a step."""
    model = plain_model(run, torch.float64)
    steer(model)
    choice = run.recipe.optimizer
    count = sum(int((targets != -100).sum()) for _, targets in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for inputs, targets in sequences:
        loss = loss + summed_cross_entropy(model(inputs[None]), targets[None]) / count
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), run.recipe.grad_clip or float("inf"))
    decayed = [each for name, each in model.named_parameters() if is_decayed(name, each)]
    others = [each for name, each in model.named_parameters() if not is_decayed(name, each)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": choice.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=choice.lr,
        betas=(choice.beta1, choice.beta2),
        eps=choice.epsilon,
        foreach=False,
    )
    optimizer.step()
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    biases = {
        name: moved_bias(mixture.balance_bias, mixture.load_X, run.recipe.balance_rate)
        for name, mixture in mixtures(model)
        if mixture.balance_bias is not None
    }
    return {
        "loss": float(loss.detach()),
        "gradients": gradients,
        "norm": float(norm),
        "weights": weights,
        "biases": biases,
    }


def whole_name(run: Run, name: str) -> str:
    return global_name(run.model, name)
