"""``backend="kernel"`` on a GPU: the bytes of a CPU for every format, and whatever torch does."""

from itertools import product

import pytest
import torch
from gpu_inputs import DEVICE, nasty, only_on, same, same_parts

import blockscale as bs
from blockscale.kernels.common.gpu import GPUS
from blockscale.layouts import layouts

only_on(*GPUS)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = [name for name, fmt in bs.formats.items() if fmt.element.bits != 6]
PLACES = [
    (name, layout)
    for name in FORMATS
    for layout, where in layouts.items()
    if bs.formats[name].scale.nbytes in where.itemsize
]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(x: torch.Tensor, name: str, **given: object) -> None:
    """Rows, columns and both, each by the kernel, against the CPU."""
    there = x.to(DEVICE) if x.device.type == "cpu" else x
    here = x.cpu()
    wanted = [bs.quantize(here, name, axis, pad=True, **given) for axis in (-1, -2)]
    for axis, want in zip((-1, -2), wanted, strict=True):
        assert same_parts(bs.quantize(there, name, axis, pad=True, backend="kernel", **given), want)
    both = bs.quantize_both(there, name, pad=True, backend="kernel", **given)
    assert all(map(same_parts, both, wanted))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_formats(name, layout, dtype):
    for nonfinite in ("propagate", "te"):
        check(nasty(dtype), name, layout=layout, nonfinite=nonfinite)


@pytest.mark.parametrize(
    ("name", "layout"), [place for place in PLACES if bs.formats[place[0]].element.bits == 8]
)
def test_k_major(name, layout):
    given = {"layout": layout, "k_major": True}
    for dtype in (BF16, FP16, FP32):
        check(nasty(dtype), name, nonfinite="te", **given)
    for shape in ((1, 32), (129, 37), (1000, 2880)):
        check(nasty(BF16, *shape), name, **given)


@pytest.mark.parametrize("name", FORMATS)
def test_scale_roundings(name):
    for rounding in bs.formats[name].scale.roundings:
        check(nasty(BF16), name, scale_rounding=rounding)


@pytest.mark.parametrize(
    "shape", [(1, 32), (127, 96), (129, 160), (1000, 2880), (33, 37), (300, 8)]
)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128", "fp8_128x128"])
def test_shapes(name, shape):
    check(nasty(BF16, *shape), name)
    check(nasty(BF16, *shape), name, layout="sm90" if name.startswith("fp8") else "tcgen05")


@pytest.mark.parametrize("name", FORMATS)
def test_strided_and_misaligned(name):
    whole = nasty(BF16, 256, 1024).to(DEVICE)
    assert whole.data_ptr() % 16 == 0
    check(whole[::2, 8:392], name)  # strides that TMA takes
    check(whole[:, 1:385], name)  # an address that it does not
    flat = whole.flatten()
    check(flat[3 : 3 + 129 * 385].view(129, 385), name)  # nor such an address, nor such rows
    check(flat.as_strided((100, 256), (515, 1)), name)
    row = whole[:1, 64:448]
    check(row, name)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_and_vectors(name):
    x = nasty(BF16, 120, 256)
    for view in (x.view(4, 30, 256), x.view(2, 3, 20, 256), x[0]):
        if bs.formats[name].block[0] > 1 and view.dim() > 2:
            continue
        want = bs.quantize(view, name)
        assert same_parts(bs.quantize(view.to(DEVICE), name, backend="kernel"), want)


def test_global_scale():
    for dtype in (BF16, FP16, FP32):
        for shape in ((1, 16), (129, 160), (2048, 4096)):
            x = nasty(dtype, *shape)
            want = torch.ops.blockscale.global_scale(x, "nvfp4")
            assert same(torch.ops.blockscale.global_scale(x.to(DEVICE), "nvfp4", "kernel"), want)
    zeros = torch.zeros(64, 64, device=DEVICE)
    assert torch.ops.blockscale.global_scale(zeros, "nvfp4", "kernel").item() == 1.0


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "fp8_1x128"])
@pytest.mark.parametrize(
    "ends", [(64, 128, 256), (10, 10, 200, 250), (0, 0, 33), (256,), (1, 2, 3)], ids=str
)
def test_groups(name, ends):
    x, offsets = nasty(BF16), i32(*ends)
    there, cut = x.to(DEVICE), offsets.to(DEVICE)
    layout = "sm90" if name.startswith("fp8") else "tcgen05"
    row = bs.quantize(x, name, layout=layout, offsets=offsets)
    column = bs.quantize(x, name, -2, offsets=offsets)
    got = bs.quantize(there, name, layout=layout, offsets=cut, backend="kernel")
    assert same_parts(got, row)
    assert same_parts(bs.quantize(there, name, -2, offsets=cut, backend="kernel"), column)
    pair = (layout, "compact")
    both = bs.quantize_both(there, name, layout=pair, offsets=cut, backend="kernel")
    assert all(map(same_parts, both, (row, column)))


