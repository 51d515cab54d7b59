"""``blockscale bench gemm|linear|host``: what they measure, not how fast it is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner

import stand_in
from blockscale import ScaledTensor
from blockscale.bench import chooser, gemm, host, host_layers, linear, pictures, timing
from blockscale.bench.contest import (
    BASELINE,
    OURS,
    Absent,
    Contest,
    Row,
    Where,
    contest,
    ready,
    speedups,
    turns,
)
from blockscale.bench.llm_shapes import LLM_SHAPES
from blockscale.cli.bench import bench
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.gpu import Gpu
from blockscale.kernels.sm90.config import TILINGS, Config
from blockscale.ops import FallbackWarning
from blockscale.ops.operand_layout import OperandLayout

TRITON = {"torchao blockwise", "torchao's cast, cuBLASLt blockwise"}  # no CPU can do these
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Clock:
    """A timer of calls that say how long they take; each is slower by ``drift`` than the last."""

    device = "cpu"

    def __init__(self, drift: float = 0.0) -> None:
        self.drift, self.calls = drift, 0

    def microseconds(self, call, repeats=30):
        took = call()
        self.calls += 1
        return (took if isinstance(took, float) else 2.0) + self.drift * self.calls


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def takes(time):
    return lambda: lambda: time


WHERE = Where("a group", "a case", 4, 8, 16)


# --- contests -------------------------------------------------------------------------------------


def test_drift_falls_on_all_alike():
    calls = {"a": lambda: 2.0, "b": lambda: 4.0, "c": lambda: 8.0}
    found = turns(calls, Clock(drift=1.0))
    assert found == {"a": 2 + 3.5, "b": 4 + 3.5, "c": 8 + 3.5}


def test_who_cannot_run_is_told_and_the_others_go_on():
    def missing():
        raise ModuleNotFoundError("No module named 'peer'")

    class Faulty:
        times = 0

        def __call__(self):  # ready, once in turn, then it fails
            self.times += 1
            if self.times == 3:
                raise RuntimeError("illegal address")
            return 3.0

    them = {"missing": missing, OURS: takes(2.0), "faulty": Faulty, "good": takes(4.0)}
    found = list(contest(Contest(WHERE, them, products=3), Clock()))
    where = ("a group", "a case", 4, 8, 16)
    assert found == [
        Absent(*where, "missing", "ModuleNotFoundError: No module named 'peer'"),
        Row(*where, OURS, 2.0, 3 * 2 * 4 * 8 * 16 / 2e-6 / 1e12),
        Absent(*where, "faulty", "RuntimeError: illegal address"),
        Row(*where, "good", 4.0, 3 * 2 * 4 * 8 * 16 / 4e-6 / 1e12),
    ]


def test_plain_torch_in_the_place_of_a_kernel_is_no_measurement():
    from blockscale.ops import backends

    def prepare():
        return lambda: backends.fall_back("gemm", torch.empty(0), "auto", "no kernel for it")

    with stand_in.gpu("sm_90a"):
        for _ in range(2):  # each time
            why = ready(prepare)
            assert isinstance(why, str)
            assert why.startswith(FallbackWarning.__name__)
            assert "no kernel for it" in why


def test_speedups():
    def row(m, who, time, case="a case"):
        return Row("a group", case, m, 8, 16, who, time, 0.0)

    rows = [
        row(1, OURS, 2.0),
        row(1, "peer", 2.0),
        row(1, f"{OURS}, cached", 1.0),
        row(2, OURS, 2.0),
        row(2, "peer", 8.0),
        row(2, "peer", 5.0, "where ours is not"),
    ]
    (found,) = speedups(rows)
    assert (found.who, found.mean, found.least) == ("peer", 2.0, 1.0)
    assert (found.shape, found.shapes) == ("1x8x16", 2)


def test_pictures():
    rows = [
        replace(Row("a group", "a case", m, 8, 16, who, time, 10 / time))
        for m in (1, 2)
        for who, time in ((OURS, 2.0), (BASELINE, 4.0), ("peer", 8.0))
    ]
    figure = pictures.draw([*rows, Row("a group", "without it", 1, 8, 16, OURS, 1.0, 1.0)])
    (axes,) = figure.axes
    assert sorted(bar.get_height() for bar in axes.patches) == [0.5, 0.5, 2.0, 2.0]


def test_nothing_in_a_picture_covers_a_name_or_a_number():
    """Neither the line at 1 nor each other; the names are the longest of the docs."""
    names = OURS, "torchao's cast, cuBLASLt blockwise", "torch.compile's cast, cuBLASLt blockwise"
    group = "Activations quantized in the call, bf16 in and out"
    rows = [
        Row(group, "fp8_block", m, 8192, 16384, who, time, 1234.0)
        for m in (1024, 2048, 4096, 8192)
        for who, time in ((BASELINE, 1.0), *((name, 1.02) for name in names), ("ours cast", 0.9))
    ]
    figure = pictures.draw(rows)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    renderer = canvas.get_renderer()
    line = axes.lines[0].get_window_extent(renderer)
    numbers = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(numbers) == 16
    assert not any(number.overlaps(line) for number in numbers)
    ticks = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
    legend = [text.get_window_extent(renderer) for text in axes.get_legend().get_texts()]
    title = axes._left_title.get_window_extent(renderer)
    texts = [title, *numbers, *ticks, *legend]
    assert not any(a.overlaps(b) for a, b in combinations(texts, 2))


# --- products -------------------------------------------------------------------------------------


def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
    """What cuBLASLt does with such operands, as PyTorch's documentation has it."""
    (m, k), n = a.shape, b.shape[1]
    kinds = F.ScalingType
    assert (a.dtype, b.dtype, a_kind) == (FP8, FP8, kinds.BlockWise1x128)
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert a_scale.shape == (m, k // 128)
    assert a_scale.stride(0) == 1
    wide_a = a.float() * a_scale.repeat_interleave(128, 1)
    if b_kind == kinds.BlockWise128x128:
        assert b_scale.stride(0) == 1
        assert b_scale.stride(1) % 4 == 0
        scale = b_scale[: k // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert b_scale.shape == (n, k // 128)
        assert b_scale.stride(0) == 1
        scale = b_scale.T.repeat_interleave(128, 0)
    return (wide_a @ (b.float() * scale)).to(output_dtype)


def deep_gemm():
    def fp8_gemm_nt(a, b, d, c=None, recipe=None):
        wide = []
        for data, scale in (a, b):
            rows = data.shape[0] // scale.shape[0]
            wide.append(data.float() * scale.repeat_interleave(rows, 0).repeat_interleave(128, 1))
        d.copy_(wide[0] @ wide[1].T + (0 if c is None else c))
        return d

    module = ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt
    return module


@pytest.fixture
def products(monkeypatch):
    """Products by plain torch; the operands that ours was given."""
    given = []

    def product(a, b, *, out=None, accumulate=False, backend):
        assert backend == "kernel"
        given.append((a, b))
        wide = [t.dequantize() if isinstance(t, ScaledTensor) else t for t in (a, b)]
        found = wide[0].float() @ wide[1].float()
        if out is None:
            return found.to(BF16)
        assert accumulate
        return out.add_(found)

    monkeypatch.setattr(gemm, "gemm", product)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm())
    return given


def test_all_of_a_contest_do_the_same(products, monkeypatch):
    placed = OperandLayout("sm90"), OperandLayout()  # as on Hopper
    monkeypatch.setattr(gemm, "operand_layout", lambda format, _: placed[format != "fp8_1x128"])
    shape = 16, 256, 384
    could = set()
    for one in gemm.contests(gemm.GROUPS, shapes=[shape], peers=True, device="cpu"):
        x, w = one.contestants[BASELINE].args
        want = x.double() @ w.double().T
        for who, prepare in one.contestants.items():
            if who in TRITON:
                continue
            got = prepare()().double()
            could.add((one.where.group, one.where.case, who))
            most = 0.16 if "nvfp4" in one.where.case else 0.05
            assert float((got - want).norm() / want.norm()) < most, (one.where, who)
    ours = [key for key in could if key[2] == OURS]
    assert len(ours) == sum(len(group.cases) for group in gemm.GROUPS)
    assert {"DeepGEMM", "cuBLASLt blockwise", BASELINE} <= {who for _, _, who in could}
    for a, _ in products:
        if isinstance(a, ScaledTensor) and a.format_name == "fp8_1x128":
            assert a.layout_name == "sm90"


def test_activations_are_quantized_in_the_call_only_where_that_is_measured(products, monkeypatch):
    seen = []
    original = gemm.quantize

    def quantize(x, *args, **kwargs):
        seen.append(x.shape[0])
        return original(x, *args, **kwargs)

    monkeypatch.setattr(gemm, "quantize", quantize)
    for one in gemm.contests(gemm.GROUPS, shapes=[(16, 128, 256)], device="cpu"):
        call = one.contestants[OURS]()
        seen.clear()
        call()
        in_call = one.where.group.startswith("Activations quantized in the call")
        assert seen == [16] * in_call, one.where


def test_host_calls(products, monkeypatch):
    """What is called does what its name says; the host's time is a GPU's matter."""
    monkeypatch.setattr(host, "gemm", gemm.gemm)
    calls = host.gemm_calls(device="cpu")
    want = calls["torch: x @ w.mT"]().float()
    for what, call in calls.items():
        error = (call()[:128].float() - want).norm() / want.norm()
        assert float(error) < (0.2 if "nvfp4" in what else 0.05), what
    assert "bs.gemm, fp8_block" in calls  # the one that is captured
    monkeypatch.setattr(host, "host_microseconds", lambda call, *_, **__: 5.0)

    def lacking():
        raise ValueError("no kernel")

    (found,) = host.measure_host({"lacking": lacking}, "lacking")
    assert found == host.HostCall("lacking", None, "ValueError: no kernel")


def test_formats_shapes_and_peers_that_are_wanted():
    chosen = list(gemm.contests(gemm.GROUPS, formats=["nvfp4"], shapes=[(1, 32, 64)], device="cpu"))
    assert {(c.where.case, c.where.shape) for c in chosen} == {
        ("nvfp4", "1x32x64"),
        ("nvfp4 weights", "1x32x64"),
    }
    assert all(set(c.contestants) == {OURS, BASELINE} for c in chosen)
    assert all(m * n * k for group in gemm.GROUPS for m, n, k in group.shapes)


# --- layers ---------------------------------------------------------------------------------------


def test_layers_have_all_gradients():
    could = set()
    for one in linear.contests(shapes=[(128, 256, 384)], peers=True, device="cpu"):
        assert one.products == 3
        _, x, w, grad = one.contestants[BASELINE].args
        want = [grad.double() @ w.double(), grad.double().T @ x.detach().double()]
        for who, prepare in one.contestants.items():
            if who in TRITON:
                continue
            could.add((one.where.case, who))
            call = prepare()
            call()
            found = call()  # not added to those of the step before
            for got, exact in zip(found, want, strict=True):
                assert float((got.double() - exact).norm() / exact.norm()) < 0.06, who
    ours = (OURS, BASELINE)
    assert {(recipe, who) for recipe in linear.RECIPES for who in ours} <= could


# --- the chooser ----------------------------------------------------------------------------------


def test_shapes_of_language_models():
    shapes = {(s.m, s.n, s.k) for s in LLM_SHAPES}
    assert len(LLM_SHAPES) == len(shapes) == 40
    assert len({s.model for s in LLM_SHAPES}) > 5
    assert all(s.k % 128 == 0 and s.n % 8 == 0 for s in LLM_SHAPES)


def test_a_configuration_is_found_again_by_what_is_said_of_it():
    for config in (*CANDIDATES, *(each.config for each in TILINGS[128, 128])):
        assert chooser.described(chooser.describe(config)) == config


MICROSECONDS = {4: 8.0, 2: 4.0, 8: 2.0}  # by how far a kernel is unrolled
CANDIDATES = [Config(BFLOAT16, unroll=unroll) for unroll in (*MICROSECONDS, 1)]


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that write the product in ``MICROSECONDS``, or do not start."""

    def load(config):
        def run(a, a_scale, b, b_scale, d, bias, alpha, offsets, supergroup, multiprocessors):
            assert multiprocessors == 132
            assert a.dtype == b.dtype == torch.uint8
            assert a_scale.shape == (a.shape[1] // 128, a.shape[0])
            assert b_scale.shape == (-(-b.shape[0] // 128), b.shape[1] // 128)
            assert d.shape == (a.shape[0], b.shape[0])
            if config.unroll not in MICROSECONDS:
                raise RuntimeError("too many registers")
            return MICROSECONDS[config.unroll]

        return run

    monkeypatch.setattr(chooser, "gpu_of", lambda device: Gpu("sm_90a", 132, 4814, load))
    monkeypatch.setattr(chooser, "compile_all", list)
    monkeypatch.setattr(chooser, "_candidates", lambda shape: CANDIDATES)


@pytest.mark.parametrize("unroll", [4, 2, 1])
def test_choice_beside_the_best(kernels, monkeypatch, unroll):
    monkeypatch.setattr(chooser, "_chosen", lambda shape: Config(BFLOAT16, unroll=unroll))
    shape = replace(LLM_SHAPES[0], m=64, n=256, k=512)
    (found,) = chooser.compare([shape], Clock(), 132)
    if unroll == 1:
        assert found == f"{shape.model}, qkv, 64 tokens: RuntimeError: too many registers"
        return
    took = MICROSECONDS[unroll]
    assert found.of_best == 2 / took
    assert (found.best, found.microseconds) == ("unroll=8", took)
    assert found.candidates == {"": 8.0, "unroll=2": 4.0, "unroll=8": 2.0}
    assert found.failed == {"unroll=1": "RuntimeError: too many registers"}
    assert found.tflops == pytest.approx(2 * 64 * 256 * 512 / took / 1e6)
    assert chooser.summary([found, replace(found, of_best=1.0)]) == (
        pytest.approx((2 / took) ** 0.5),
        2 / took,
    )


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch, products):
    """A machine with a GPU whose work is done on the CPU."""
    monkeypatch.setattr(timing, "Timer", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    fields = {"multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Found", (), fields))
    monkeypatch.setattr(host, "gemm_calls", dict)
    calls = [
        host.HostCall("a call", 7.25),
        host.HostCall("another", None, "ValueError: no [kernel]"),
    ]
    monkeypatch.setattr(host, "measure_host", lambda *_: calls)
    for module in (gemm, linear):
        original = module.contests
        monkeypatch.setattr(
            module, "contests", lambda *a, _of=original, **k: _of(*a, **k, device="cpu")
        )


def invoke(*arguments):
    found = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def test_gemm_command(gpu, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    shown = invoke(
        *("gemm", "--shapes", "16x128x256,32x128x256", "--format", "fp8_block,nvfp4"),
        *("--peers", "all", "--json", str(out), "--plot", str(plot)),
    )
    content = json.loads(out.read_text())
    assert content["gpu"] == "a GPU"
    cases = [
        (group.name, case.name, m)
        for group in gemm.GROUPS
        for case in group.cases
        if case.format != "mxfp8"
        for m in (16, 32)
    ]
    ours = [(r["group"], r["case"], r["m"]) for r in content["rows"] if r["who"] == OURS]
    assert ours == cases
    assert content["host"][0]["microseconds"] == 7.25
    for group in gemm.GROUPS:
        assert group.name in shown
    assert f"fp8_block: 1.000 times as fast as {BASELINE} (geometric mean of 2)" in shown
    assert "another cannot run: ValueError: no [kernel]" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_chooser_command(gpu, kernels, monkeypatch, tmp_path):
    shape = replace(LLM_SHAPES[0], m=64, n=256, k=512)
    monkeypatch.setattr("blockscale.bench.llm_shapes.LLM_SHAPES", (shape, shape))
    chosen = iter([CANDIDATES[1], CANDIDATES[3]])
    monkeypatch.setattr(chooser, "_chosen", lambda shape: next(chosen))
    out = tmp_path / "out.json"
    shown = invoke("gemm", "--chooser", "--json", str(out))
    assert "of the best: 0.500 (geometric mean of 1), least 0.500" in shown
    assert "RuntimeError: too many registers" in shown
    content = json.loads(out.read_text())
    assert [choice["of_best"] for choice in content["choices"]] == [0.5]
    assert len(content["failed"]) == 1


def test_linear_command(gpu, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    shown = invoke(
        *("linear", "--shapes", "128x128x256", "--recipe", "mxfp8"),
        *("--json", str(out), "--plot", str(plot)),
    )
    assert f"mxfp8: 1.000 times as fast as {BASELINE}" in shown
    rows = json.loads(out.read_text())["rows"]
    assert [row["who"] for row in rows] == [OURS, BASELINE]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_host_command(gpu, monkeypatch, tmp_path):
    layers = {f"{name}{how}" for name in host_layers.LAYERS for how in ("", ", compiled")}
    small = partial(host_layers.layer_calls, 4, 32, device="cpu")
    monkeypatch.setattr(host_layers, "layer_calls", small)
    monkeypatch.setattr(host_layers, "host_microseconds", lambda call, *_, **__: (call(), 2.0)[1])
    monkeypatch.setattr(torch, "compile", lambda layer: layer)
    out = tmp_path / "out.json"
    shown = invoke("host", "--json", str(out))
    measured = json.loads(out.read_text())["host"]
    passes = ("forward", "forward + backward")
    assert {call["what"] for call in measured} == {f"{x}, {y}" for x in layers for y in passes}
    assert {call["microseconds"] for call in measured if "backward" in call["what"]} == {2.0}
    assert all(call["what"] in shown for call in measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm", "--peers", "some"], "peers: got 'some'"),
        (["gemm", "--shapes", "128x128"], "shapes: got '128x128'; expected M, N and K"),
        (["gemm", "--format", "fp8"], "format: got 'fp8'"),
        (["grouped", "--shapes", "8x16x16"], "shapes: got '8x16x16'; expected groups, M, N and K"),
        (["grouped", "--format", "fp8"], "format: got 'fp8'"),
        (["linear", "--recipe", "fp8"], "recipe: got 'fp8'"),
        (["linear", "--shapes", "0x1x1"], "shapes: got '0x1x1'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(bench, arguments, catch_exceptions=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["gemm", "grouped", "linear", "host"])
def test_needs_a_gpu(command):
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        CliRunner().invoke(bench, [command], catch_exceptions=False)
