"""What the trainer costs a single process: its tokens/s over those of a bare PyTorch loop of the same model.

Both train the same Llama from the same weights on the same batches in this process, step about, so that whatever
slows the machine slows both. The bare loop is written as one would by hand: modules in a row, `loss.backward()`,
`clip_grad_norm_`, fused AdamW; in bf16, bf16 weights with fp32 masters beside them. The mark is 0.97.

    python benchmarks/single_process.py [fp32] [bf16] [steps] [--json]
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.cli.catalogue import load_cluster
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.mesh import Mesh
from trainwright.train.model.initialize import initial_value
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import parallelize

D_MODEL, LAYERS, HEADS, KV_HEADS, D_FF, VOCAB, SEQ_LEN = 256, 4, 4, 2, 688, 4096, 256
GLOBAL_BATCH, MICRO_BATCH = 8, 4
TOKENS = GLOBAL_BATCH * SEQ_LEN
WARM_UP = 3
MARK = 0.97


class BareLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = D_MODEL // HEADS
        self.n1, self.n2 = nn.RMSNorm(D_MODEL, eps=1e-5), nn.RMSNorm(D_MODEL, eps=1e-5)
        self.q, self.o = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(D_MODEL, KV_HEADS * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(D_MODEL, D_FF, bias=False) for _ in range(2))
        self.down = nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        width = D_MODEL // HEADS

        def turn(t: torch.Tensor) -> torch.Tensor:
            return t * cos + torch.cat((-t[..., width // 2 :], t[..., : width // 2]), -1) * sin

        h = self.n1(x)
        q = turn(self.q(h).view(batch, length, HEADS, width).transpose(1, 2))
        k = turn(self.k(h).view(batch, length, KV_HEADS, width).transpose(1, 2))
        v = self.v(h).view(batch, length, KV_HEADS, width).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, D_MODEL))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class BareModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.layers = nn.ModuleList(BareLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(D_MODEL, eps=1e-5)
        self.head = nn.Linear(D_MODEL, VOCAB, bias=False)
        width = D_MODEL // HEADS
        angle = torch.outer(torch.arange(SEQ_LEN), 10000.0 ** -(torch.arange(0, width, 2) / width))
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


RENAMED = {
    "attention_norm": "n1",
    "mlp_norm": "n2",
    "attention.query": "q",
    "attention.key": "k",
    "attention.value": "v",
    "attention.out": "o",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.down": "down",
}


def bare_loop(run: Run) -> Callable[[Batch, float], float]:
    """A step of the hand-written program."""
    names = {}
    for name, _ in BareModel().named_parameters():
        theirs = name
        for ours, short in RENAMED.items():
            if name.startswith("layers."):
                _, number, part, last = name.split(".")
                if part == short:
                    theirs = f"layers.{number}.{ours}.{last}"
        names[name] = theirs
    model = BareModel()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(run.model, 0, names[name], parameter.shape, torch.float32))
    masters = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    half = run.recipe.precision == "bf16"
    if half:
        model.to(torch.bfloat16)
    else:
        masters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in masters if each.ndim >= 2], "weight_decay": 0.1},
            {"params": [each for each in masters if each.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )

    def step(batch: Batch, lr: float) -> float:
        total = 0.0
        for inputs, targets in zip(batch.inputs_BS, batch.targets_BS, strict=True):
            logits = model(inputs).flatten(0, 1).float()
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / batch.global_tokens
            loss.backward()
            total += loss.item()
            if half:
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    assert parameter.grad is not None
                    gradient = parameter.grad.float()
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                    parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if half:
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        return total

    return step


def trainer_loop(run: Run) -> Callable[[Batch, float], float]:
    """A step of this package's trainer."""
    trainer = parallelize(run, Mesh(run.layout, 0, torch.device("cpu")), Clock())
    return lambda batch, lr: trainer.step(batch, lr).loss


def the_run(precision: str) -> Run:
    attention = {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": KV_HEADS, "d_head": D_MODEL // HEADS}
    layer = {"attention": attention, "mlp": {"kind": "dense", "d_ff": D_FF}}
    return Run.parse(
        {
            "layout": {},
            "recipe": {
                "seq_len": SEQ_LEN,
                "global_batch": GLOBAL_BATCH,
                "micro_batch": MICRO_BATCH,
                "precision": precision,
                "zero": 0,
            },
            "model": {
                "name": "bench",
                "d_model": D_MODEL,
                "vocab_size": VOCAB,
                "rope": {"theta": 10000.0},
                "layer_groups": [{"repeat": LAYERS, "pattern": [layer]}],
            },
            "cluster": load_cluster("h100-sxm"),
        }
    )


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        made.append(
            Batch(
                list(tokens[:, :-1].contiguous().split(MICRO_BATCH)),
                list(tokens[:, 1:].contiguous().split(MICRO_BATCH)),
                GLOBAL_BATCH * SEQ_LEN,
            )
        )
    return made


def measure(precision: str, steps: int) -> dict[str, Any]:
    """Median seconds of a step of both, and their ratio; the losses must agree."""
    torch.set_num_threads(1)
    run = the_run(precision)
    loops = {"bare": bare_loop(run), "trainwright": trainer_loop(run)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number, batch in enumerate(batches(WARM_UP + steps)):
        order = list(loops) if number % 2 else list(loops)[::-1]
        losses = {}
        for name in order:
            start_s = time.perf_counter()
            losses[name] = loops[name](batch, learning_rate(run.recipe.optimizer, number, WARM_UP + steps))
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start_s)
        assert abs(losses["bare"] - losses["trainwright"]) < 2e-2 * losses["bare"], losses
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    # Neighbouring steps see the same machine: the median of their ratios is steadier than that of the medians.
    ratio = statistics.median(b / t for b, t in zip(seconds["bare"], seconds["trainwright"], strict=True))
    return {"precision": precision, **{f"{name}_s": each for name, each in medians.items()}, "ratio": ratio}


def main() -> None:
    arguments = sys.argv[1:]
    precisions = [each for each in arguments if each in ("fp32", "bf16")] or ["fp32", "bf16"]
    steps = next((int(each) for each in arguments if each.isdigit()), 30)
    found = [measure(precision, steps) for precision in precisions]
    worst = min(each["ratio"] for each in found)
    if "--json" in arguments:
        print(json.dumps({"ratio": worst, "mark": MARK, "steps": steps, "runs": found}))
        return
    for each in found:
        print(
            f"{each['precision']}: trainwright {TOKENS / each['trainwright_s']:,.0f} tokens/s, bare loop "
            f"{TOKENS / each['bare_s']:,.0f} tokens/s, ratio {each['ratio']:.3f}"
        )
    print(f"worst ratio {worst:.3f}, mark {MARK} ({steps} steps in turn, one thread)")


if __name__ == "__main__":
    main()
