"""Tensor maps as the driver encodes them and as the copy engine reads them: made on an H200.

    python tests/hardware/tensormap_dump.py tests/emulator/data/tensormaps_h200.json

Calls cuTensorMapEncodeTiled over arguments that differ from a base in one property at a time, and
over random ones; writes each call's arguments with the 128 bytes (less zeros at the end) or the
error code. Then copies boxes to shared memory and back, and writes what the memory holds. Needs
the driver alone.
"""

from __future__ import annotations

import base64
import ctypes
import datetime
import json
import multiprocessing
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]

BASE: Case = {
    "element": 0,
    "address": 0x7F12_3456_7800,
    "shape": [1024, 512],
    "strides": [2048],
    "box": [64, 8],
    "element_strides": [1, 1],
    "interleave": 0,
    "swizzle": 0,
    "l2_promotion": 0,
    "oob_fill": 0,
}
SIZES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]  # bytes of elements 0 to 12
PACKED = (13, 14, 15)  # 16 elements of 4, 4 and 6 bits
FLOATS = (6, 7, 8, 9, 10, 11, 12)
SHARED = 4096  # bytes of shared memory that a copy may write
BUFFER = 1 << 16  # bytes of global memory


def of_rank(rank: int) -> Case:
    return {
        "shape": [1024, 512, 64, 32, 16][:rank],
        "strides": [2048, 1 << 20, 1 << 26, 1 << 31][: rank - 1],
        "box": [64, 8, 4, 2, 1][:rank],
        "element_strides": [1] * rank,
    }


def changed(values: list[int], at: int, value: int) -> list[int]:
    return [*values[:at], value, *values[at + 1 :]]


def encodings() -> Iterator[Case]:
    yield {}
    for rank in range(1, 6):
        yield of_rank(rank)
    for element in (*range(13), 16):
        yield {"element": element}
    for element in PACKED:
        packed = {"element": element, "box": [128, 8]}
        for inner in (2048, 1920, 1922, 1921):
            yield packed | {"shape": [inner, 512]}
        for box in (16, 32, 64, 96, 256):
            yield packed | {"box": [box, 8]}
        yield packed | {"address": BASE["address"] + 16}
        yield packed | {"strides": [2048 + 16]}
        yield packed | {"oob_fill": 1}
        for swizzle in range(1, 7):
            yield packed | {"swizzle": swizzle}
        for interleave in (1, 2):
            yield of_rank(3) | packed | {"box": [128, 8, 4], "interleave": interleave}
    for bit in range(3, 64):
        yield {"address": 1 << bit}
    yield {"address": 0}
    five = of_rank(5)
    for d in range(5):
        for value in (0, 1, 3, 65536, 1 << 31, 1 << 32, (1 << 32) + 1):
            yield five | {"shape": changed(five["shape"], d, value)}
        for value in (0, 1, 2, 5, 16, 48, 128, 255, 256, 257):
            yield five | {"box": changed(five["box"], d, value)}
        for value in (0, 2, 3, 5, 8, 9):
            yield five | {"element_strides": changed(five["element_strides"], d, value)}
        if d < 4:
            for bits in (0, 8, 16, 1 << 15, 1 << 32, 1 << 36, 0x9A_BCDE_1230, (1 << 40) - 16):
                yield five | {"strides": changed(five["strides"], d, bits)}
            yield five | {"strides": changed(five["strides"], d, 1 << 40)}
    for swizzle in range(8):
        for element, box in ((0, 16), (0, 32), (1, 32), (2, 32), (0, 128), (1, 128), (2, 64)):
            yield {"swizzle": swizzle, "element": element, "box": [box, 8]}
    for interleave in range(4):
        for rank in (2, 3):
            for swizzle in (0, 1):
                yield of_rank(rank) | {"interleave": interleave, "swizzle": swizzle}
    for promotion in range(5):
        yield {"l2_promotion": promotion}
    for fill in range(3):
        for element in range(13):
            yield {"oob_fill": fill, "element": element}
    for rows in (226, 227, 228, 255, 256):
        yield {"element": 2, "box": [256, rows]}
    for rows, step in ((256, 2), (256, 3), (64, 8)):
        yield {"element": 4, "box": [256, rows], "element_strides": [1, step]}
    yield from ({"im2col": rank} for rank in (3, 4, 5))
    rng = random.Random(0)
    for _ in range(120):
        yield at_random(rng)


