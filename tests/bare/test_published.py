"""Tables of published runs: what rows become, what is refused and with which words, and that the shipped table is
read whole."""

import csv
import io

import pytest

from trainwright.cli import catalogue
from trainwright.cli.published import TABLE
from trainwright.measure.published import publisher_of, read_table
from trainwright.measure.published_machine import network_of
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.model import LatentAttention, MoeMlp
from trainwright.spec.published import Band, Bands, PublishedRun

TEXT = (catalogue.DATA / TABLE).read_text("utf-8")
CELLS = {row["id"]: row for row in csv.DictReader(io.StringIO(TEXT))}
RUNS, REFUSED = read_table(TEXT, TABLE)

ROW = {
    "id": "one",
    "source": "someone/something README",
    "year": "2024",
    "framework": "Megatron-LM",
    "model_name": "llama2-7b",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "11008",
    "n_heads": "32",
    "n_kv_heads": "32",
    "head_dim": "128",
    "vocab": "32000",
    "gated_mlp": "1",
    "seq_len": "4096",
    "gpu": "H100",
    "n_gpus": "64",
    "precision": "BF16",
    "tp": "2",
    "pp": "2",
    "dp": "16",
    "micro_batch": "1",
    "global_batch_seqs": "256",
    "zero_or_fsdp": "dist-opt (ZeRO-1)",
    "recompute": "none",
    "step_time_s": "3.0",
}


def table_of(*rows: dict[str, str]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def one(**cells: str) -> PublishedRun:
    runs, refused = read_table(table_of({**ROW, **cells}), "t.csv")
    assert not refused, refused
    return runs[0]


def reason(**cells: str) -> str:
    runs, refused = read_table(table_of({**ROW, **cells}), "t.csv")
    assert not runs
    assert refused[0].line == 2
    return refused[0].reason


# The shipped table


def test_at_most_two_percent_of_the_shipped_rows_are_refused() -> None:
    assert len(RUNS) + len(REFUSED) == len(CELLS)
    assert len(REFUSED) <= 0.02 * len(CELLS)


@pytest.mark.parametrize("run", {run.model: run for run in RUNS}.values(), ids=lambda run: run.id)
def test_parameters_are_those_that_the_table_says(run: PublishedRun) -> None:
    assert run.model.params == pytest.approx(float(CELLS[run.id]["params_total_b"]) * 1e9, rel=0.03)


@pytest.mark.parametrize(
    "run", {run.model: run for run in RUNS if run.model.is_moe}.values(), ids=lambda run: run.id
)
def test_active_parameters_are_too(run: PublishedRun) -> None:
    assert run.model.active_params == pytest.approx(float(CELLS[run.id]["params_active_b"]) * 1e9, rel=0.07)


def test_every_kind_of_software_and_cluster_is_of_the_catalogue() -> None:
    assert {run.software for run in RUNS} <= set(catalogue.software_names())
    assert {run.cluster for run in RUNS} <= set(catalogue.cluster_names())


def test_every_run_has_a_publisher_and_few_are_alone() -> None:
    publishers = {run.publisher for run in RUNS}
    assert 15 <= len(publishers) <= 30
    assert publisher_of("NVIDIA/NeMo-Framework-Launcher examples") == "NVIDIA/NeMo"
    assert publisher_of("Korthikanti et al. arXiv:2205.05198 Table 5") == "arXiv:2205.05198"
    assert publisher_of("A blog of someone, 2025") == "A blog of"


def test_tables_that_print_one_measurement_twice_are_one_fold() -> None:
    gpt3 = {run.siblings for run in RUNS if "README_175b" in run.source}
    assert len(gpt3) == 1
    assert len({run.source for run in RUNS if "README_175b" in run.source}) == 2


# Degrees and batches


def test_the_product_of_degrees_must_be_the_number_of_gpus() -> None:
    assert reason(dp="8") == "tp*cp*pp*dp=2*1*2*8=32 is not n_gpus=64"
    assert reason(dp="", tp="3", n_gpus="64") == "tp*cp*pp=3*1*2=6 does not divide n_gpus=64"
    assert one(dp="").layout.dp == 16


def test_the_batch_must_be_whole() -> None:
    assert reason(global_batch_seqs="100") == "micro_batch*dp=1*16=16 does not divide global_batch_seqs=100"
    assert one(global_batch_seqs="", grad_accum="4.0").recipe.global_batch == 64
    assert one(micro_batch="", grad_accum="4").recipe.micro_batch == 4
    assert "neither" in reason(micro_batch="", global_batch_seqs="")


def test_interleaving_needs_rounds_of_microbatches() -> None:
    whole = one(vpp="4")
    assert (whole.layout.vpp, whole.recipe.schedule) == (4, "interleaved_1f1b")
    broken = one(vpp="4", global_batch_seqs="240")
    assert (broken.layout.vpp, broken.recipe.schedule) == (1, "1f1b")
    assert any("no whole rounds" in sentence for sentence in broken.assumed)
    assert one(vpp="4", pp="1", dp="32").layout.vpp == 1


def test_ranks_of_megatron_stand_dp_inside_pp_and_llama_3_outside() -> None:
    assert one().layout.order == "tp-cp-dp-pp"
    assert one(source="Llama 3, arXiv:2407.21783").layout.order == "tp-cp-pp-dp"


def test_a_stage_of_embedding_or_loss_alone() -> None:
    run = next(run for run in RUNS if run.model.num_layers < run.layout.stages)
    assert run.layout.stage_layers[0] == 0
    assert run.layout.stage_layers[-1] == 0
    assert sum(run.layout.stage_layers) == run.model.num_layers


# Cells


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        ({"n_gpus": "many"}, "n_gpus='many': must be a number, or empty"),
        ({"hidden": ""}, "hidden='': must be given"),
        ({"hidden": "0"}, "hidden=0: must be at least 1"),
        ({"n_layers": "2.5"}, "n_layers='2.5': must be a whole number"),
        ({"step_time_s": "-1"}, "step_time_s='-1': must be a finite number of at least 0"),
        ({"step_time_s": ""}, "has no step time, tokens/s or TFLOP/s; give step_time_s"),
        ({"n_kv_heads": "5"}, "num_kv_heads=5: must divide num_heads=32"),
        ({"zero_stage": "7"}, "zero_stage=7 is none of 0, 1, 2, 3"),
    ],
)
def test_a_cell_that_can_not_be(cells: dict[str, str], complaint: str) -> None:
    assert complaint in reason(**cells)


