"""``blockscale bench``: what it measures, and how it tells what cannot run."""

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import blockscale
from blockscale import reference
from blockscale.bench import cases, cpu, host, peers, quantize, timing
from blockscale.bench.cases import GROUPS, Case, Group, expert_ends, prepare
from blockscale.bench.peers import Peer
from blockscale.cli.bench import bench
from blockscale.formats import get_format
from blockscale.kernels.quantizers import calls as quantizers

CASES = list(dict.fromkeys(case for group in GROUPS for case in group.cases))


class Kernels:
    """In the place of blockscale.kernels.quantizers: counts the bytes that it is given."""

    def __init__(self) -> None:
        self.read, self.results = 0, 0

    Request, Stored = quantizers.Request, quantizers.Stored

    def quantize(self, x, request, *, global_scale, offsets, others):
        format, axes, producer = request.fmt, request.axes, request.producer
        assert len(request.layouts) == len(axes)
        assert (global_scale is not None) == format.has_global_scale
        assert offsets is None or offsets[-1] == x.shape[0]
        self.read += sum(t.nbytes for t in (x, *others))
        h = x.shape[1] // 2
        if producer == "swiglu_backward":
            assert [t.shape for t in others] == [(x.shape[0], h)]
        self._write(x[:, :h].contiguous() if producer == "swiglu" else x, format, axes)

    def dequantize(self, data, scale, stored, *, global_scale, dtype):
        format, shape, axis = get_format(stored.format), stored.shape, stored.axis
        assert (global_scale is not None) == format.has_global_scale
        assert data.shape == format.data_shape(shape, axis)
        self.read += data.nbytes + scale.nbytes
        self.results += math.prod(shape) * dtype.itemsize

    def global_scale(self, x, format, *, producer, others):
        self.read += sum(t.nbytes for t in (x, *others))
        return torch.ones(())

    def rmsnorm(self, x, weight, request, *, eps):
        self.read += x.nbytes + weight.nbytes
        self.results += 4 * x.shape[0]
        self._write(x, request.fmt, (-1,))

    def _write(self, x, format, axes):
        given = {"global_scale": torch.ones(())} if format.has_global_scale else {}
        rounding = format.default_scale_rounding
        for axis in axes:
            results = reference.quantize(x, format, axis=axis, scale_rounding=rounding, **given)
            self.results += sum(t.nbytes for t in results)


class FakeTimer:
    """Every call takes 2 us, every copy 3."""

    device = "cpu"

    def microseconds(self, call):
        call()
        return 2.0

    def copy(self, nbytes, *, kernel):
        return 3.0


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(cases, "quantizers", kernels)
    return kernels


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_are_those_of_the_inputs_and_results(case, kernels):
    rows, columns = 384, 512
    prepare(case, rows, columns, "cpu")()
    assert case.nbytes(rows, columns) == kernels.read + kernels.results


def test_names_and_groups_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({group.name for group in GROUPS}) == len(GROUPS)


@pytest.mark.parametrize("experts", [8, 32])
def test_experts_are_skewed(experts):
    ends = expert_ends(32768, experts)
    assert ends[-1] == 32768
    sizes = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert all(end % 128 for end in ends[:-1])
    for i, size in enumerate(sorted(sizes, reverse=True)):
        assert abs(size - max(sizes) / (i + 1)) <= 2
    assert sizes != sorted(sizes)
    assert sizes != sorted(sizes, reverse=True)


def test_peers_stand_beside_the_case_they_do(kernels):
    rows, columns = Case("mxfp8", (-1,), "compact"), Case("mxfp8", (-2,), "compact")
    seen = []

    def lacking(x):
        raise ModuleNotFoundError("No module named 'peer'")

    peers = (Peer("good", rows, lambda x: lambda: seen.append(x.shape)), Peer("bad", rows, lacking))
    found = list(quantize.measure(Group("some", (rows, columns)), [(64, 96)], peers, FakeTimer()))
    assert [(row.case, row.who) for row in found] == [
        (rows.name, "blockscale"),
        (rows.name, "good"),
        (rows.name, "bad"),
        (columns.name, "blockscale"),
    ]
    assert set(seen) == {(64, 96)}
    assert isinstance(found[2], quantize.Absent)
    assert found[2].why == "ModuleNotFoundError: No module named 'peer'"
    ours = found[0]
    assert (ours.microseconds, ours.copy_microseconds, ours.of_copy) == (2.0, 3.0, 1.5)
    assert ours.gigabytes_per_second == pytest.approx(64 * 96 * (3 + 1 / 32) / 2e3)