def at_random(rng: random.Random) -> Case:
    rank, element, swizzle = rng.randint(1, 5), rng.randrange(13), rng.randrange(4)
    widest = (256, 32, 64, 128)[swizzle]
    inner = rng.randrange(16, min(widest, 256 * SIZES[element]) + 1, 16)
    box, left = [inner // SIZES[element]], (1 << 17) // inner
    for _ in range(rank - 1):
        box.append(rng.randint(1, min(256, left)))
        left //= box[-1]
    return {
        "element": element,
        "address": rng.randrange(1 << 43) * 16,
        "shape": [rng.randint(1, 1 << rng.randint(1, 32)) for _ in range(rank)],
        "strides": [rng.randrange(1 << rng.randint(4, 36)) * 16 for _ in range(rank - 1)],
        "box": box,
        "element_strides": [1, *(rng.randint(1, 8) for _ in range(rank - 1))],
        "swizzle": swizzle,
        "l2_promotion": rng.randrange(4),
        "oob_fill": rng.randrange(2) if element in FLOATS else 0,
    }


def copy(shape: list[int], strides: list[int], box: list[int], at: list[int], **rest: Any) -> Case:
    """One box; ``base`` is where in shared memory it goes, ``address`` an offset in the buffer."""
    one = {"address": 0, "element_strides": [1] * len(shape)}
    return one | {"shape": shape, "strides": strides, "box": box, "at": at, "base": 0} | rest


def copies() -> Iterator[Case]:
    """Boxes; their first dimension is in bytes until ``scaled`` makes it elements."""
    for swizzle, span in enumerate((96, 32, 64, 128)):
        for inner in sorted({16, span // 2, span}):
            yield copy([512, 32], [512], [inner, 9], [32, 3], swizzle=swizzle)
        yield copy([512, 32], [512], [span, 8], [0, 0], swizzle=swizzle, base=128)
        yield copy([512, 32], [512], [span, 8], [0, 0], swizzle=swizzle, base=640)
        yield copy([512, 32], [512], [min(span, 48), 6], [-16, -2], swizzle=swizzle)
    for at in ([-5, 0], [490, 20], [600, 0], [0, -9], [0, 40], [-100, -100]):
        yield copy([509, 23], [512], [48, 7], at)
    for element, size in enumerate(SIZES):
        for fill in (0, 1) if element in FLOATS else (0,):
            at = [64 // size, 5]
            yield copy([96, 8], [128], [64, 4], at, element=element, oob_fill=fill)
    yield copy([700], [], [128], [-32])
    yield copy([700], [], [128], [640])
    for steps in ([1, 2], [1, 3], [1, 8], [2, 1]):
        for top in (-5, 0, 13):
            yield copy([512, 19], [512], [32, 16], [16, top], element_strides=steps)
        yield copy([512, 19], [512], [32, 13], [16, 2], element_strides=steps)
    yield copy([512, 19], [512], [64, 16], [16, 2], element_strides=[2, 1], bytes=32 * 16)
    yield copy([64, 7, 5], [80, 640], [32, 3, 4], [16, 5, -1])
    yield copy([64, 7, 5], [80, 640], [32, 4, 4], [16, -1, 2], swizzle=1)
    yield copy([64, 7, 5], [640, 80], [32, 4, 3], [48, 3, 3], element_strides=[1, 2, 1])
    yield copy([64, 3, 4, 5], [80, 240, 960], [16, 2, 3, 2], [32, 2, 2, 4])
    yield copy([64, 3, 4, 2, 3], [80, 240, 960, 1920], [16, 2, 3, 2, 2], [48, 1, -1, 0, 2])
    yield copy([64, 3, 4, 2, 3], [80, 240, 960, 1920], [64, 2, 2, 2, 2], [0, 2, 1, 1, 1], swizzle=2)


def scaled(case: Case) -> Case:
    size = SIZES[case.get("element", 0)]
    shape, box = case["shape"], case["box"]
    return case | {"shape": [shape[0] // size, *shape[1:]], "box": [box[0] // size, *box[1:]]}


def nbytes(case: Case) -> int:
    total = SIZES[case.get("element", 0)] * case["box"][0]
    for box, step in zip(case["box"][1:], case["element_strides"][1:], strict=True):
        total *= -(-box // step)
    return int(total)


def pattern(count: int) -> bytes:
    """Words all different, a quarter of them denormal as binary32."""
    words = (i * 2654435761 & (0x807F_FFFF if i % 4 == 0 else 0xFFFF_FFFF) for i in range(count))
    return struct.pack(f"<{count}I", *words)


def kernels() -> str:
    """Entry loadN/storeN for N dimensions: (map, at x 5, bytes, base, image of shared memory)."""
    text = [".version 8.0", ".target sm_90", ".address_size 64"]
    text += [".extern .shared .align 1024 .b8 image[];"]
    for rank in range(1, 6):
        at = "{" + ", ".join(f"%c{d}" for d in range(rank)) + "}"
        load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier"
        store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
        text.append(
            PROLOGUE.format(name=f"load{rank}")
            + LOAD.format(copy=f"{load}::complete_tx::bytes [%box], [%map, {at}], [%bar];")
        )
        text.append(
            PROLOGUE.format(name=f"store{rank}")
            + STORE.format(copy=f"{store} [%map, {at}], [%box];")
        )
    return "\n".join(text)


PROLOGUE = """
.visible .entry {name}(.param .align 64 .b8 map[128], .param .u32 at0, .param .u32 at1,
    .param .u32 at2, .param .u32 at3, .param .u32 at4, .param .u32 bytes, .param .u32 base,
    .param .u64 data) {{
  .shared .align 8 .b64 bar;
  .reg .b32 %c<5>; .reg .b32 %n, %box, %bar, %i, %v, %s; .reg .b64 %map, %data, %p, %w;
  .reg .pred %q, %leader;
  ld.param.u32 %c0, [at0]; ld.param.u32 %c1, [at1]; ld.param.u32 %c2, [at2];
  ld.param.u32 %c3, [at3]; ld.param.u32 %c4, [at4];
  ld.param.u32 %n, [bytes]; ld.param.u32 %box, [base]; ld.param.u64 %data, [data];
  mov.b64 %map, map; cvta.param.u64 %map, %map; mov.u32 %bar, bar;
  mov.u32 %s, image; add.u32 %box, %box, %s;
  mov.u32 %i, %tid.x; setp.eq.u32 %leader, %i, 0;
  mul.wide.u32 %p, %i, 4; add.u64 %p, %p, %data;
  shl.b32 %i, %i, 2; add.u32 %i, %i, %s;
"""
LOAD = """
  mov.u32 %v, 0xcdcdcdcd; st.shared.b32 [%i], %v;
  fence.proxy.async; bar.sync 0;
  @!%leader bra done;
  mbarrier.init.shared.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared.b64 %w, [%bar], %n;
  {copy}
  mov.u32 %v, 0;
wait:
  mbarrier.try_wait.parity.shared.b64 %q, [%bar], 0;
  @%q bra done;
  add.u32 %v, %v, 1; setp.lt.u32 %q, %v, 1000; @%q bra wait;
  trap;
done:
  bar.sync 0;
  ld.shared.b32 %v, [%i]; st.global.b32 [%p], %v;
  ret;
}}
"""
STORE = """
  ld.global.b32 %v, [%p]; st.shared.b32 [%i], %v;
  fence.proxy.async; bar.sync 0;
  @!%leader bra done;
  {copy}
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
done:
  ret;
}}
"""


class Driver:
    """A context on device 0."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(99), ctypes.c_int()
        self("cuDeviceGetName", name, 99, device)
        self("cuDriverGetVersion", ctypes.byref(version))
        self.device, self.cuda_version = name.value.decode(), version.value

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: error {code}")

    def encode(self, case: Case) -> tuple[int, Any]:
        """The error code and, where it is 0, the map at an address aligned to 64 bytes."""
        case = BASE | case
        memory = (ctypes.c_uint64 * 24)()
        place = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
        out = (ctypes.c_uint8 * 128).from_address(place)
        out.keep = memory

        def array(kind: Any, values: list[int]) -> Any:
            return (kind * max(len(values), 1))(*values)

        code = self.cuda.cuTensorMapEncodeTiled(
            out,
            case["element"],
            len(case["shape"]),
            ctypes.c_void_p(case["address"]),
            array(ctypes.c_uint64, case["shape"]),
            array(ctypes.c_uint64, case["strides"]),
            array(ctypes.c_uint32, case["box"]),
            array(ctypes.c_uint32, case["element_strides"]),
            case["interleave"],
            case["swizzle"],
            case["l2_promotion"],
            case["oob_fill"],
        )
        return code, out

    def encode_im2col(self, rank: int) -> tuple[int, Any]:
        """A map of the other mode, to be told apart."""
        case, out = BASE | of_rank(rank), (ctypes.c_uint64 * 16)()
        corner = (ctypes.c_int32 * 3)(-1, -1, -1)
        code = self.cuda.cuTensorMapEncodeIm2col(
            out,
            6,
            rank,
            ctypes.c_void_p(case["address"]),
            (ctypes.c_uint64 * rank)(*case["shape"]),
            (ctypes.c_uint64 * rank)(*case["strides"]),
            corner,
            corner,
            32,
            64,
            (ctypes.c_uint32 * rank)(*case["element_strides"]),
            *(0, 0, 0, 0),
        )
        return code, out

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer

    def write(self, pointer: ctypes.c_uint64, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))

    def read(self, pointer: ctypes.c_uint64, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self("cuMemcpyDtoH_v2", out, pointer, ctypes.c_size_t(nbytes))
        return out.raw

    def module(self, ptx: str) -> Callable[[str], ctypes.c_void_p]:
        module = ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), ptx.encode())

        def function(name: str) -> ctypes.c_void_p:
            out = ctypes.c_void_p()
            self("cuModuleGetFunction", ctypes.byref(out), module, name.encode())
            return out

        return function

    def launch(self, function: ctypes.c_void_p, raw: Any, numbers: list[int], data: Any) -> None:
        args = [raw, *(ctypes.c_int32(n) for n in numbers), data]
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        self("cuLaunchKernel", function, 1, 1, 1, SHARED // 4, 1, 1, SHARED, None, pointers, None)
        self("cuCtxSynchronize")


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def run_copies(cases: list[Case], pipe: Any) -> None:
    """Send what each copy leaves; a fault ends the process, and the context with it."""
    driver = Driver()
    function = driver.module(kernels())
    source, buffer = driver.allocate(SHARED), driver.allocate(BUFFER)
    for case in cases:
        code, raw = driver.encode(case | {"address": buffer.value + case["address"]})
        if code:
            pipe.send(case | {"error": code})
            continue
        rank, verb = len(case["shape"]), case["verb"]
        numbers = [*case["at"], *[0] * (5 - rank), case.get("bytes", nbytes(case)), case["base"]]
        driver.write(buffer, pattern(BUFFER // 4) if verb == "load" else bytes(BUFFER))
        driver.write(source, pattern(SHARED // 4))
        driver.launch(function(f"{verb}{rank}"), raw, numbers, source)
        found = driver.read(source, SHARED) if verb == "load" else driver.read(buffer, BUFFER)
        pipe.send(case | {"memory": packed(found)})


def isolated(cases: list[Case]) -> Iterator[Case]:
    """The copies' results; after a fault the next process goes on with the next case."""
    done = 0
    while done < len(cases):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=run_copies, args=(cases[done:], theirs))
        process.start()
        theirs.close()
        try:
            while True:
                yield ours.recv()
                done += 1
        except EOFError:
            process.join()
            if done < len(cases):
                yield cases[done] | {"error": "fault"}
                done += 1


def main(path: str) -> None:
    cases = [case | {"verb": verb} for verb in ("load", "store") for case in map(scaled, copies())]
    copied = list(isolated(cases))
    driver = Driver()
    encoded = []
    for case in encodings():
        im2col = case.get("im2col")
        code, raw = driver.encode_im2col(im2col) if im2col else driver.encode(case)
        encoded.append(
            case | ({"error": code} if code else {"hex": bytes(raw).rstrip(b"\0").hex()})
        )
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    version = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    header = {
        "date": datetime.date.today().isoformat(),
        "device": driver.device,
        "driver": version,
        "cuda": driver.cuda_version,
        "base": BASE,
    }
    with open(path, "w") as file:
        file.write("{" + json.dumps(header)[1:-1])
        for name, part in (("encoded", encoded), ("copied", copied)):
            lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in part)
            file.write(f',\n"{name}": [\n{lines}\n]')
        file.write("}\n")


if __name__ == "__main__":
    main(sys.argv[1])
