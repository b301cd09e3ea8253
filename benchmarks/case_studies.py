"""Well-known runs, predicted beside what was published: writes `benchmarks/case_studies.md` and, with
--write-runs, the run files of `runs/` from the catalogue as it is now.

Each case says where its layout was read, and what of it was not and is assumed. A published TFLOP/s is turned into
a step time under the convention that it can have been counted by: full attention, or the half that a causal mask
leaves.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.cli import catalogue
from trainwright.plan.predict import predict
from trainwright.spec import toml
from trainwright.spec.answers import Prediction
from trainwright.spec.layout import Layout
from trainwright.spec.model import FlopConvention
from trainwright.spec.recipe import Optimizer, Overlap, Recipe
from trainwright.spec.run import Budget, DataSpec, Run

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """A run, and what its authors measured: one of step_s, tflops and gpu_hours."""

    name: str
    model: str
    cluster: str
    layout: Layout
    recipe: Recipe
    source: str
    assumed: str = ""
    software: str | None = None
    tokens: int | None = None
    step_s: float | None = None
    tflops: float | None = None
    convention: FlopConvention = "full"
    gpu_hours: float | None = None
    worked: str = ""
    """An answer that was worked out by hand and not measured."""

    def run(self) -> Run:
        vocab = DataSpec.model_fields["vocab_size"].default
        model = catalogue.load_model(self.model)
        return Run(
            name=self.name,
            layout=self.layout,
            recipe=self.recipe,
            data=DataSpec(vocab_size=min(vocab, model.vocab_size)),
            budget=None if self.tokens is None else Budget(tokens=self.tokens),
            model=model,
            cluster=catalogue.compose_cluster(self.cluster, self.software),
        ).check()

    def published_step_s(self, run: Run) -> float | None:
        """The published step time, from whichever figure there is."""
        if self.step_s is not None:
            return self.step_s
        tokens = run.recipe.tokens_per_step
        if self.tflops is not None:
            flops = run.model.flops_per_token(run.recipe.seq_len, self.convention) * tokens
            return flops / run.layout.world / (self.tflops * 1e12)
        if self.gpu_hours is not None and self.tokens is not None:
            return self.gpu_hours * 3600 / run.layout.world / (self.tokens / tokens)
        return None


def llama_405b(name: str, tflops: float, layout: dict, seq_len: int, global_batch: int, **recipe: object) -> Case:
    return Case(
        name=name,
        model="llama-3.1-405b",
        cluster="h100-sxm",
        layout=Layout(tp=8, pp=16, vpp=8, **layout),
        recipe=Recipe.parse(
            {
                "seq_len": seq_len,
                "global_batch": global_batch,
                "zero": 2,
                "schedule": "interleaved_1f1b",
                **recipe,
            }
        ),
        source="arXiv:2407.21783 table 4 and s3.3.2",
        assumed="8 chunks a rank, as 126 layers and two slots on 16 ranks allow; gradients sharded (zero 2), in "
        "the paper's words; TFLOP/s count causal attention, the only reading under which its three rows "
        "agree with one another (under full attention the last would take 15.2 s)"
        + ("; the product of an MLP's gate is made again in backward, as fused kernels do" if recipe else ""),
        tokens=15_600_000_000_000,
        tflops=tflops,
        convention="causal",
    )


ACTIVATION: dict = {"recompute": "selective", "recompute_ops": ["activation"]}

GPT_ON_SELENE = {
    "seq_len": 2048,
    "precision": "fp16",
    "zero": 0,
    "recompute": "selective",
    "attention_kernel": "unfused",
    "dropout": 0.1,
    "gradient_format": "bf16",
    "fused_accumulation": True,
    "overlap": Overlap(dp=False, pp=False),
}

CASES = (
    llama_405b("llama-3.1-405b_h100x8192_8k", 430, {"dp": 64}, 8192, 2048, **ACTIVATION),
    llama_405b("llama-3.1-405b_h100x16384_8k", 400, {"dp": 128}, 8192, 2048),
    llama_405b("llama-3.1-405b_h100x16384_128k", 380, {"dp": 8, "cp": 16}, 131072, 128),
    Case(
        name="deepseek-v3_h800x2048_4k",
        model="deepseek-v3",
        cluster="h800",
        layout=Layout(pp=16, vpp=2, dp=128, ep=64, order="tp-cp-dp-pp"),
        recipe=Recipe(
            seq_len=4096,
            global_batch=15360,
            precision="fp8-block",
            schedule="dualpipe",
            dispatch="hierarchical",
            dispatch_fp8=True,
            gather_fp8=True,
            activations_fp8=True,
            recompute="selective",
            recompute_ops=("norm", "latent_up", "activation"),
            zero=1,
            optimizer=Optimizer(moments="bf16"),
        ),
        source="arXiv:2412.19437 s3, s4.2 and table 1",
        assumed="a batch of 15,360 through the whole run (it grows to that over the first 469B tokens); weights "
        "kept in fp8 and fp32 alone",
        tokens=14_800_000_000_000,
        gpu_hours=2_664_000,
    ),
    Case(
        name="megatron-530b_a100x2240_2k",
        model="megatron-530b",
        cluster="a100-80gb-sxm",
        software="megatron-2021",
        layout=Layout(tp=8, pp=35, vpp=3, dp=8, order="tp-cp-dp-pp"),
        recipe=Recipe.parse({**GPT_ON_SELENE, "global_batch": 2240, "schedule": "interleaved_1f1b"}),
        source="arXiv:2205.05198 s6.3",
        step_s=39.15,
    ),
    Case(
        name="megatron-1t_a100x512_2k",
        model="megatron-1t",
        cluster="a100-80gb-sxm",
        software="megatron-2021",
        layout=Layout(tp=8, pp=64, order="tp-cp-dp-pp"),
        recipe=Recipe.parse({**GPT_ON_SELENE, "global_batch": 512}),
        source="arXiv:2205.05198 table 5",
        step_s=71.49,
    ),
    Case(
        name="llama-3.1-70b_h100x1024_8k",
        model="llama-3.1-70b",
        cluster="h100-sxm",
        layout=Layout(tp=8, pp=2, dp=64),
        recipe=Recipe(seq_len=8192, global_batch=1024, zero=1, overlap=Overlap(tp=True)),
        source="worked by the textbook rules",
        tokens=15_000_000_000_000,
        worked="states of 16 bytes a parameter are 70 GB a GPU after tp x pp: the optimizer is sharded; it fits",
    ),
    Case(
        name="llama-3.1-70b_h100x1024_8k_fsdp",
        model="llama-3.1-70b",
        cluster="h100-sxm",
        layout=Layout(tp=8, dp=128),
        recipe=Recipe.parse({"seq_len": 8192, "global_batch": 1024, "zero": 3, **ACTIVATION}),
        source="worked by the textbook rules",
        tokens=15_000_000_000_000,
        worked="or without a pipeline, parameters sharded over 128; it fits",
    ),
    Case(
        name="llama-3.1-70b_h100x512_8k",
        model="llama-3.1-70b",
        cluster="h100-sxm",
        layout=Layout(tp=8, pp=2, dp=32),
        recipe=Recipe(seq_len=8192, global_batch=1024, zero=1, overlap=Overlap(tp=True)),
        source="worked by the textbook rules",
        tokens=15_000_000_000_000,
        worked="6.3e24 FLOPs at 40% MFU take 4.4M GPU-hours, about 360 days: the cluster is too small; 4,096 GPUs "
        "take 45",
    ),
)


@dataclass(frozen=True)
class Told:
    """A case with its prediction."""

    case: Case
    run: Run
    prediction: Prediction
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        published = self.case.published_step_s(self.run)
        return None if published is None else self.prediction.step_s / published - 1


def told() -> list[Told]:
    runs = [(case, case.run()) for case in CASES]
    return [Told(case, run, predict(run)) for case, run in runs]


def report(cases: list[Told]) -> str:
    """The whole page."""
    lines = [
        "# Well-known runs: predicted beside published",
        "",
        "Written by `python benchmarks/case_studies.py` from the catalogue's constants. Steps in seconds; TFLOP/s "
        "per GPU count full attention unless the case says otherwise; `runs/` has each run complete.",
        "",
        "| run | step, predicted | step, published | error | TFLOP/s | MFU | peak GiB | fits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in cases:
        plan, published = each.prediction, each.case.published_step_s(each.run)
        error = "" if each.error is None else f"{each.error:+.1%}"
        cells = [
            f"`{each.case.name}`",
            f"{plan.step_s:.2f}",
            "" if published is None else f"{published:.2f}",
            error,
            f"{plan.flops_per_s_per_device / 1e12:.0f}",
            f"{plan.mfu:.1%}",
            f"{plan.peak_bytes / 2**30:.1f}",
            "yes" if plan.fits else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for each in cases:
        lines += ["", *_section(each)]
    return "\n".join(lines) + "\n"


def _section(each: Told) -> list[str]:
    case, plan = each.case, each.prediction
    published = [
        f"{case.tflops:.0f} TFLOP/s per GPU ({case.convention} attention)" if case.tflops else "",
        f"{case.step_s:.2f} s a step" if case.step_s else "",
        f"{case.gpu_hours / 1e6:.3f}M GPU-hours" if case.gpu_hours else "",
        case.worked,
    ]
    seconds = sorted(plan.ledger.seconds.items(), key=lambda item: -abs(item[1]))
    causes = ", ".join(
        f"{cause} {value / plan.step_s:.1%}" for cause, value in seconds if abs(value) > 2e-3 * plan.step_s
    )
    lines = [
        f"## {case.name}",
        "",
        f"Source: {case.source}. Published: {'; '.join(text for text in published if text)}.",
    ]
    if case.assumed:
        lines.append(f"Assumed: {case.assumed}.")
    lines.append(f"Where the step goes: {causes}.")
    if plan.gpu_hours is not None and plan.days is not None:
        lines.append(f"The whole budget: {plan.gpu_hours / 1e6:.2f}M GPU-hours, {plan.days:.0f} days.")
    return lines


def _summary(each: Told) -> dict[str, object]:
    plan = each.prediction
    return {
        "step_s": plan.step_s,
        "error": each.error,
        "fits": plan.fits,
        "gpu_hours": plan.gpu_hours,
        "mfu": plan.mfu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-runs", action="store_true", help="write runs/*.toml too")
    parser.add_argument("--json", action="store_true", help="print one JSON document, write nothing")
    wanted = parser.parse_args()
    cases = told()
    if wanted.json:
        print(json.dumps({each.case.name: _summary(each) for each in cases}))
        return
    (ROOT / "benchmarks" / "case_studies.md").write_text(report(cases), encoding="utf-8")
    if wanted.write_runs:
        for each in cases:
            (ROOT / "runs" / f"{each.case.name}.toml").write_text(toml.write(each.run), encoding="utf-8")
    print(report(cases))


if __name__ == "__main__":
    main()