def test_scales_packed_by_a_kernel_of_their_own(monkeypatch):
    """The cast that has no tiles of scales, and then torchao's pack: our bytes of the case."""
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    monkeypatch.setattr(kernels, "triton_mx_block_rearrange", utils.to_blocked)
    x = torch.randn(200, 288, dtype=torch.bfloat16)

    def ours(case, rows, columns, device):
        assert (case.layout, rows, columns, device) == ("compact", 200, 288, "cpu")
        given = {"global_scale": torch.ones(())} if case.format == "nvfp4" else {}
        q = blockscale.quantize(x, case.format, layout="compact", **given)
        return lambda: [(q.qdata.view(torch.uint8), q.scale.view(torch.uint8))]

    monkeypatch.setattr(peers, "prepare_case", ours)
    found = [each for each in peers.PEERS if each.name == "ours compact, and torchao's pack"]
    assert len(found) == 2
    for peer in found:
        given = {"global_scale": torch.ones(())} if peer.case.format == "nvfp4" else {}
        q = blockscale.quantize(x, peer.case.format, layout=peer.case.layout, **given)
        ((data, scale),) = peer.prepare(x)()
        assert torch.equal(data, q.qdata.view(torch.uint8))
        assert torch.equal(scale.flatten(), q.scale.view(torch.uint8).flatten())


def test_a_case_without_a_kernel_says_why():
    group = Group("some", (Case("mxfp8", (-1,), "compact"),))
    (absent,) = quantize.measure(group, [(32, 64)], (), FakeTimer())
    assert isinstance(absent, quantize.Absent)
    assert absent.why == "Unsupported: x is on cpu: the kernels run on CUDA devices"


def test_every_shape_of_a_group_is_measured(kernels):
    group = Group("some", (Case("mxfp8", (-1,), "compact"),), ((32, 64), (64, 64)))
    found = list(quantize.measure(group, timer=FakeTimer()))
    assert [(row.rows, row.columns) for row in found] == [(32, 64), (64, 64)]
    figure = quantize.draw(found)
    assert sum(len(bars) for bars in figure.axes[0].containers) == 2


def test_tables_json_and_plot(kernels, monkeypatch, tmp_path):
    def lacking(x):
        raise RuntimeError("only on [other] GPUs")

    case = Case("mxfp8", (-2,), "compact")
    monkeypatch.setattr(peers, "PEERS", (Peer("some library", case, lacking),))
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr(host, "quantize_calls", dict)
    monkeypatch.setattr(host, "measure_host", lambda *_: [host.HostCall("a call", 7.25)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["quantize", "--shapes", "128x256,256x512", "--peers", "all"]
    found = CliRunner().invoke(
        bench, [*arguments, "--json", str(out), "--plot", str(plot)], catch_exceptions=False
    )
    assert found.exit_code == 0
    why = "RuntimeError: only on [other] GPUs"
    assert f"{case.name} (some library), 128x256, cannot run: {why}" in found.output
    assert all(group.name in found.output for group in GROUPS)
    assert "7.25" in found.output
    content = json.loads(out.read_text())
    wanted = [
        (group.name, rows, columns, case.name, "blockscale")
        for group in GROUPS
        for rows, columns in ((128, 256), (256, 512))
        for case in group.cases
    ]
    keys = ("group", "rows", "columns", "case", "who")
    assert [tuple(row[key] for key in keys) for row in content["rows"]] == wanted
    assert [(row["rows"], row["who"], row["why"]) for row in content["absent"]] == [
        (128, "some library", why),
        (256, "some library", why),
    ]
    assert content["host"] == [{"what": "a call", "microseconds": 7.25, "why": ""}]
    assert content["gpu"] == "a GPU"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "--peers", "some"], "peers: got 'some'"),
        (["quantize", "--shapes", "128"], "shapes: got '128'"),
        (["quantize", "--shapes", "0x128"], "shapes: got '0x128'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(bench, arguments, catch_exceptions=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "--device", "cuda"], "device: got 'cuda', .*no GPU here; choose 'cpu'"),
        (["gemm"], "needs an NVIDIA GPU"),
    ],
)
def test_needs_a_gpu(arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(bench, arguments, catch_exceptions=False)


WRONG_FILES = [
    ("json", "no/out.json", "json: the directory .*no does not exist; make it first"),
    ("json", ".", r"json: .* is a directory; name a file in it"),
    ("json", "locked.json", r"json: .*locked\.json must not be written; choose another place"),
    ("plot", "no/out.png", "plot: the directory .*no does not exist; make it first"),
    ("plot", "out.foo", r"plot: .*out\.foo does not end in \.png; name it so"),
]


@pytest.mark.parametrize(
    ("command", "argument", "path", "message"),
    [
        (command, *wrong)
        for command in ("quantize", "gemm", "linear", "host", "model")
        for wrong in WRONG_FILES
        if wrong[0] == "json" or command not in ("host", "model")  # which draw nothing
    ],
)
def test_nothing_is_measured_for_files_that_cannot_be(
    command, argument, path, message, monkeypatch, tmp_path
):
    locked = tmp_path / "locked.json"
    monkeypatch.setattr(os, "access", lambda at, mode: (Path(at), mode) != (locked, os.W_OK))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "measure", lambda *_: pytest.fail("it is measured"))
    locked.touch()
    given = {"json": tmp_path / "good.json"} | {argument: tmp_path / path}
    arguments = [each for name, file in given.items() for each in (f"--{name}", str(file))]
    with pytest.raises((ValueError, OSError), match=message):
        CliRunner().invoke(bench, [command, *arguments], catch_exceptions=False)
    assert [each.name for each in tmp_path.iterdir()] == [locked.name]


