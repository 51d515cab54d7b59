"""``blockscale emulate`` as a user types it: descriptions, outputs, reports, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockscale.cli import main

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 out, .param .f32 by, .param .u32 n) {
    .reg .pred %p; .reg .b32 %t, %n, %c, %b; .reg .b64 %x, %out; .reg .f32 %f, %by;
    mov.u32 %t, %tid.x;
    mov.u32 %c, %ctaid.x;
    mov.u32 %b, %ntid.x;
    mad.lo.u32 %t, %c, %b, %t;
    ld.param.u32 %n, [n];
    setp.ge.u32 %p, %t, %n;
    @%p ret;
    ld.param.u64 %x, [x];
    ld.param.u64 %out, [out];
    ld.param.f32 %by, [by];
    mad.wide.u32 %x, %t, 4, %x;
    mad.wide.u32 %out, %t, 4, %out;
    ld.global.f32 %f, [%x];
    mul.rn.f32 %f, %f, %by;
    st.global.f32 [%out], %f;
    ret;
}
"""
X = np.linspace(-3, 4, 96, dtype=np.float32).reshape(3, 32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """k.ptx, k.json and k.npz of a launch that is right."""
    monkeypatch.chdir(tmp_path)
    Path("k.ptx").write_text(PTX)
    np.savez("k.npz", x=X, twice=2 * X)
    describe(Path("k.json"))
    return tmp_path


def describe(path: Path, **changes: Any) -> None:
    description = {
        "grid": [2],
        "block": [64],
        "args": [
            {"array": "x"},
            {"zeros": [3, 32], "dtype": "float32", "name": "out"},
            {"scalar": 2, "type": "f32"},
            {"scalar": 96, "type": "u32"},
        ],
        "outputs": ["out"],
        "expected": {"out": "twice"},
    }
    path.write_text(json.dumps({**description, **changes}))


def emulate(*arguments: str) -> int:
    """The exit code of ``blockscale emulate ...``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["blockscale", "emulate", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
    return int(stop.value.code or 0)


CASE = ("--args", "k.json", "--data", "k.npz")


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulate("k.ptx", *CASE) == 0
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if line.startswith("out "))
    assert row.split() == ["out", "3x32", "float32", "-6", "8", "0", "yes"]
    assert "global memory, write: 384 bytes asked for in 12 sectors of 32: 100.0%" in out
    assert err == ""


@pytest.mark.parametrize("order", [("k.ptx", *CASE), (*CASE, "k.ptx"), ("run", "k.ptx", *CASE)])
def test_json_trace_and_saved_outputs(
    order: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate(*order, "--json", "--save", "out.npz", "--trace", "trace.json") == 0
    found = json.loads(capsys.readouterr().out)
    (output,) = found["outputs"]
    assert (output["name"], output["equal"], output["shape"]) == ("out", True, [3, 32])
    assert found["report"]["instructions"]["st.global.f32"] == 96
    assert found["report"]["bytes"]["global"] == {"read": 384, "write": 384}
    assert (np.load("out.npz")["out"] == 2 * X).all()
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_options_override_the_description(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulate("k.ptx", *CASE, "--grid", "1", "--block", "32,1") == 1
    out = capsys.readouterr().out
    assert "64 of 96 differ, first [1, 0]: 0.0, expected " in out


def test_without_a_description(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bare.ptx").write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n"
        ".visible .entry bare() .reqntid 32 {\n    ret;\n}\n"
    )
    assert emulate("bare.ptx") == 0
    assert "instructions: 32 of threads, 1 of warps" in capsys.readouterr().out


def test_nan_is_as_expected_whatever_its_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = X.copy()
    x[0, 0] = np.nan
    wanted = 2 * x
    wanted.view(np.uint32)[0, 0] = 0xFFC12345
    x[0, 1], wanted[0, 1] = np.inf, np.inf
    np.savez("k.npz", x=x, twice=wanted)
    assert emulate("k.ptx", *CASE, "--json") == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (output["nan"], output["max"]) == (1, "inf")


def test_kinds_of_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        {"array": "x"},
        {"zeros": [96], "dtype": "uint32", "name": "bits"},
        {"bytes": np.float32(-1).tobytes().hex()},
        {"scalar": 96},
    ]
    describe(Path("k.json"), args=args, outputs=["bits", "x"], expected={})
    assert emulate("k.ptx", *CASE, "--save", "out.npz") == 0
    assert (np.load("out.npz")["bits"].view(np.float32) == -X.reshape(-1)).all()
    assert (np.load("out.npz")["x"] == X).all()
    describe(Path("k.json"), args=args, outputs=None, expected=None)
    capsys.readouterr()
    assert emulate("k.ptx", *CASE, "--json") == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["name"] for output in outputs] == ["bits"]


COPY = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry copy(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128])
    .reqntid 32, 1, 1
{
    .reg .pred %p, %q; .reg .b32 %t, %s, %b, %z; .reg .b64 %from, %to, %state;
    .shared .align 1024 .b8 tile[512];
    .shared .align 8 .b64 bar;
    mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 0;
    @%p ret;
    mov.u32 %s, tile;
    mov.u32 %b, bar;
    mov.u32 %z, 0;
    mov.b64 %from, from;
    mov.b64 %to, to;
    mbarrier.init.shared.b64 [%b], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%b], 512;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%s], [%from, {%z, %z}], [%b];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%b], 0;
    @!%q bra WAIT;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%to, {%z, %z}], [%s];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ret;
}
"""


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_tensor_maps(completion: str, folder: Path) -> None:
    Path("copy.ptx").write_text(COPY)
    maps = [
        {"tensor_map": {"array": "x", "box": [32, 4], "swizzle": "128B"}},
        {"tensor_map": {"zeros": [4, 32], "name": "out", "box": [32, 4], "swizzle": "128B"}},
    ]
    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    np.savez("copy.npz", x=x)
    Path("copy.json").write_text(json.dumps({"args": maps, "expected": {"out": "x"}}))
    more = ("--completion", completion, "--seed", "3")
    assert emulate("copy.ptx", "--args", "copy.json", "--data", "copy.npz", *more) == 0


# --- what goes wrong ------------------------------------------------------------------------------


def test_what_the_kernel_does_wrong_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = json.loads(Path("k.json").read_text())["args"]
    args[3]["scalar"] = 97
    describe(Path("k.json"), args=args)
    assert emulate("k.ptx", *CASE, "--save", "out.npz") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blockscale: global address 0x")
    assert "(line 19)" in err
    assert "Traceback" not in err
    assert not Path("out.npz").exists()


def test_a_deadlock_lists_the_warps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("stuck.ptx").write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n"
        ".visible .entry stuck() .reqntid 64 {\n    bar.sync 0, 96;\n    ret;\n}\n"
    )
    assert emulate("stuck.ptx") == 1
    err = capsys.readouterr().err
    assert "deadlock" in err
    assert "\n  CTA (0, 0, 0), warp 0-1, line 5: bar.sync waits for barrier 0" in err


