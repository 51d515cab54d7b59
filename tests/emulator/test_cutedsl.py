"""Functions compiled by CuTe DSL, called on an emulated device: no GPU, no driver."""

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
torch = pytest.importorskip("torch")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.arch import inline_ptx  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import (  # noqa: E402
    from_dlpack,
    make_fake_compact_tensor,
    make_fake_stream,
    make_ptr,
)

from blockscale import emulator as em  # noqa: E402
from blockscale.emulator.host.cutedsl import _pieces, cutedsl  # noqa: E402

STREAM = cuda.CUstream(0)
TARGETS = ("sm_90a", "sm_100a")
ROWS, COLUMNS = 8, 16

# Kernels ---------------------------------------------------------------------------------------


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, factor: cutlass.Float32):
    i = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
    if i < cute.size(c):
        c[i] = a[i] + factor * b[i]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(cute.size(c), 64)
    add_kernel(a, b, c, 1.0).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)


@cute.jit
def add_twice(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    """c = a + b, then c = c + 2 a: only this order gives 3 a + b."""
    blocks = cute.ceil_div(cute.size(c), 64)
    add_kernel(a, b, c, 1.0).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)
    add_kernel(c, a, c, 2.0).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)


@cute.jit
def add_pointers(a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, stream: cuda.CUstream):
    layout = cute.make_layout(100)
    x, y, z = cute.make_tensor(a, layout), cute.make_tensor(b, layout), cute.make_tensor(c, layout)
    add_kernel(x, y, z, 1.0).launch(grid=(2, 1, 1), block=(64, 1, 1), stream=stream)


@cute.jit
def add_group(group: tuple[cute.Tensor, cute.Tensor], c: cute.Tensor, stream: cuda.CUstream):
    add_kernel(group[0], group[1], c, 1.0).launch(grid=(2, 1, 1), block=(64, 1, 1), stream=stream)


@cute.kernel
def pass_on_kernel(mine: cute.Tensor, theirs: cute.Tensor, number: cutlass.Int32):
    """Word 0 is a flag: each rank sends its number to the next one, and keeps what it gets."""
    address = theirs.iterator.toint()
    theirs[1] = number
    inline_ptx("st.release.sys.global.u32 [{$r0}], 1;", read_only_args=[address])
    code = (
        "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.sys.global.u32 n, [{$r0}];"
        " setp.eq.u32 p, n, 0; @p bra AGAIN; }"
    )
    inline_ptx(code, read_only_args=[mine.iterator.toint()])
    mine[2] = mine[1]


@cute.jit
def pass_on(mine: cute.Tensor, theirs: cute.Tensor, number: cutlass.Int32, stream: cuda.CUstream):
    pass_on_kernel(mine, theirs, number).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.kernel
def scalars_kernel(first: cutlass.Int8, second: cutlass.Float32, third: cutlass.Int64):
    cute.arch.sync_threads()


@cute.jit
def scalars(
    first: cutlass.Int8, second: cutlass.Float32, third: cutlass.Int64, stream: cuda.CUstream
):
    scalars_kernel(first, second, third).launch(
        grid=(4, 6, 2),
        block=(32, 2, 1),
        cluster=(2, 3, 1),
        smem=3072,
        stream=stream,
        use_pdl=True,
    )