def test_one_bad_row_spoils_no_other() -> None:
    runs, refused = read_table(table_of(ROW, {**ROW, "id": "two", "gpu": "TPU"}, {**ROW, "id": "three"}), "t.csv")
    assert [run.id for run in runs] == ["one", "three"]
    assert [(row.id, row.line) for row in refused] == [("two", 3)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "t.csv: is no table of published runs: its header lacks id, gpu"),
        ("a,b\n1,2\n", "t.csv: is no table of published runs"),
        (table_of(ROW).splitlines()[0] + "\n", "t.csv: has no rows below its header"),
        (table_of(ROW).rstrip() + ",more\n", "t.csv: line 2 has 26 cells for 25 columns"),
        (table_of(ROW) + 'x,"y\n', "t.csv: not CSV: unexpected end of data"),
    ],
)
def test_a_text_that_is_no_table(text: str, complaint: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        read_table(text, "t.csv")
    assert str(refusal.value).startswith(complaint)


def test_the_step_time_follows_from_what_there_is() -> None:
    tokens = 256 * 4096
    assert one(step_time_any_s="2.0").step_s == 2.0
    assert one(step_time_s="", tokens_per_s_per_gpu="8192").step_s == pytest.approx(tokens / 8192 / 64)
    run = one(step_time_s="", tflops_per_gpu="400", flops_convention="model FLOPs, causal-halved attention")
    flops = run.model.flops_per_token(4096, "causal") * tokens / 64
    assert run.step_s == pytest.approx(flops / 400e12)
    again = one(step_time_s="", tflops_per_gpu="400", flops_convention="hardware FLOPs (4x fwd)", recompute="full")
    assert again.step_s == pytest.approx(run.model.flops_per_token(4096, "full") * 4 / 3 * tokens / 64 / 400e12)
    assert any("TFLOP/s" in sentence for sentence in again.assumed)


@pytest.mark.parametrize("run", [run for run in RUNS if "tokens/s derived" not in CELLS[run.id]["notes"]][::7])
def test_derived_step_times_agree_with_those_of_the_table(run: PublishedRun) -> None:
    cells = CELLS[run.id]
    if not cells["tokens_per_s_per_gpu"]:
        return
    ours, _ = read_table(table_of({**cells, "step_time_any_s": "", "step_time_s": ""}), "t.csv")
    assert ours[0].step_s == pytest.approx(float(cells["step_time_any_s"]), rel=0.03)


# Machines and software


@pytest.mark.parametrize(
    ("gpu", "cluster"),
    [
        ("A100-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("A100 40 GB", "a100-40gb-sxm"),
        ("A100-PCIe-80GB", "a100-80gb-pcie"),
        ("H100 SXM", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("8xH100", "h100-sxm"),
        ("H200", "h200"),
        ("H20", "h20"),
        ("H800-SXM5", "h800"),
        ("A800", "a800"),
        ("V100-SXM2-32GB", "v100-32gb-sxm"),
        ("GB200 NVL72", "gb200-nvl72"),
        ("B200", "b200"),
        ("AMD MI300X", "mi300x"),
    ],
)
def test_names_of_gpus_are_matched_loosely(gpu: str, cluster: str) -> None:
    assert one(gpu=gpu).cluster == cluster


def test_an_unknown_gpu_lists_near_names() -> None:
    assert reason(gpu="H1000").startswith("gpu='H1000': is no GPU of the catalogue; did you mean H100")
    assert "known are" in reason(gpu="Trainium2")
    assert "GH200" in reason(gpu="GH200")


@pytest.mark.parametrize(
    ("text", "nics", "each"),
    [
        ("1600 Gb/s RoCE per node", 8, 25e9),
        ("NVLink node; 4x100 Gb/s RoCE", 4, 12.5e9),
        ("NVLink4 + InfiniBand 8x50 GB/s", 8, 50e9),
        ("NVLink 4; 4x OmniPath per node (Jean Zay)", 4, 12.5e9),
        ("Selene: NVSwitch node, 8x HDR InfiniBand (200 Gb/s) per node", 8, 25e9),
        ("backend RDMA 400 Gb/s per GPU", 8, 50e9),
        ("GCP A3 Mega (GPUDirect-TCPXO)", 8, 25e9),
        ("3.2 Tbps per node", 8, 50e9),
    ],
)
def test_what_a_source_says_of_its_network(text: str, nics: int, each: float) -> None:
    assert network_of(text, 8) == {"fabric.nics_per_node": nics, "fabric.nic_bytes_per_s": each}


@pytest.mark.parametrize("text", ["", "single node", "NVL72", "8 NICs per node (ionic), speed not stated"])
def test_what_states_no_network(text: str) -> None:
    assert network_of(text, 8) == {}


@pytest.mark.parametrize(
    ("framework", "source", "year", "software"),
    [
        ("Megatron-LM", "arXiv:2104.04473", "2021", "megatron-2021"),
        ("Megatron-LM", "a blog", "2023", "nemo-2024"),
        ("Megatron-Core", "a blog", "2025", "megatron-bridge-2025"),
        ("NeMo / Megatron-Core", "NVIDIA/dgxc-benchmarking README.md @v25.04.02", "2025", "nemo-2024"),
        ("NeMo / Megatron-Core", "NVIDIA/dgxc-benchmarking README.md @v25.05.05", "2025", "nemo-2025"),
        ("Megatron-Bridge", "docs, 26.04.01 container", "2026", "megatron-bridge-2026"),
        ("Megatron-Bridge", "docs, 26.08 container", "2026", "megatron-bridge-2026-06"),
        ("Megatron-DeepSpeed", "a log", "2022", "bloom-2022"),
        ("ColossalAI", "a blog", "2023", "generic-2023"),
        ("nanotron", "a playbook", "2025", "generic"),
        ("MaxText (JAX)", "a README", "2025", "jax"),
    ],
)
def test_software_by_framework_and_time(framework: str, source: str, year: str, software: str) -> None:
    assert one(framework=framework, source=source, year=year).software == software


# Recipes


@pytest.mark.parametrize(
    ("text", "precision", "kind"),
    [
        ("BF16", "bf16", "BF16"),
        ("FP16 mixed", "fp16", "FP16"),
        ("FP8-CS", "fp8-current", "FP8"),
        ("FP8 (tensorwise)", "fp8-current", "FP8"),
        ("FP8", "fp8-delayed", "FP8"),
        ("FP8 (TransformerEngine)", "fp8-delayed", "FP8"),
        ("FP8 (rowwise)", "fp8-rowwise", "FP8"),
        ("FP8 (blockwise)", "fp8-block", "FP8"),
        ("MXFP8", "mxfp8", "FP8"),
        ("NVFP4", "nvfp4", "FP4"),
        ("bfloat16", "bf16", "BF16"),
        ("float16", "fp16", "FP16"),
    ],
)
def test_precisions(text: str, precision: str, kind: str) -> None:
    run = one(precision=text)
    assert (run.recipe.precision, run.precision_class) == (precision, kind)


@pytest.mark.parametrize(
    ("text", "zero", "replicas"),
    [
        ("none (replicated optimizer)", 0, 1),
        ("DDP", 0, 1),
        ("dist-opt (ZeRO-1)", 1, 1),
        ("ZeRO-1, optimizer group=8", 1, 2),
        ("ZeRO-1, optimizer group=all DP", 1, 1),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", 2, 1),
        ("FSDP FULL_SHARD (ZeRO-3)", 3, 1),
        ("HSDP (shard in node, replicate across)", 3, 2),
        ("FSDP/ZeRO-3 over 8 GPUs x DP 2 (HSDP)", 3, 2),
        ("FSDP2 (ZeRO-3) over 16, reshard_after_forward=false", 3, 1),
    ],
)
def test_sharding(text: str, zero: int, replicas: int) -> None:
    recipe = one(zero_or_fsdp=text).recipe
    assert (recipe.zero, recipe.dp_replicate) == (zero, replicas)
    assert recipe.reshard_after_forward == ("false" not in text)


@pytest.mark.parametrize(
    ("said", "detail", "recompute", "ops", "layers"),
    [
        ("none", "", "none", ("attention",), None),
        ("full", "", "full", ("attention",), None),
        ("selective", "core attention", "selective", ("attention",), None),
        ("selective", "modules layernorm+moe_act", "selective", ("norm", "activation"), None),
        ("selective", "mla_up_proj+mlp+moe (README)", "selective", ("latent_up", "mlp", "moe"), None),
        ("partial", 'every 2nd layer ("selective layer")', "full", ("attention",), 8),
        ("selective", "selective op", "full", ("attention",), 5),
    ],
)
def test_recompute(said: str, detail: str, recompute: str, ops: tuple[str, ...], layers: int | None) -> None:
    run = one(recompute=said, recompute_detail=detail)
    assert run.recipe.recompute == recompute
    assert run.recipe.recompute_ops == ops
    assert run.recipe.recompute_layers == layers


def test_recompute_that_is_not_said_is_doubtful() -> None:
    run = one(recompute="unknown")
    assert run.recipe.recompute == "none"
    assert run.is_doubtful
    assert "recompute is not stated; none is assumed" in run.assumed
    assert not one().is_doubtful


@pytest.mark.parametrize(
    ("framework", "year", "notes", "kernel"),
    [
        ("Megatron-LM", "2021", "", "unfused"),
        ("Composer / PyTorch FSDP", "2023", "flash attention", "flash_1"),
        ("torchtitan", "2025", "", "flash_2"),
        ("NeMo / Megatron-Core", "2024", "", "flash"),
        ("something", "2024", "", "flash_2"),
        ("something", "2026", "", "flash"),
        ("something", "2026", "WITHOUT flash attention (source note)", "unfused"),
    ],
)
def test_attention_kernels_by_time(framework: str, year: str, notes: str, kernel: str) -> None:
    assert one(framework=framework, year=year, notes=notes).recipe.attention_kernel == kernel


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("cuda_graph=full_iteration:[]", "full"),
        ("cuda_graph=local:full_iteration", "full"),
        ("cuda_graph=none:full_iteration", "none"),
        ("cuda_graph=transformer_engine:['attn', 'moe_router']", "partial"),
        ("HybridEP, TE cuda graphs", "partial"),
        ("", "none"),
    ],
)
def test_cuda_graphs(notes: str, graphs: str) -> None:
    assert one(notes=notes).recipe.cuda_graphs == graphs


MOE = {
    "model_name": "deepseek-v3",
    "framework": "Megatron-Bridge / Megatron-Core",
    "attn": "mla",
    "hidden": "7168",
    "n_heads": "128",
    "n_kv_heads": "128",
    "n_layers": "61",
    "ffn_hidden": "18432",
    "moe_experts": "256",
    "moe_topk": "8",
    "moe_ffn_hidden": "2048",
    "moe_shared": "1",
    "first_dense_layers": "3",
    "ep": "8",
    "sp": "0",
}


def test_a_mixture_of_experts() -> None:
    run = one(**MOE, moe_routing="forced balance, dropless", notes="moe_a2a_overlap=True; dispatcher=hybridep")
    dense, moe = run.model.layers[0], run.model.layers[-1]
    assert (dense.mlp.kind, moe.mlp.kind) == ("dense", "moe")
    assert isinstance(moe.mlp, MoeMlp)
    assert (moe.mlp.num_groups, moe.mlp.top_groups) == (8, 4)
    assert isinstance(moe.attention, LatentAttention)
    assert run.recipe.sequence_parallel  # tp above 1 needs it
    assert run.recipe.dispatch == "hierarchical"
    assert run.recipe.overlap.ep
    assert not run.natural_routing


def test_routing() -> None:
    dropped = one(**MOE, moe_routing="token-drop, capacity 1.25 pad-to-capacity").recipe
    assert dropped.capacity_factor == 1.25
    assert one(**MOE, moe_routing="token-drop").recipe.capacity_factor == 1.0
    natural = one(**MOE, moe_routing="dropless, natural routing")
    assert natural.recipe.capacity_factor is None
    assert natural.recipe.expert_imbalance > 1
    assert natural.is_doubtful


@pytest.mark.parametrize(
    ("text", "gated"), [("1", True), ("true", True), ("0", False), ("False", False), ("", False)]
)
def test_flags(text: str, gated: bool) -> None:
    assert one(gated_mlp=text).model.layers[0].mlp.gated is gated


def test_layers_that_alternate() -> None:
    windowed = one(attn_window="128 on every 2nd layer").model.layers
    assert [layer.attention.sliding_window for layer in windowed[:4]] == [128, None, 128, None]
    sparse = one(**{**MOE, "attn": "gqa", "first_dense_layers": "0", "n_layers": "4", "moe_layer_freq": "2"})
    assert [layer.mlp.kind for layer in sparse.model.layers] == ["dense", "moe", "dense", "moe"]


def test_a_pipeline_that_is_flushed_within_a_step() -> None:
    note = "the pipeline is flushed after every LBS/MBS=8 microbatches (GA is on top)"
    run = one(notes=note, global_batch_seqs="512")
    assert run.repeats == 4
    assert run.recipe.global_batch == 128


# Bands


def test_bands_are_wider_for_what_is_not_known() -> None:
    narrow, wide = Band(low=0.9, high=1.2, rows=10), Band(low=0.8, high=1.5, rows=10)
    bands = Bands(
        share=0.8,
        dense_seen=narrow,
        dense_unseen=wide,
        moe_seen=wide,
        moe_unseen=wide,
        widening=2,
        software=("nemo-2025",),
        devices=("H100",),
    )
    known = {"is_moe": False, "software": "nemo-2025", "device": "H100"}
    assert bands.class_of(**known) == (0.9, 1.2)
    assert bands.class_of(**{**known, "is_moe": True}) == (0.8, 1.5)
    assert bands.class_of(**{**known, "software": None}) == (0.8, 1.5)
    assert bands.class_of(**{**known, "device": "X"}) == pytest.approx((0.81, 1.44))
    assert bands.class_of(**known, is_doubtful=True) == pytest.approx((0.81, 1.44))