def args_of(*specs: Any) -> dict[str, Any]:
    return {"args": list(specs)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"griid": [1]}, "griid"),
    ({"block": None}, "block"),
    ({"block": [0]}, "block"),
    ({"block": [1.5]}, "block: got [1.5]"),
    ({"grid": 0}, "grid: got 0"),
    ({"cluster": "2"}, "cluster: got '2'"),
    ({"shared": "all"}, "shared: got 'all'; expected an integer"),
    ({"entry": ["scale"]}, "entry: got ['scale']; expected text"),
    ({"args": {}}, "args: got {}; expected a list"),
    ({"args": [], "outputs": [], "expected": {}}, "args: got 0, scale takes 4"),
    ({"outputs": [["out"]]}, "outputs: ['out']"),
    ({"expected": ["out"]}, "expected: got ['out']; expected an object"),
    ({"args": [40]}, 'args[0]: got 40; expected an object, such as {"array": "x"}'),
    ({"expected": {"out": ["twice"]}}, "expected['out']: ['twice']"),
    (args_of({"array": ["x"]}), "args[0]: ['x']"),
    ({"outputs": ["nosuch"]}, "outputs: 'nosuch'"),
    ({"expected": {"x": "twice"}}, "expected: 'x'"),
    ({"expected": {"out": "nosuch"}}, "expected['out']: 'nosuch'"),
    ({"target": "sm_80"}, "sm_80"),
    (args_of({"array": "nosuch"}), "args[0]: 'nosuch' is not in the data, which has x, twice"),
    (args_of({"array": "x", "scalar": 1}), "args[0]"),
    (args_of(3), "args[0]: got 3"),
    (args_of({"zeros": [-1]}), "args[0]: zeros"),
    (args_of({"zeros": [4], "dtype": "bfloat16"}), "bfloat16"),
    (args_of({"zeros": [4], "name": "x"}), "args[0]: the name 'x'"),
    (args_of({"zeros": [4], "shape": 3}), "args[0]: unknown key 'shape'"),
    (args_of({"scalar": "a"}), "args[0]: scalar"),
    (args_of({"scalar": 1, "type": "u7"}), "'u7'"),
    (args_of({"scalar": 256, "type": "u8"}), "args[0]: 256 is no u8"),
    (args_of({"scalar": 1.5, "type": "s32"}), "args[0]: 1.5 is no s32"),
    (args_of({"bytes": "xy"}), "args[0]: bytes"),
    (args_of({"tensor_map": {"array": "x"}}), "args[0]: tensor_map"),
    (args_of({"tensor_map": {"array": "x", "box": [1, 1], "swizzle": "7B"}}), "7B"),
    (args_of({"tensor_map": {"array": "x", "box": [8, 1], "swirl": 1}}), "swirl"),
]


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("changes", "said"), BAD)
def test_a_bad_description_is_one_line_and_exit_code_2(
    changes: dict[str, Any], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(Path("k.json"), **changes)
    assert emulate("k.ptx", *CASE) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nosuch.ptx",), "file: cannot read nosuch.ptx (No such file or directory); name a"),
        ((".",), "file: cannot read . (Is a directory); name a"),
        (("k.ptx", "--args", "no.json"), "args: cannot read no.json (No such file or directory)"),
        (("k.ptx", "--data", "no.npz"), "data: cannot read no.npz (No such file or directory)"),
        (("k.ptx", *CASE, "--suppress", "no"), "suppress: cannot read no (No such file"),
        (("k.ptx", *CASE, "--save", "no/out.npz"), "save: the directory no does not exist"),
        (("k.ptx", *CASE, "--trace", "."), "trace: . is a directory"),
        (("k.npz",), "file: k.npz is no text in UTF-8"),
        (("k.ptx", "--args", "k.ptx"), "args: k.ptx is not JSON"),
        (("k.ptx", "--args", "k.npz"), "args: k.npz is no text in UTF-8"),
        (("k.ptx", "--data", "k.ptx"), "data: k.ptx is not an NPZ file"),
        (("k.ptx", "--grid", "a"), "grid"),
        (("k.ptx", *CASE, "--grid", "1,2,3,4"), "grid"),
        (("k.ptx", *CASE, "--completion", "soon"), "completion"),
        (("k.ptx", *CASE, "--check", "spelling"), "check"),
        (("k.ptx", "--nosuch"), "--nosuch"),
        (("--nosuch",), "--nosuch"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_several_entries_need_a_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.ptx").write_text(PTX + PTX[PTX.index(".visible") :].replace("scale(", "other("))
    assert emulate("two.ptx", *CASE) == 2
    assert "entry: the PTX has scale, other" in capsys.readouterr().err
    assert emulate("two.ptx", *CASE, "--entry", "other") == 0
    assert emulate("two.ptx", *CASE, "--entry", "nosuch") == 1
    assert "'nosuch' is not in the module" in capsys.readouterr().err


def test_what_the_entry_does_not_reach_is_not_read(folder: Path) -> None:
    """nvcc's modules hold tables of functions, which are not supported, beside other kernels."""
    table = ".visible .func f() { ret; }\n.global .u64 functions[1] = {f};\n"
    Path("more.ptx").write_text(PTX.replace(".visible", table + ".visible", 1))
    assert emulate("more.ptx", *CASE) == 0


def test_structures_and_maps_by_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A structure points to an array that no other argument shows; a map says its own shape."""
    Path("s.ptx").write_text(
        """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .align 8 .b8 p[16], .param .align 64 .b8 map[128], .param .u64 out) {
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p;
    .shared .align 128 .b8 box[32]; .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [p+8]; ld.param.u64 %rd2, [out];
    ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r1; st.global.u32 [%rd2], %r2;
    mov.u32 %r3, bar; mov.u32 %r4, box; mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
    mov.u32 %r5, 0; mov.u32 %r6, 1;
    mbarrier.init.shared.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 32;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r4], [%rd3, {%r5, %r6}], [%r3];
L:  mbarrier.try_wait.parity.shared.b64 %p, [%r3], 0;
    @!%p bra L;
    ld.shared.u32 %r7, [%r4+28]; st.global.u32 [%rd2+4], %r7;
    ret;
}
"""
    )
    describe(
        Path("k.json"),
        entry="k",
        grid=[1],
        block=[1],
        args=[
            {"struct": [{"array": "x"}, {"scalar": 5, "type": "u32"}, {"bytes": "00000000"}]},
            {
                "tensor_map": {
                    "array": "y", "element": "u32", "shape": [8, 2], "strides": [32],
                    "box": [8, 1],
                }
            },
            {"zeros": [2], "dtype": "uint32", "name": "out"},
        ],
        outputs=["out"],
        expected={"out": "wanted"},
    )  # fmt: skip
    np.savez(
        "s.npz",
        x=np.array([7], np.uint32),
        y=np.arange(16, dtype=np.uint32),
        wanted=np.array([12, 15], np.uint32),
    )
    assert emulate("s.ptx", "--args", "k.json", "--data", "s.npz") == 0
    assert "yes" in capsys.readouterr().out


def test_alarms_are_collected_or_suppressed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread too many reads past the end of x."""
    case = json.loads(Path("k.json").read_text())
    case["args"][3]["scalar"] = 97
    Path("k.json").write_text(json.dumps(case))
    order = ("k.ptx", "--args", "k.json", "--data", "k.npz")
    assert emulate(*order, "--collect", "--json") == 1
    alarms = json.loads(capsys.readouterr().out)["report"]["alarms"]
    assert {alarm["kind"] for alarm in alarms} == {"bounds"}
    Path("known.txt").write_text("bounds kernel=scale opcode=*.global.f32 # one too many\n")
    assert emulate(*order, "--suppress", "known.txt") == 0
    assert "bounds kernel=scale opcode=*.global.f32" in capsys.readouterr().out
    assert emulate(*order, "--check", "race,rice") == 2