@cute.kernel
def tile_kernel(atom: cute.CopyAtom, source: cute.Tensor, out: cute.Tensor):
    """Copy the tile of this block through shared memory: TMA in, plain stores out."""
    thread, (bx, by, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
    memory = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    tile = memory.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
    barrier = memory.allocate_array(cutlass.Int64, 1)
    shared, tiles = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(cute.local_tile(source, (ROWS, COLUMNS), (None, None)), 0, 2),
    )
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, ROWS * COLUMNS * 4)
    if thread < 32:
        cute.copy(atom, tiles[(None, by, bx)], shared, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    mine = cute.local_tile(out, (ROWS, COLUMNS), (by, bx))
    mine[thread // COLUMNS, thread % COLUMNS] = tile[thread // COLUMNS, thread % COLUMNS]


@cute.jit
def copy_tiles(source: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    atom, view = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, (ROWS, COLUMNS)
    )
    tile_kernel(atom, view, out).launch(
        grid=(source.shape[1] // COLUMNS, source.shape[0] // ROWS, 1),
        block=(ROWS * COLUMNS, 1, 1),
        stream=stream,
    )


# Help ------------------------------------------------------------------------------------------


class Recorder(em.Device):
    """Launches nothing, keeps what it is asked for; fails on the launches named in ``fails``."""

    def __init__(self, target: str = "sm_90a", fails: dict[int, BaseException] | None = None):
        super().__init__(target)
        self.launches: list[dict[str, Any]] = []
        self._fails = fails or {}

    def launch(
        self, ptx, name, grid, block, args, *, cluster=None, shared=0, buffers=(), profile=False,
        programmatic=False,
    ):  # fmt: skip
        self.launches.append(dict(locals()))
        if failure := self._fails.get(len(self.launches) - 1):
            raise failure
        return em.Report({})


def tensors(n: int = 100) -> list[Any]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator) for _ in range(2)] + [torch.full((n,), np.nan)]


def dynamic(*values: Any) -> list[Any]:
    return [from_dlpack(value).mark_layout_dynamic() for value in values]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """No test leaves anything of the DSL replaced."""
    from cutlass.base_dsl.jit_executor import ExecutionArgs
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    owners = [ExecutionArgs, _Tensor, CudaDialectJitCompiledFunction, cutlass.utils.HardwareInfo]
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        pass
    else:
        owners += [provider.TVMFFIJitCompiledFunctionWithKwargs, provider.TVMFFIJitCompiledFunction]
    settings = CuTeDSL._get_dsl().envar
    before = [dict(vars(owner)) for owner in [*owners, settings]]
    yield
    assert [dict(vars(owner)) for owner in [*owners, settings]] == before


# Running ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_elementwise(target: str) -> None:
    a, b, c = tensors()
    with cutedsl(em.Device(target)) as reports:
        x, y, z = dynamic(a, b, c)
        compiled = cute.compile(add, x, y, z, STREAM)
        compiled(x, y, z, STREAM)
        assert torch.equal(c, a + b)
        assert [report.instructions["st.global.b32"] for report in reports] == [100]
        a, b, c = tensors(1000)  # another size, the same code
        compiled(*dynamic(a, b, c), STREAM)
    assert torch.equal(c, a + b)
    assert [report.instructions["st.global.b32"] for report in reports] == [100, 1000]
    assert f".target {target}" in compiled.__ptx__


@pytest.mark.parametrize("fake", [False, True])
def test_tvm_ffi(fake: bool) -> None:
    pytest.importorskip("tvm_ffi")
    a, b, c = tensors()
    with cutedsl(em.Device()) as reports:
        n = cute.sym_int()
        given = [make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3)]
        arguments = [*given, make_fake_stream()] if fake else [*dynamic(a, b, c), STREAM]
        compiled = cute.compile(add, *arguments, options="--enable-tvm-ffi")
        compiled(a, b, c, 0)
        assert torch.equal(c, a + b)
        compiled(b, c=c, stream=0, b=b)
    assert torch.equal(c, 2 * b)
    assert len(reports) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_through_tma(target: str) -> None:
    source, out = torch.randn(24, 48), torch.full((24, 48), np.nan)
    with cutedsl(em.Device(target)):
        arguments = [from_dlpack(t, assumed_align=16) for t in (source, out)]
        cute.compile(copy_tiles, *arguments, STREAM)(*arguments, STREAM)
    assert torch.equal(out, source)


@pytest.mark.parametrize("profile", [False, True])
def test_profile(profile: bool) -> None:
    a, b, c = tensors()
    with cutedsl(em.Device(), profile=profile) as reports:
        arguments = [*dynamic(a, b, c), STREAM]
        cute.compile(add, *arguments)(*arguments)
    written = reports[0].global_memory("write")
    assert (written and written.asked) == (c.nbytes if profile else None)


def test_launches_of_one_call_run_in_order() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device()) as reports:
        arguments = [*dynamic(a, b, c), STREAM]
        cute.compile(add_twice, *arguments)(*arguments)
    assert torch.equal(c, (a + b) + 2 * a)
    assert len(reports) == 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_wait_for_each_other(ranks: int) -> None:
    """Captured, they run at once: each alone would wait for ever."""
    devices = [em.Device("sm_90a", completion="late") for _ in range(ranks)]
    words = [torch.zeros(4, dtype=torch.int32) for _ in range(ranks)]
    with em.capture() as calls:
        for rank, device in enumerate(devices):
            with cutedsl(device) as reports:
                a, b = (from_dlpack(words[r % ranks]) for r in (rank, rank + 1))
                compiled = cute.compile(pass_on, a, b, 10 + rank, STREAM)
                compiled(a, b, 10 + rank, STREAM)
            assert reports == []
    assert [call.device for call in calls] == devices
    assert not any(word.any() for word in words)
    assert len(em.launch_together(calls)) == ranks
    assert [int(word[2]) for word in words] == [10 + (rank - 1) % ranks for rank in range(ranks)]
    with cutedsl(devices[0]) as reports:  # as before
        test = from_dlpack(torch.ones(4, dtype=torch.int32))
        cute.compile(pass_on, test, test, 1, STREAM)(test, test, 1, STREAM)
    assert len(reports) == 1


