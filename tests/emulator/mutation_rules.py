"""What can be wrong in a kernel: rules that make mutants of its PTX.

A rule is a pattern for one instruction and what to put in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """``pattern`` for one instruction; ``into`` refers to its groups, and may be empty."""

    name: str
    pattern: str
    into: str


def _delete(name: str, pattern: str) -> Rule:
    return Rule(f"delete {name}", pattern, "")


def _operand(
    name: str, before: str, operand: str, after: str, change: str, type: str = "32"
) -> Rule:
    """One operand changed in passing: ``change`` is an instruction and its second source."""
    opcode, _, value = change.partition(" ")
    kind = "b" if opcode in ("xor", "and", "or") else "u"
    into = (
        rf"{{ .reg .b{type} mutant; {opcode}.{kind}{type} mutant, \g<operand>, {value}; "
        r"\g<before>mutant\g<after> }"
    )
    return Rule(name, rf"(?P<before>{before})(?P<operand>{operand})(?P<after>{after})", into)


_R, _RD, _RS, _REST = r"%r\d+", r"%rd\d+", r"%rs\d+", r"[^;]*;"
_MMA = r"tcgen05\.mma\S+ \[%r\d+\], "
_WGMMA = r"wgmma\.mma_async\S+ \{[^}]*\}, "
_CP = rf"tcgen05\.cp\S+ \[{_R}\], "
_TILE = r"cp\.async\.bulk\.tensor\S+ (?:\[%r\d+\], )?\[%rd\d+, \{"


def _bits(
    name: str, before: str, operand: str, after: str, type: str, bits: dict[str, int]
) -> list[Rule]:
    """One bit of a descriptor flipped; bits by field."""
    return [
        _operand(f"{name}: {field}", before, operand, after, f"xor {1 << bit:#x}", type)
        for field, bit in bits.items()
    ]


#: Fields that count for the layouts here: of the leading dimension offset, that is B of wgmma.
_MATRIX = {
    "start": 3, "stride": 32, "stride high": 35, "version": 46,
    "base offset": 49, "swizzle low": 61, "swizzle": 62, "swizzle high": 63,
}  # fmt: skip
_WGMMA_MATRIX = {
    "start": 3, "stride": 32, "base offset": 49, "swizzle low": 62, "swizzle high": 63,
}  # fmt: skip
_SHAPE = {
    "sparsity": 2, "scale B id": 4, "scale B id high": 5, "type of A": 7, "type of B": 10,
    "negate A": 13, "negate B": 14, "transpose A": 15, "transpose B": 16, "N low": 17, "N": 20,
    "scale type": 23, "M low": 27, "M": 28, "scale A id": 29, "scale A id high": 30,
}  # fmt: skip

RULES = [
    # --- what orders things ---
    _delete("fence.proxy.async", r"fence\.proxy\.async\S*;"),
    _delete("fence.mbarrier_init", r"fence\.mbarrier_init\S*;"),
    _delete("tcgen05.fence", r"tcgen05\.fence\S*;"),
    _delete("wgmma.fence", r"wgmma\.fence\S*;"),
    _delete("bar.sync", r"bar\.sync\s[^;]*;"),
    _delete("bar.warp.sync", rf"bar\.warp\.sync{_REST}"),
    _delete("barrier.cluster", r"barrier\.cluster\.arrive\S*;\s*barrier\.cluster\.wait\S*;"),
    _delete("barrier.cluster.arrive", r"barrier\.cluster\.arrive\S*;"),
    _delete("barrier.cluster.wait", r"barrier\.cluster\.wait\S*;"),
    _delete("mbarrier.init", rf"mbarrier\.init{_REST}"),
    _delete("mbarrier.arrive", rf"mbarrier\.arrive{_REST}"),
    Rule("delete mbarrier.try_wait", rf"mbarrier\.try_wait\S+ p, {_REST}", "setp.eq.b32 p, 0, 0;"),
    _delete("tcgen05.commit", rf"tcgen05\.commit{_REST}"),
    _delete("tcgen05.wait::ld", r"tcgen05\.wait::ld\S*;"),
    _delete("wgmma.commit_group", r"wgmma\.commit_group\S*;"),
    _delete("wgmma.wait_group", rf"wgmma\.wait_group{_REST}"),
    _delete("cp.async.bulk.commit_group", r"cp\.async\.bulk\.commit_group;"),
    _delete("cp.async.bulk.wait_group", rf"cp\.async\.bulk\.wait_group{_REST}"),
    Rule("wgmma.wait_group n + 1", r"(wgmma\.wait_group\S+) 0;", r"\1 1;"),
    Rule("wgmma.wait_group n + 1", r"(wgmma\.wait_group\S+) 1;", r"\1 2;"),
    Rule("cp.async.bulk.wait_group n + 1", r"(cp\.async\.bulk\.wait_group\S*) 0;", r"\1 1;"),
    Rule("cp.async.bulk.wait_group n + 1", r"(cp\.async\.bulk\.wait_group\S*) 1;", r"\1 2;"),
    Rule(
        "arrive relaxed",
        r"mbarrier\.arrive\.release(\.cluster[^;]*;)",
        r"mbarrier.arrive.relaxed\1",
    ),
    # --- what they wait for ---
    _operand("parity flipped", rf"mbarrier\.try_wait\S+ p, \[{_R}\], ", _R, ";", "xor 1"),
    _operand(
        "waits at the next mbarrier", r"mbarrier\.try_wait\S+ p, \[", _R, rf"\]{_REST}", "add 8"
    ),
    _operand(
        "arrives at the next mbarrier",
        r"mbarrier\.arrive\S+ _, \[",
        r"%r\d+|there",
        rf"\]{_REST}",
        "add 8",
    ),
    _operand("commits to the next mbarrier", r"tcgen05\.commit\S+ \[", _R, rf"\]{_REST}", "add 8"),
    _operand(
        "tells the next mbarrier",
        r"cp\.async\.bulk\S+ \[%r\d+\], [^;]*\[",
        _R,
        r"\](?:, %rs\d+)?;",
        "add 8",
    ),
    *(
        _operand(
            f"expect_tx {change}", rf"mbarrier\.arrive\.expect_tx\S+ _, \[{_R}\], ", _R, ";", change
        )
        for change in ("add 16", "sub 16", "and 0")
    ),
    *(
        _operand(f"mbarrier.init count {change}", rf"mbarrier\.init\S+ \[{_R}\], ", _R, ";", change)
        for change in ("add 1", "sub 1")
    ),
    _operand("mapa of another rank", rf"mapa\S+ there, {_R}, ", _R, ";", "xor 1"),
    # --- copies ---
    _delete("copy", rf"cp\.async\.bulk\.(?:tensor|shared){_REST}"),
    _operand("x + 8", _TILE, _R, r", [^;]*;", "add 8"),
    _operand("y + 8", rf"{_TILE}{_R}, ", _R, r"\}[^;]*;", "add 8"),
    _operand(
        "copies 16 bytes less",
        r"cp\.async\.bulk\.shared\S+ \[%r\d+\], \[%rd\d+\], ",
        _R,
        r", [^;]*;",
        "sub 16",
    ),
    _operand(
        "lands 128 bytes further",
        r"cp\.async\.bulk\.(?:tensor|shared)\S+ \[",
        _R,
        r"\], [^;]*;",
        "add 128",
    ),
    _operand(
        "stores from 128 bytes further",
        r"cp\.async\.bulk\.tensor\S+ \[%rd\d+, [^;]*\}\], \[",
        _R,
        r"\];",
        "add 128",
    ),
    *(
        _operand(
            f"CTA mask xor {bit}",
            r"(?:cp|tcgen05)[^;]*multicast::cluster[^;]* ",
            _RS,
            ";",
            f"xor {bit}",
            "16",
        )
        for bit in (1, 2)
    ),
    Rule(
        "copy without cta_group::2", r"(cp\.async\.bulk\.tensor\.2d)\.cta_group::2([^;]*;)", r"\1\2"
    ),
    # --- tensor cores ---
    _delete("tcgen05.alloc", rf"tcgen05\.alloc{_REST}"),
    _delete("tcgen05.dealloc", rf"tcgen05\.dealloc{_REST}"),
    _delete("tcgen05.cp", rf"tcgen05\.cp{_REST}"),
    _delete("tcgen05.mma", rf"tcgen05\.mma{_REST}"),
    _delete("wgmma.mma_async", rf"wgmma\.mma_async{_REST}"),
    _operand("tcgen05.alloc of half", r"tcgen05\.alloc\S+ \[%r\d+\], ", _R, ";", "shr 1"),
    *_bits("A of tcgen05.mma", _MMA, _RD, rf", {_REST}", "64", _MATRIX),
    *_bits("B of tcgen05.mma", rf"{_MMA}{_RD}, ", _RD, rf", {_REST}", "64", _MATRIX),
    *_bits("idesc", rf"{_MMA}{_RD}, {_RD}, ", _R, rf", {_REST}", "32", _SHAPE),
    *_bits("source of tcgen05.cp", _CP, _RD, ";", "64", _MATRIX),
    Rule("A and B swapped", rf"({_MMA})({_RD}), ({_RD})({_REST})", r"\1\3, \2\4"),
    Rule("scales swapped", rf"({_MMA}[^;]*)(\[{_R}\]), (\[{_R}\])({_REST})", r"\1\3, \2\4"),
    _operand("D one column further", r"tcgen05\.mma\S+ \[", _R, rf"\]{_REST}", "add 1"),
    _operand("scale_A a column further", rf"{_MMA}[^;\[]*\[", _R, rf"\]{_REST}", "add 1"),
    _operand("scale_B a column further", rf"{_MMA}[^;\[]*\[{_R}\], \[", _R, rf"\]{_REST}", "add 1"),
    _operand("tcgen05.cp a column further", r"tcgen05\.cp\S+ \[", _R, rf"\]{_REST}", "add 1"),
    _operand("tcgen05.ld a column further", r"tcgen05\.ld[^;]*\[", _R, r"\];", "add 1"),
    _operand("tcgen05.ld 32 lanes further", r"tcgen05\.ld[^;]*\[", _R, r"\];", "add 0x200000"),
    Rule("tcgen05.mma always accumulates", rf"(tcgen05\.mma{_REST})", r"setp.eq.b32 p, 0, 0; \1"),
    Rule("tcgen05.mma never accumulates", rf"(tcgen05\.mma{_REST})", r"setp.ne.b32 p, 0, 0; \1"),
    *_bits("A of wgmma", _WGMMA, _RD, rf", {_REST}", "64", _WGMMA_MATRIX),
    *_bits(
        "B of wgmma",
        rf"{_WGMMA}{_RD}, ",
        _RD,
        rf", {_REST}",
        "64",
        {**_WGMMA_MATRIX, "leading offset": 22},
    ),
    Rule("wgmma: A transposed", rf"({_WGMMA}[^;]*), 0, 1;", r"\1, 1, 1;"),
    Rule("wgmma: B not transposed", rf"({_WGMMA}[^;]*), 0, 1;", r"\1, 0, 0;"),
    Rule("wgmma: A negated", rf"({_WGMMA}[^;]*), p, 1,([^;]*;)", r"\1, p, -1,\2"),
    Rule("wgmma always accumulates", rf"({_WGMMA}{_REST})", r"setp.eq.b32 p, 0, 0; \1"),
    Rule("wgmma never accumulates", rf"({_WGMMA}{_REST})", r"setp.ne.b32 p, 0, 0; \1"),
]

_ASK = r"clusterlaunchcontrol\.try_cancel\S+ "

#: What only the products for Blackwell have.
PRODUCT_RULES = [
    # --- tiles of clusters that are cancelled ---
    _delete("try_cancel", rf"{_ASK}[^;]*;"),
    _operand("answer 16 bytes further", rf"{_ASK}\[", _R, r"\], [^;]*;", "add 16"),
    _operand("answer tells the next mbarrier", rf"{_ASK}\[%r\d+\], \[", _R, r"\];", "add 8"),
    Rule("answer to one CTA", r"(clusterlaunchcontrol\S+)\.multicast::cluster::all", r"\1"),
    _operand("reads the next answer", r"ld\.shared\.b128 q, \[", _R, r"\];", "add 16"),
    Rule("never the last tile", r"(is_canceled\.pred\.b128 p, q;)", r"\1 setp.eq.b32 p, 0, 0;"),
    Rule("always the last tile", r"(is_canceled\.pred\.b128 p, q;)", r"\1 setp.ne.b32 p, 0, 0;"),
    Rule("y of the answer", r"get_first_ctaid::x", "get_first_ctaid::y"),
    Rule("CTA for cluster", r"@p div\.u32 x, x, (?!1;)\d+;", ""),
    # --- pairs of CTAs ---
    Rule("barrier of the odd CTA", r"(and\.b32 %r\d+, %r\d+,) -16777217;", r"\1 -1;"),
    Rule(
        "commits to one CTA",
        r"(tcgen05\.commit\S+)\.multicast::cluster(\S* [^;]*), %rs\d+;",
        r"\1\2;",
    ),
    Rule("MMA of one CTA", r"(tcgen05\.mma)\.cta_group::2", r"\1.cta_group::1"),
    Rule("tcgen05.cp of one CTA", r"(tcgen05\.cp)\.cta_group::2", r"\1.cta_group::1"),
    # --- the epilogue ---
    _delete("st.shared", r"st\.shared\.v4\S+ [^;]*;"),
    _operand("st.shared 16 bytes further", r"st\.shared\.v4\S+ \[", _R, r"\], [^;]*;", "add 16"),
    Rule("halves swapped", r"(cvt\.rn\.\w+x2\.f32 %r\d+), (%r\d+), (%r\d+);", r"\1, \3, \2;"),
    Rule("cut, not rounded", r"(cvt)\.rn(\.\w+x2\.f32)", r"\1.rz\2"),
    Rule("not scaled", r"mul\.rn\.f32 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;"),
    Rule("not added", r"add\.rn\.f32 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;"),
    Rule("stores, does not add", r"cp\.reduce(\.async\.bulk\.tensor\S+)\.add(\S*)", r"cp\1\2"),
    _delete("cp.reduce", rf"cp\.reduce\.async\.bulk{_REST}"),
    Rule("outside, too", r"setp\.ne\.b32 p, %r\d+, 0;( mov\.b32 %r)", r"setp.eq.b32 p, 0, 0;\1"),
]
