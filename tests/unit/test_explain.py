"""``coda explain``: launches, tensors, bytes and reasons of the blocks, forward and backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coda.cli import main
from coda.cli.explain import explain
from coda.cli.request import Request
from coda.cost import GPUS, cost
from coda.frontend import load_path
from coda.ir import Program, rewrite
from coda.passes import derive

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LLAMA = str(EXAMPLES / "llama3_block.coda")
SIZES = {"M": 256, "D": 512, "A": 384, "F": 640, "V": 1000, "B": 2, "T": 128, "N": 512, "HQ": 4, "HK": 2, "H": 4,
         "d": 64, "P": 300, "f": 32}  # fmt: skip


def blocks() -> dict[str, Program]:
    consts = {"phi3_block": {"HQ": 4, "HK": 2}}
    paths = sorted(EXAMPLES.glob("*_block.coda"))
    return {n: p for f in paths for n, p in load_path(f, consts.get(f.stem, {})).programs.items()}


BLOCKS = blocks()


def report_of(name: str, backward: bool) -> dict:
    program = BLOCKS[name]
    symbols = {s.name for a in program.axes for s in a.size.free_symbols}
    request = Request(program, {n: s for n, s in SIZES.items() if n in symbols})
    return explain(request, backward=backward).document()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_tensor_comes_from_somewhere_and_every_operation_runs_somewhere(name, backward):
    report = report_of(name, backward)
    json.dumps(report)
    sides = [report, report["backward"]] if backward else [report]
    for side in sides:
        if side["reason"] is not None:  # not lowered, and each operation says why
            assert not side["kernels"] and {o["reason"] for o in side["operations"]} == {side["reason"]}
            continue
        written: dict[str, int] = {}
        for kernel in side["kernels"]:
            for tensor in kernel["reads"]:
                assert tensor["bytes"] is not None
                if tensor["name"] in written and not tensor["name"].startswith("d_"):
                    assert tensor["bytes"] == written[tensor["name"]], tensor
            written |= {t["name"]: t["bytes"] for t in kernel["writes"]}
            assert kernel["operations"] and kernel["floor_ms"] > 0
            assert (kernel["reason"] is None) == (kernel["kind"] == "gemm")
        assert set(side["between"]) <= written.keys()
        assert sum(k["bytes"] for k in side["kernels"]) == side["totals"]["bytes_fused"]
        assert sum(k["flops"] for k in side["kernels"]) == side["totals"]["flops"]
        assert side["totals"]["bytes_fused"] < side["totals"]["bytes_unfused"]
        assert sum(side["totals"]["launches"].values()) == side["launches"]
        names = {k["name"] for k in side["kernels"]}
        idle = names - {o["kernel"] for o in side["operations"]}  # they only add up what another kernel began
        assert all(name.endswith("_finish") for name in idle)
        products = [o for o in side["operations"] if o["operation"] == "dot"]
        assert products and all(o["kernel"].count("gemm") for o in products if len(names) > 2)


def test_the_launches_of_a_llama_mlp():
    report = report_of("llama3_mlp", False)
    assert report["totals"]["launches"] == {"gemm": 3}  # gate and up finish the sums that they read
    first, second = report["kernels"][:2]
    m, d, a = SIZES["M"], SIZES["D"], SIZES["A"]
    partial = next(t for t in first["writes"] if "partial" in t["name"])
    assert partial["bytes"] == m * 4 * (d // 128)  # a value for each row and tile of 128 columns
    assert partial in second["reads"]
    assert first["flops"] == 2 * m * d * a
    assert first["bytes"] == 2 * (m * a + d * a + m * d + d) + 2 * 2 * m * d + partial["bytes"]
    report = report_of("llama3_mlp", True)
    assert report["totals"]["launches"]["gemm"] == 3
    assert report["backward"]["totals"]["launches"]["gemm"] == 6  # the gradients of gate and up are one
    assert [r["rule"] for r in report["rewrites"]].count("delay_norm") >= 2
    assert {"algebraic ('n' is rounded without its row factor)", "bitwise"} <= {r["label"] for r in report["rewrites"]}


def test_a_kernel_that_no_product_hosts_says_why(capsys):
    gemma = str(EXAMPLES / "gemma2_block.coda")
    assert main(["explain", gemma, "--program", "gemma2_mlp"]) == 0
    text = capsys.readouterr().out
    assert text.count("is a kernel of its own: it needs statistics of whole rows") == 2
    assert "bytes, gemma2_mlp_5_row" in text


def test_the_text_has_each_launch_with_its_floor(capsys):
    sizes = "M=8192,D=4096,A=4096,F=14336"
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--dims", sizes, "--backward", "--wrt", "w_down"]) == 0
    text = capsys.readouterr().out
    assert "launches: 3 gemm" in text and "sums_partial" in text
    assert "all of them" in text and "llama3_mlp_backward" in text and "d_w_down: bf16[D, F]" in text
    assert "d_w_up" not in text
    assert "d_out.T @ y" in text


def test_a_gathered_table_costs_the_rows_that_are_read():
    program = next(iter(load_path(EXAMPLES / "qkv_rope.coda").programs.values()))
    symbols = {s.name for a in program.axes for s in a.size.free_symbols}
    few, many = (
        cost(program).at({n: (p if n == "P" else 64) for n in symbols}).fused for p in (10**6, 2 * 10**6)
    )  # fmt: skip
    assert few == many


def test_sums_over_the_rows_cost_what_a_few_blocks_leave():
    """Also where the blocks share out the rows of each head: the gradient of GPT-2's bias."""
    kernels = report_of("gpt2_qkv", True)["backward"]["kernels"]
    (sums,) = (t for k in kernels if k["kind"] == "map" for t in k["writes"] if "f32" in t["type"])
    assert sums["bytes"] == 66 * (3 * 4 * 64) * 4  # 264 blocks for 4 heads