def test_tensors_in_tuples() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device()):
        x, y, z = dynamic(a, b, c)
        cute.compile(add_group, (x, y), z, STREAM)((x, y), z, STREAM)
    assert torch.equal(c, a + b)


def test_pointers_need_their_buffers_named() -> None:
    a, b, c = tensors()
    further: dict[str, Any] = {"left": a, "right": b.numpy()}
    with cutedsl(em.Device(), buffers=further):
        pointers = [
            make_ptr(cutlass.Float32, t.data_ptr(), cute.AddressSpace.gmem) for t in (a, b, c)
        ]
        compiled = cute.compile(add_pointers, *pointers, STREAM)
        with pytest.raises(em.MemoryFault, match="out of bounds"):
            compiled(*pointers, STREAM)
        further["out"] = c
        compiled(*pointers, STREAM)
    assert torch.equal(c, a + b)


def test_called_without_compile() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device(), buffers=[a, b, c]) as reports:
        add(*dynamic(a, b, c), STREAM)
    assert torch.equal(c, a + b)
    assert len(reports) == 1


def test_executor_of_a_device() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device()):
        arguments = [*dynamic(a, b, c), STREAM]
        cute.compile(add, *arguments).to(0)(*arguments)
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", ["--keep-ptx", "--keep-ptx --enable-tvm-ffi"])
def test_compiled_outside(options: str, target: str, tmp_path: Any) -> None:
    """Without an engine of the DSL's own where the process compiles for another target."""
    if "ffi" in options:
        pytest.importorskip("tvm_ffi")
    a, b, c = tensors()
    options += f" --gpu-arch {target} --dump-dir {tmp_path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar, "_arch", "sm_90a")
        compiled = cute.compile(add, *dynamic(a, b, c), STREAM, options=options)
    given = [a, b, c, 0] if "ffi" in options else [*dynamic(a, b, c), STREAM]
    with cutedsl(em.Device(target)):
        compiled(*given)
    assert torch.equal(c, a + b)


def test_compiled_in_a_block_and_called_outside() -> None:
    pytest.importorskip("tvm_ffi")
    a, b, c = tensors()
    with cutedsl(em.Device()):
        compiled = cute.compile(add, *dynamic(a, b, c), STREAM, options="--enable-tvm-ffi")
    with pytest.raises(RuntimeError, match="was compiled for the emulator"):
        compiled(a, b, c, 0)
    with cutedsl(em.Device()):
        compiled(a, b, c, 0)
    assert torch.equal(c, a + b)


# What a launch is given ------------------------------------------------------------------------


def test_configuration_and_scalars() -> None:
    device = Recorder()
    with cutedsl(device):
        cute.compile(scalars, -3, 1.5, 1 << 40, STREAM)(-3, 1.5, 1 << 40, STREAM)
    (launch,) = device.launches
    assert (launch["grid"], launch["block"], launch["cluster"]) == (
        (4, 6, 2),
        (32, 2, 1),
        (2, 3, 1),
    )
    assert launch["shared"] == 3072
    assert launch["args"] == [
        struct.pack("<b", -3),
        struct.pack("<f", 1.5),
        struct.pack("<q", 1 << 40),
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_tensor_map(target: str) -> None:
    """The 128 bytes that host code writes hold the tensor's address, extents and box."""
    device = Recorder(target)
    source, out = torch.randn(24, 48), torch.empty(24, 48)
    with cutedsl(device):
        arguments = [from_dlpack(t, assumed_align=16) for t in (source, out)]
        cute.compile(copy_tiles, *arguments, STREAM)(*arguments, STREAM)
    (launch,) = device.launches
    assert launch["grid"] == (3, 3, 1)
    (descriptor,) = [arg for arg in launch["args"] if len(arg) == 128]
    assert struct.unpack_from("<Q", descriptor) == (source.data_ptr(),)
    assert struct.unpack_from("<2I", descriptor, 32) == (47, 23)  # innermost first, less one
    assert tuple(descriptor[55:57]) == (COLUMNS - 1, ROWS - 1)
    reached = {name: array.ctypes.data for name, array in launch["buffers"]}
    assert reached == {"args[0]": source.data_ptr(), "args[1]": out.data_ptr()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(6, 8, 10),
        lambda: torch.zeros(6, 8, 10)[1:4, ::3, 2:5],
        lambda: torch.zeros(6, 8).T,
        lambda: torch.zeros(7, dtype=torch.bool),
        lambda: torch.zeros(3, 1, dtype=torch.float16).expand(3, 9),
        lambda: torch.zeros(()),
    ],
)
def test_memory_of_a_tensor(make: Any) -> None:
    tensor = make()
    low, high = np.lib.array_utils.byte_bounds(tensor.numpy())
    for value in (tensor, tensor.numpy(), from_dlpack(tensor)):
        ((name, memory),) = _pieces("it", value)
        assert name == "it"
        assert (memory.ctypes.data, memory.nbytes) == (low, high - low)