# --- what training asks for -----------------------------------------------------------------------

SEED = bs.Seed(-7, step=2**40 + 3)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_stochastic(name, layout, dtype):
    for nonfinite in ("propagate", "te"):
        check(nasty(dtype), name, layout=layout, nonfinite=nonfinite, seed=SEED)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_parts(name):
    """Of tensors whose numbers need 64 bits, in rows that begin with a call of Philox or do not."""
    for left in (2**32 + 4, 2**32 + 3):
        seed = bs.Seed(5, 1, origin=(2**23 + 5, left), shape=(2**24, 2**33 + 8))
        check(nasty(BF16, 129, 160), name, seed=seed)
    check(nasty(BF16, 33, 37), name, seed=SEED)
    if bs.formats[name].block[0] == 1:
        seed = bs.Seed(5, origin=(1, 0, 16), shape=(9, 256, 512))
        check(nasty(BF16, 3 * 128, 256).view(3, 128, 256), name, seed=seed)


def test_cuda_graph_of_steps():
    """A step in a tensor is read by each replay."""
    x, step = nasty(BF16), torch.tensor(0, device=DEVICE)
    there, seed = x.to(DEVICE), bs.Seed(3, step)
    given = {"seed": seed, "backend": "kernel", "global_scale": 0.01}
    bs.quantize_both(there, "nvfp4", **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = bs.quantize_both(there, "nvfp4", **given)
        step += 1
    for value in range(3):
        graph.replay()
        wanted = bs.quantize_both(x, "nvfp4", seed=bs.Seed(3, value), global_scale=0.01)
        assert all(map(same_parts, results, wanted))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("size", [2, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_hadamard(name, axis, size, dtype):
    fmt, h = bs.formats[name], bs.Hadamard.random(size, size)
    if fmt.block[0] > 1 or (axis == -2 and fmt.element.bits == 8):
        return
    for shape in ((256, 384), (1024, 2944), (128, 128)):
        x = nasty(dtype, *shape)
        for given in ({}, {"seed": SEED, "nonfinite": "te"}):
            want = bs.quantize(x, name, axis, hadamard=h, **given)
            got = bs.quantize(x.to(DEVICE), name, axis, hadamard=h, backend="kernel", **given)
            assert same_parts(got, want)
            if fmt.has_global_scale:
                assert same(got.global_scale, want.global_scale)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [-1, -2])
def test_drawn_signs(axis, size, dtype):
    """Of a step in a tensor: those that a CPU draws once, for the global scale, too."""
    x, step = nasty(dtype, 256, 384), torch.tensor(0, device=DEVICE)
    drawn, there = bs.Hadamard(size, bs.Seed(-7, step)), x.to(DEVICE)
    for value in (3, 2**40):
        step.fill_(value)
        fixed = bs.Hadamard(size, bs.Seed(-7, value))
        for given in ({}, {"seed": SEED}, {"seed": SEED, "scaling": "ms_eden"}):
            if "scaling" in given and size < 16:
                continue
            want = bs.quantize(x, "nvfp4", axis, hadamard=fixed, **given)
            got = bs.quantize(there, "nvfp4", axis, hadamard=drawn, backend="kernel", **given)
            assert same_parts(got, want)
            assert same(got.global_scale, want.global_scale)


def test_cuda_graph_of_signs():
    """Each replay draws those of the step by then."""
    x, step = nasty(BF16, 256, 384), torch.tensor(0, device=DEVICE)
    there, drawn = x.to(DEVICE), bs.Hadamard(128, bs.Seed(3, step))
    given = {"seed": SEED, "scaling": "ms_eden"}
    for axis in (-1, -2):
        step.zero_()
        bs.quantize(there, "nvfp4", axis, hadamard=drawn, backend="kernel", **given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = bs.quantize(there, "nvfp4", axis, hadamard=drawn, backend="kernel", **given)
            step += 1
        for value in range(3):
            graph.replay()
            fixed = bs.Hadamard(128, bs.Seed(3, value))
            want = bs.quantize(x, "nvfp4", axis, hadamard=fixed, **given)
            assert same_parts(found, want)
            assert same(found.global_scale, want.global_scale)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_square(name, layout, dtype):
    if bs.formats[name].block[0] > 1:
        return
    for given in ({}, {"seed": SEED, "nonfinite": "te"}, {"k_major": True}):
        check(nasty(dtype), name, layout=layout, square=True, **given)
    for shape in ((1, 32), (129, 160), (1000, 2880), (33, 37)):
        check(nasty(dtype, *shape), name, layout=layout, square=True)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("layout", ["compact", "tcgen05"])
@pytest.mark.parametrize("size", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("scaling", ["four_over_six", "ms_eden"])
def test_scaling(scaling, size, layout, dtype):
    given = {"scaling": scaling, "layout": layout}
    if size:
        given["hadamard"] = bs.Hadamard.random(size, size)
    if scaling == "ms_eden":
        if not size:
            return
        given["seed"] = SEED
    elif not size:
        check(nasty(dtype), "nvfp4", square=True, **given)
        check(nasty(dtype, 129, 160), "nvfp4", square=True, **given)
    for shape in ((256, 384), (640, 1408), (128, 128)):
        for x in (nasty(dtype, *shape), torch.randn(shape).to(dtype)):
            for axis, nonfinite in product((-1, -2), ("propagate", "te")):
                of = "nvfp4", axis
                want = bs.quantize(x, *of, nonfinite=nonfinite, **given)
                got = bs.quantize(x.to(DEVICE), *of, nonfinite=nonfinite, backend="kernel", **given)
                assert same_parts(got, want)
                assert same(got.global_scale, want.global_scale)


# --- what torch does ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_compile(name, backend):
    def step(x):
        x = x.relu() + 1
        return bs.quantize(x, name, backend="kernel"), *bs.quantize_both(x, name, backend="kernel")

    torch.compiler.reset()
    run = torch.compile(step, fullgraph=True, backend=backend)
    for seed in (0, 1):
        x = nasty(BF16, seed=seed).to(DEVICE)
        assert all(map(same_parts, run(x), step(x)))


@pytest.mark.parametrize("name", FORMATS)
def test_opcheck(name):
    ops, fmt = torch.ops.blockscale, bs.formats[name]
    x = torch.randn(256, 128, device=DEVICE, dtype=BF16)  # opcheck takes no NaN for equal
    scalar = torch.tensor(0.01, device=DEVICE) if fmt.has_global_scale else None
    rounding, layout = fmt.scale.roundings[0], "tcgen05" if fmt.scale.nbytes == 1 else "sm90"
    for where in ("compact", layout):
        more = scalar, None, None, "kernel"
        for axis in (-1, -2):
            args = (x, name, axis, rounding, "propagate", where, *more)
            torch.library.opcheck(ops.quantize.default, args)
        args = (x, name, rounding, "propagate", where, where, *more)
        torch.library.opcheck(ops.quantize_both.default, args)
    if fmt.has_global_scale:
        torch.library.opcheck(ops.global_scale.default, (x, name, "kernel"))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_cuda_graph(name):
    """The graph quantizes whatever its input holds when it is replayed."""
    x = nasty(BF16).to(DEVICE)
    bs.quantize_both(x, name, backend="kernel")  # compiled outside of the graph
    bs.quantize(x, name, backend="kernel")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = (*bs.quantize_both(x, name, backend="kernel"),
                   bs.quantize(x, name, backend="kernel"))  # fmt: skip
    for seed in (1, 2):
        other = nasty(BF16, seed=seed)
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        wanted = (*bs.quantize_both(other, name), bs.quantize(other, name))
        assert all(map(same_parts, results, wanted))
        scalars = [(q.global_scale, want.global_scale)
                   for q, want in zip(results, wanted, strict=True)]  # fmt: skip
        assert all(got is want is None or same(got, want) for got, want in scalars)


def test_cuda_graph_of_groups():
    """Offsets are read on the device: they may change between replays."""
    x, ends = nasty(BF16), i32(64, 128, 256)
    there, cut = x.to(DEVICE), ends.to(DEVICE)
    given = {"layout": ("tcgen05", "compact"), "backend": "kernel", "offsets": cut}
    bs.quantize_both(there, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row, column = bs.quantize_both(there, **given)
    for ends in (i32(10, 10, 200), i32(0, 255, 256)):
        cut.copy_(ends)
        graph.replay()
        torch.cuda.synchronize()
        wanted = bs.quantize_both(x, layout=("tcgen05", "compact"), offsets=ends)
        assert same_parts(row, wanted[0])
        assert same_parts(column, wanted[1])


def test_no_call_waits_for_the_device():
    x, cut = nasty(BF16).to(DEVICE), i32(10, 10, 200).to(DEVICE)

    def calls():
        for name in FORMATS:
            bs.quantize_both(x, name, backend="kernel")
        bs.quantize(x, "nvfp4", global_scale=0.01, backend="kernel")
        bs.quantize(x, "mxfp8", seed=bs.Seed(3, step=5), backend="kernel")
        bs.quantize_both(x, layout=("tcgen05", "compact"), offsets=cut, backend="kernel")

    calls()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_streams():
    """The kernel runs on the current stream: behind what made its input, beside the others."""
    inputs = [nasty(BF16, 512, 1024, seed) for seed in range(4)]
    wanted = [bs.quantize_both(x, "mxfp8") for x in inputs]
    held = [x.to(DEVICE) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(100):
        for i, (x, stream) in enumerate(zip(held, streams, strict=True)):
            with torch.cuda.stream(stream):
                late = torch.zeros_like(x)
                torch.cuda._sleep(20_000)
                late.copy_(x)
                results.append((i, bs.quantize_both(late, "mxfp8", backend="kernel")))
    torch.cuda.synchronize()
    for i, both in results:
        assert all(map(same_parts, both, wanted[i]))


@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_wrong_device(function):
    x = nasty(BF16).to(DEVICE)
    with pytest.raises(ValueError, match=r"offsets: is on cpu, the data on cuda.*move it"):
        function(x, offsets=i32(256))
    with pytest.raises(
        ValueError, match=r"global_scale: is on cpu, what it scales on cuda.*move it"
    ):
        function(x, "nvfp4", global_scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="holds fp32 scales"):
        function(x, layout="sm90", backend="kernel")
    with pytest.raises(TypeError, match=r"x: got torch\.float64"):
        function(x.double(), backend="kernel")


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_second_device():
    """Another device than the current one."""
    x = nasty(BF16)
    for name in ("mxfp8", "nvfp4"):
        both = bs.quantize_both(x.to("cuda:1"), name, backend="kernel")
        assert all(q.device.index == 1 for q in both)
        torch.cuda.synchronize(1)
        assert all(map(same_parts, both, bs.quantize_both(x, name)))


def test_fallback(monkeypatch):
    """What no kernel can is said once, and computed."""
    monkeypatch.setattr("blockscale.ops.backends._warned", set())
    x = nasty(BF16)
    with pytest.warns(bs.FallbackWarning, match="6-bit") as said:
        got = bs.quantize(x.to(DEVICE), "mxfp6_e2m3"), bs.quantize(x.to(DEVICE), "mxfp6_e2m3")
    assert len(said) == 1
    assert all(same_parts(q, bs.quantize(x, "mxfp6_e2m3")) for q in got)
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="backend: no kernel can run quantize as asked for: seed"):
        bs.quantize(x.to(DEVICE), seed=1, gather=rows, backend="kernel")


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """Blocks of 128 rows are quantized alone: parts of the result are those of parts of x."""
    columns, rows = 8192, (1 << 18) + 256
    assert rows * columns > 1 << 31
    x = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
    for first in range(0, rows, 1 << 14):
        x[first : first + (1 << 14)].normal_()
    for layout in ("compact", "tcgen05"):
        row, column = bs.quantize_both(x, layout=(layout, "compact"), backend="kernel")
        scale = row.to_layout("compact").qscale
        for first in (0, 1 << 17, (1 << 18) - 128, 1 << 18, rows - 128):
            part = slice(first, first + 128)
            here = bs.quantize_both(x[part].cpu())
            assert same(row.qdata[part], here[0].qdata)
            assert same(scale[part], here[0].qscale)
            assert same(column.qdata[part], here[1].qdata)
            assert same(column.qscale[first // 32 : first // 32 + 4], here[1].qscale)
        del row, column, scale