def test_the_floor_of_a_launch_is_that_of_its_product_or_its_bytes():
    gpu = GPUS["h200"]
    for kernel in report_of("gemma2_mlp", False)["kernels"]:
        product, memory = kernel["flops"] / gpu.bf16_flops, kernel["bytes"] / gpu.bytes_per_second
        assert kernel["floor_ms"] == pytest.approx(1e3 * max(product, memory))


def test_an_opaque_function_is_listed_but_has_no_floor(capsys):
    layer = str(EXAMPLES / "llama3_8b.toml")
    assert main(["explain", layer, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for side in (report, report["backward"]):
        (call,) = (k for k in side["kernels"] if k["kind"] == "opaque")
        ours = [k for k in side["kernels"] if k is not call]
        assert call["floor_ms"] is None and call["flops"] == 0 and "opaque function" in call["reason"]
        assert side["totals"]["bytes_fused"] == sum(k["bytes"] for k in ours)
        assert side["totals"]["floor_ms"] == pytest.approx(sum(k["floor_ms"] for k in ours))
        assert side["totals"]["launches"]["opaque"] == 1
    assert main(["explain", layer]) == 0
    assert "our kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [[LLAMA, "--wrt", "x"], ["m:f", "--model", "--prove"], ["m:f", "--model", "--measure"],
     ["m:f", "--model", "--backward"]],
)  # fmt: skip
def test_options_that_do_not_go_together(options):
    with pytest.raises(SystemExit) as error:
        main(["explain", *options])
    assert error.value.code == 2


# --prove


@pytest.mark.parametrize("name", ["llama3_mlp", "phi3_mlp", "gpt2_mlp", "gemma2_mlp", "llama3_qkv"])
def test_every_rewrite_of_a_block_is_proved(name, capsys):
    path = str(EXAMPLES / f"{name.split('_')[0]}_block.coda")
    assert main(["explain", path, "--program", name, "--prove", "--backward", "--json"]) == 0
    proofs = json.loads(capsys.readouterr().out)["proofs"]
    assert all(p["holds"] and p["result"].startswith("equal over the reals") for p in proofs)
    made = {p["rule"] for p in proofs}
    assert "differentiate" in made
    assert all(p["label"] == "bitwise" or p["label"].startswith("algebraic (") for p in proofs)
    assert any(p["label"].startswith("algebraic") for p in proofs)
    if name == "phi3_mlp":
        assert {"partition", "lanes", "delay_norm"} <= made


