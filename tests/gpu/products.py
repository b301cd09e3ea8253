"""Low-precision products of one GPU: against emulation of the same operands, and their speed against bf16's.

For each recipe the three products of a linear layer of n x n that reads n tokens: by the device's instructions
where it has them (else emulated on it, which is said), beside emulation; then the FLOP/s of Fprop, operands ready,
and of a whole step of the layer, forward and backward with all casts, over bf16's. Under five minutes on one card.

    python tests/gpu/products.py [--sizes 4096 8192 16384] [--json]
    python tests/gpu/products.py --tiny      # the same of 256 x 256, on this machine's CPU
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from trainwright.spec.recipe import PRECISIONS, Precision
from trainwright.train.clock import Clock
from trainwright.train.model.linear import Linear
from trainwright.train.precision.arithmetic import Arithmetic, UnderWay
from trainwright.train.precision.largest import Current
from trainwright.train.precision.linear import LowPrecision
from trainwright.train.precision.product import by_emulation, product
from trainwright.train.precision.recipes import RECIPES, engine_of
from trainwright.train.precision.shared import HeldWeight, SharedInput

COMPARED = 1024
"""Rows and columns of the results that are held against emulation; the sum is over all of n."""
TIMES = 10


def arithmetic_of(precision: Precision) -> Arithmetic:
    return Arithmetic("layer", precision, Current({}, Clock()), UnderWay())


def compared(precision: Precision, size: int, device: torch.device) -> dict[str, float]:
    """Worst error of each product over the root mean square of its results, against emulation in fp32."""
    rounded, rows = arithmetic_of(precision), min(COMPARED, size)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    operands = {
        "Fprop": (rounded.along("input", normal(rows, size)), rounded.along("weight", normal(rows, size))),
        "Dgrad": (rounded.along("gradient", normal(rows, size)), rounded.across("weight", normal(size, rows))),
        "Wgrad": (rounded.across("gradient", normal(size, rows)), rounded.across("input", normal(size, rows))),
    }
    errors = {}
    for name, (a, b) in operands.items():
        meant = by_emulation(a, b, torch.float32)
        found = product(a, b, torch.bfloat16).float()
        errors[name] = float((found - meant).abs().max() / meant.square().mean().sqrt())
    return errors


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the best of three means; device time on a GPU."""
    best_s = float("inf")
    for _ in range(3):
        work()
        _wait(device)
        began_s = time.perf_counter()
        for _ in range(TIMES):
            work()
        _wait(device)
        best_s = min(best_s, (time.perf_counter() - began_s) / TIMES)
    return best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(precision: Precision | None, size: int, device: torch.device) -> dict[str, float]:
    """Seconds of Fprop with its operands ready, and of a step of a layer; None: in bf16."""
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = Linear(size, size, bias=False).to(device, torch.bfloat16)
    upstream = torch.randn_like(x)
    if precision is None:
        product_s = seconds(lambda: F.linear(x.detach(), linear.weight.detach()), device)
        weights = None
    else:
        rounded, weights = arithmetic_of(precision), HeldWeight(holds=True)
        a, b = rounded.along("input", x), rounded.along("weight", linear.weight)
        product_s = seconds(lambda: product(a, b, torch.bfloat16), device)
        linear.product = LowPrecision(rounded, SharedInput(1), weights, keeps_input=False)

    def step() -> None:
        if weights is not None:
            weights.forget()
        x.grad = linear.weight.grad = None
        linear(x).backward(upstream)

    return {"product_s": product_s, "step_s": seconds(step, device)}


def measured(sizes: list[int], device: torch.device) -> dict[str, Any]:
    """By recipe and size."""
    plain = {size: timed(None, size, device) for size in sizes}
    found: dict[str, Any] = {
        "bf16": {
            str(size): {
                "product_flops_per_s": 2 * size**3 / each["product_s"],
                "step_flops_per_s": 6 * size**3 / each["step_s"],
            }
            for size, each in plain.items()
        }
    }
    for precision in PRECISIONS:
        if precision not in RECIPES:
            continue
        engine = engine_of(precision, device)
        rows = {}
        for size in sizes:
            low = timed(precision, size, device)
            rows[str(size)] = {
                "product_flops_per_s": 2 * size**3 / low["product_s"],
                "product_speedup": plain[size]["product_s"] / low["product_s"],
                "step_speedup": plain[size]["step_s"] / low["step_s"],
                "errors": compared(precision, size, device),
            }
        half_step = RECIPES[precision].fprop_input.format.half_step
        found[precision] = {"hardware": engine.is_hardware, "why": engine.why, "half_step": half_step, **rows}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU is seen here; try --tiny on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    sizes = [256] if options.tiny else options.sizes
    found = measured(sizes, device)
    if options.json:
        print(json.dumps(found))
        return
    for precision, rows in found.items():
        print(f"{precision}: {rows.get('why', '')}")
        for size in map(str, sizes):
            row = rows[size]
            speed = f"{row['product_flops_per_s'] / 1e12:,.1f} TFLOP/s"
            if precision == "bf16":
                print(f"  {size:>6}  {speed}")
                continue
            gains = f"{row['product_speedup']:.2f}x the product, {row['step_speedup']:.2f}x the step"
            errors = ", ".join(f"{name} {error:.2%}" for name, error in row["errors"].items())
            print(f"  {size:>6}  {speed}, {gains}; off emulation by {errors}")


if __name__ == "__main__":
    main()