def test_memory_of_numpy_views_and_narrow_types() -> None:
    array = np.zeros((5, 4), np.int16)[::-1, 1:3]
    ((_, memory),) = _pieces("it", array)
    low, high = np.lib.array_utils.byte_bounds(array)
    assert (memory.ctypes.data, memory.nbytes) == (low, high - low)
    storage = torch.zeros(4, 6, dtype=torch.uint8)
    told = from_dlpack(storage)
    told.element_type = cutlass.Float4E2M1FN
    ((_, memory),) = _pieces("it", told)
    assert (memory.ctypes.data, memory.nbytes) == (storage.data_ptr(), 24)
    ((_, memory),) = _pieces("it", torch.zeros(0, 4))
    assert memory.nbytes == 0


def test_hardware_info() -> None:
    for target, multiprocessors in zip(TARGETS, (132, 148), strict=True):
        with cutedsl(em.Device(target)):
            info = cutlass.utils.HardwareInfo()
            assert info.get_device_multiprocessor_count() == multiprocessors
            assert info.get_max_active_clusters(2) == multiprocessors // 2


# Failures --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
@pytest.mark.parametrize("failure", [em.PtxError("of the test"), KeyboardInterrupt()])
def test_failures_of_a_launch_reach_the_caller(options: str, failure: BaseException) -> None:
    if options:
        pytest.importorskip("tvm_ffi")
    a, b, c = tensors()
    device = Recorder(fails={0: failure})
    with cutedsl(device) as reports:
        compiled = cute.compile(add_twice, *dynamic(a, b, c), STREAM, options=options)
        given = [a, b, c, 0] if options else [*dynamic(a, b, c), STREAM]
        with pytest.raises(type(failure)) as raised:
            compiled(*given)
        assert raised.value is failure
        assert len(device.launches) == 1  # the second launch of the function is not reached
        assert not reports
        compiled(*given)  # and the next call works
    assert len(device.launches) == 3


def test_out_of_bounds_names_the_arguments() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device()):
        arguments = [*dynamic(a[:50], b, c), STREAM]
        with pytest.raises(em.MemoryFault, match=r"args\[0\]"):
            cute.compile(add, *arguments)(*arguments)


def test_exceptions_in_the_block_restore_too() -> None:
    with pytest.raises(ZeroDivisionError), cutedsl(em.Device()):
        raise ZeroDivisionError


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_a_function_without_ptx(options: str) -> None:
    if options:
        pytest.importorskip("tvm_ffi")
    a, b, c = tensors()
    with cutedsl(em.Device()):  # what holds in a block must not stay in the DSL's options
        cute.compile(add, *dynamic(a, b, c), STREAM, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar, "_arch", "sm_90a")
        compiled = cute.compile(add, *dynamic(a, b, c), STREAM, options=options)
    with cutedsl(em.Device()), pytest.raises(ValueError, match="--keep-ptx"):
        compiled(*([a, b, c, 0] if options else [*dynamic(a, b, c), STREAM]))


def test_a_function_for_another_target() -> None:
    a, b, c = tensors()
    with cutedsl(em.Device("sm_100a")):
        compiled = cute.compile(add, *dynamic(a, b, c), STREAM)
    with cutedsl(em.Device("sm_90a")), pytest.raises(em.PtxError, match="sm_100a"):
        compiled(*dynamic(a, b, c), STREAM)


def test_attributes_that_no_device_has() -> None:
    """Host code that asks for more than the emulator knows gets an error that says so."""
    from blockscale.emulator.host import hostcode

    function, kinds = hostcode._RUNTIME["_cudaDeviceGetAttribute"]
    out = ctypes.c_int32(7)
    call = hostcode._Call(em.Device(), None, [], [], False)
    token = hostcode._calls.set(call)
    try:
        assert hostcode._exported(function, kinds)(ctypes.addressof(out), 9999, 0) != 0
        assert hostcode._missing("_cudaMallocAsync")() != 0
    finally:
        hostcode._calls.reset(token)
    assert "9999" in str(call.failure)
    assert out.value == 7