def test_frozen_weights_are_folded_and_proved(tmp_path, capsys):
    path = tmp_path / "frozen.coda"
    path.write_text("program p(x: bf16[M, D], const g: bf16[D], const w: bf16[N, D]) {\n"
                    "    return y = rms_norm(x, g, 1e-5) @ w.T: bf16\n}\n")  # fmt: skip
    assert main(["explain", str(path), "--prove"]) == 0
    out = capsys.readouterr().out
    assert "fold of p [algebraic (the weight is rounded with it)]: equal over the reals (symbolic" in out


def test_a_proof_that_fails_is_told_and_exits_with_1(monkeypatch, capsys):
    """A pass that drops a factor."""
    from coda.cli import proofs

    def wrong(program: Program) -> Program:
        return rewrite(program, lambda node, args: args[0] if node.op == "silu" else None)

    monkeypatch.setattr(proofs, "rewrites", lambda numerics: (wrong,))
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--prove"]) == 1
    assert "wrong of llama3_mlp [bitwise]: not equal: out[" in capsys.readouterr().out


def test_a_layer_is_proved_around_its_opaque_call(capsys):
    layer = str(EXAMPLES / "llama3_layer.coda")
    assert main(["explain", layer, "--const", "HQ=2,HK=1,f=2", "--prove", "--backward", "--json"]) == 0
    proofs = json.loads(capsys.readouterr().out)["proofs"]
    assert {"delay_norm", "differentiate", "partition"} <= {p["rule"] for p in proofs if p["holds"]}


# --measure


def test_measuring_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("coda.cli.measured.current_device", lambda: None)
    sizes = "M=64,D=64,A=64,F=64"
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--dims", sizes, "--measure"]) == 1
    assert "there is none here" in capsys.readouterr().err


def test_measured_times_stand_beside_the_floors(monkeypatch, capsys):
    """The interpreter in place of the device, and a clock that counts calls."""
    from coda.cli import measured

    def timer(calls):
        for call in calls:
            call()
        return [2.0] * len(calls)

    monkeypatch.setattr(measured, "current_device", lambda: "a device")
    monkeypatch.setattr(measured, "ROUNDS", 5)
    monkeypatch.setattr(measured, "rotation", lambda size: 2)
    monkeypatch.setattr(measured, "CudaTimer", lambda: timer)
    monkeypatch.setattr(measured, "DEVICE", "cpu")
    sizes = "M=16,D=64,A=64,F=64"
    options = ["--program", "llama3_mlp", "--dims", sizes, "--measure"]
    assert main(["explain", LLAMA, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [k["measured_ms"] for k in report["kernels"]] == [2.0, 2.0, 2.0]
    assert report["totals"]["measured_ms"] == 2.0
    assert main(["explain", LLAMA, *options]) == 0
    out = capsys.readouterr().out
    assert "measured here" in out and out.count("2.000 ms") == 4
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--dims", "M=16", "--measure"]) == 1
    assert "the sizes of A, D, F are not known" in capsys.readouterr().err


def test_products_of_one_launch_say_so():
    text = explain(Request(derive(BLOCKS["llama3_mlp"])[0].backward, {})).text()
    assert "llama3_mlp_backward_7_gemm_2, in the launch of llama3_mlp_backward_7_gemm_1" in text


def test_the_launches_of_a_loop_are_those_of_all_chunks(capsys):
    loss = str(EXAMPLES / "linear_cross_entropy.coda")
    arguments = ["explain", loss, "--backward", "--wrt", "x,w", "--dims", "M=256,V=80000,D=128", "--json"]
    assert main(arguments) == 0
    backward = json.loads(capsys.readouterr().out)["backward"]
    assert backward["totals"]["launches"] == {"map": 3 + 3, "gemm": 2 * 3}  # three chunks: 33792, 33792 and 12416
    chunks = {k["name"].rsplit("_", 2)[1]: k for k in backward["kernels"] if "_chunk_" in k["name"]}
    assert [chunks[i]["launches"] for i in "123"] == [3, 3, 3]
    m, v, d = 256, 80000, 128
    assert chunks["2"]["flops"] == chunks["3"]["flops"] == 2 * m * v * d
    assert chunks["2"]["bytes"] == 2 * (m * v + v * d) + 3 * 2 * 4 * m * d  # the sum is read and written by each
    assert backward["totals"]["flops"] == 4 * m * v * d