# --- on a CPU -------------------------------------------------------------------------------------


def test_quantizers_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what auto looks at

    def lacking(x):
        raise ModuleNotFoundError("No module named 'torchao'")

    monkeypatch.setattr(cpu, "peers", lacking)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["quantize", "--shapes", "128x256,64x100", "--peers", "all"]
    found = CliRunner().invoke(
        bench, [*arguments, "--json", str(out), "--plot", str(plot)], catch_exceptions=False
    )
    assert found.exit_code == 0
    assert "(torchao), 128x256, cannot run: No module named 'torchao'" in found.output
    content = json.loads(out.read_text())
    assert content["gpu"] is None
    assert content["cpu"]["threads"] == torch.get_num_threads()
    assert [row["why"] for row in content["absent"]] == ["No module named 'torchao'"] * 2
    shapes = {(row["rows"], row["columns"]) for row in content["rows"]}
    assert shapes == {(128, 256), (64, 100)}
    by_case = {r["case"]: r for r in content["rows"] if r["rows"] == 128}
    assert by_case[cpu.COPY]["of_copy"] == pytest.approx(1)
    row = by_case["mxfp8, rows"]
    size = 128 * 256 * (3 + 1 / 32)
    assert row["gigabytes_per_second"] == pytest.approx(size / row["microseconds"] / 1e3)
    assert row["of_copy"] == pytest.approx(row["copy_microseconds"] / row["microseconds"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rounds_time_all_in_turn():
    seen = []
    todo = [
        cpu.Operation(case, "torch", 4, lambda case=case: seen.append(case))
        for case in ("a", "b", "c, eager")
    ]
    times = cpu.rounds(todo, 6)
    assert [len(t) for t in times] == [6, 6, 2]
    assert seen[:5] == ["a", "b", "a", "b", "c, eager"]


def test_peers_on_a_cpu_are_torchao():
    pytest.importorskip("torchao")
    x = torch.randn(64, 128).bfloat16()
    theirs = {each.name: each for each in cpu.peers(x)}
    assert set(theirs) == {
        f"torchao {format}, rows, {way}"
        for format in ("mxfp8", "nvfp4")
        for way in ("torch.compile", "eager")
    }
    theirs["torchao mxfp8, rows, eager"].call()


def test_an_unknown_device():
    with pytest.raises(ValueError, match=r"device: got 'tpu'; choose one of 'auto', 'cpu', 'cuda'"):
        CliRunner().invoke(bench, ["quantize", "--device", "tpu"], catch_exceptions=False)
