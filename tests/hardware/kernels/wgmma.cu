// wgmma: tiles of 64 x 128 a warpgroup, K in steps of 128 bytes; one kernel for each kind.
#include "common.cuh"

// --- tiles in shared memory -----------------------------------------------------------------------

// Rows of 128 bytes in 128-byte swizzle: K-major A and B.
DEVICE void load_rows(uint8_t* tile, const uint8_t* from, int rows, int pitch) {
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
    int row = i / 8, chunk = i % 8;
    *reinterpret_cast<uint4*>(tile + row * 128 + ((chunk ^ row % 8) * 16)) =
        *reinterpret_cast<const uint4*>(from + (size_t)row * pitch + chunk * 16);
  }
}

// 64 rows of K, each 128 elements of two bytes: two columns of swizzled atoms (64 elements x 8 rows).
DEVICE void load_columns(uint8_t* tile, const uint8_t* from) {
  for (int i = threadIdx.x; i < 64 * 16; i += blockDim.x) {
    int k = i / 16, chunk = i % 16, atom = chunk / 8 * 8 + k / 8;
    *reinterpret_cast<uint4*>(tile + atom * 1024 + k % 8 * 128 + ((chunk % 8 ^ k % 8) * 16)) =
        *reinterpret_cast<const uint4*>(from + k * 256 + chunk * 16);
  }
}

// Matrix descriptor: address, leading and stride byte offsets in units of 16, 128-byte swizzle.
DEVICE uint64_t describe(const uint8_t* at, int leading, int stride) {
  return (uint64_t)(address(at) >> 4 & 0x3FFF) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
         (uint64_t)1 << 62;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// --- the instructions -----------------------------------------------------------------------------

#define REGISTERS32                                                                                          \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
  "%28,%29,%30,%31"
#define REGISTERS64                                                                                          \
  REGISTERS32                                                                                                \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define FOUR(C, d, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define SIXTEEN(C, d, i) FOUR(C, d, i), FOUR(C, d, i + 4), FOUR(C, d, i + 8), FOUR(C, d, i + 12)
#define ALL32(C, d) SIXTEEN(C, d, 0), SIXTEEN(C, d, 16)
#define ALL64(C, d) ALL32(C, d), SIXTEEN(C, d, 32), SIXTEEN(C, d, 48)

// NAME(d, a, b, accumulate): A from shared memory; NAME##_rs: from registers.
// TAIL: immediate operands behind scale-d; P, A0..A3, B: numbers of the operands.
#define WGMMA(NAME, SHAPE, LIST, EACH, C, T, TAIL, TAIL_RS, A, B, P, R0, R1, R2, R3, RB, RP)                        \
  DEVICE void NAME(T* d, uint64_t a, uint64_t b, int accumulate) {                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned." SHAPE " " LIST "}, " A    \
                 ", " B ", p" TAIL "; }"                                                                            \
                 : EACH(C, d) : "l"(a), "l"(b), "r"(accumulate));                                                   \
  }                                                                                                                 \
  DEVICE void NAME##_rs(T* d, const uint32_t* a, uint64_t b, int accumulate) {                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " RP ", 0; wgmma.mma_async.sync.aligned." SHAPE " " LIST "}, {" R0 \
                 "," R1 "," R2 "," R3 "}, " RB ", p" TAIL_RS "; }"                                                  \
                 : EACH(C, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));               \
  }
#define WGMMA_F32(NAME, SHAPE, TAIL, TAIL_RS)                                                                       \
  WGMMA(NAME, SHAPE, REGISTERS64, ALL64, "+f", float, TAIL, TAIL_RS, "%64", "%65", "%66", "%64", "%65", "%66",      \
        "%67", "%68", "%69")
#define WGMMA_F16(NAME, SHAPE, TAIL, TAIL_RS)                                                                       \
  WGMMA(NAME, SHAPE, REGISTERS32, ALL32, "+r", uint32_t, TAIL, TAIL_RS, "%32", "%33", "%34", "%32", "%33", "%34",   \
        "%35", "%36", "%37")

WGMMA_F32(bf16_f32, "m64n128k16.f32.bf16.bf16", ",1,1,0,0", ",1,1,0")
WGMMA_F32(bf16_f32_negated, "m64n128k16.f32.bf16.bf16", ",-1,1,0,0", ",-1,1,0")
WGMMA_F32(bf16_f32_columns, "m64n128k16.f32.bf16.bf16", ",1,1,0,1", ",1,-1,1")
WGMMA_F32(f16_f32, "m64n128k16.f32.f16.f16", ",1,-1,0,0", ",1,1,0")
WGMMA_F16(f16_f16, "m64n128k16.f16.f16.f16", ",1,1,0,0", ",1,1,0")
WGMMA_F32(tf32_f32, "m64n128k8.f32.tf32.tf32", ",1,1", ",1,1")
WGMMA_F32(e4m3_f32, "m64n128k32.f32.e4m3.e4m3", ",1,1", ",1,1")
WGMMA_F16(e4m3_f16, "m64n128k32.f16.e4m3.e4m3", ",1,1", ",1,1")
WGMMA_F32(e5m2_f32, "m64n128k32.f32.e5m2.e5m2", ",-1,-1", ",1,1")
WGMMA_F32(e4m3_e5m2_f32, "m64n128k32.f32.e4m3.e5m2", ",1,1", ",1,1")
WGMMA_F32(e5m2_e4m3_f32, "m64n128k32.f32.e5m2.e4m3", ",1,1", ",1,1")

// --- kernels --------------------------------------------------------------------------------------

// D (rows x 128) = A (rows x K bytes) B + D if ``start``; a warpgroup takes 64 rows. B has K-major rows
// (128 x K bytes) or, by columns, rows of 256 bytes (K elements of them).
template <typename T, int REGISTERS, bool COLUMNS, bool FROM_REGISTERS, typename F>
DEVICE void tile(const uint8_t* a, const uint8_t* b, T* d, int pitch, int start, F multiply) {
  int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32, rows = blockDim.x / 2;
  uint8_t *tile_a = dynamic, *tile_b = dynamic + rows * 128;
  T sums[REGISTERS];
  for (int i = 0; i < REGISTERS; ++i) sums[i] = start ? d[threadIdx.x * REGISTERS + i] : T(0);
  for (int at = 0; at < pitch; at += 128) {
    __syncthreads();
    load_rows(tile_a, a + at, rows, pitch);
    if (COLUMNS) load_columns(tile_b, b + at / 2 * 256);
    else load_rows(tile_b, b + at, 128, pitch);
    fence_async();
    __syncthreads();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint64_t from = COLUMNS ? describe(tile_b + k * 2048, 8192, 1024) : describe(tile_b + k * 32, 16, 1024);
      int accumulate = start || at || k;
      if constexpr (FROM_REGISTERS) {
        // Two rows, eight apart, of two words, sixteen bytes apart.
        const uint8_t* own = a + (size_t)(group * 64 + thread / 32 * 16 + lane / 4) * pitch + at + k * 32 + lane % 4 * 4;
        uint32_t words[4];
        for (int i = 0; i < 4; ++i) words[i] = *reinterpret_cast<const uint32_t*>(own + i % 2 * 8 * pitch + i / 2 * 16);
        wgmma_fence();
        multiply(sums, words, from, accumulate);
        wgmma_commit();
        wgmma_wait();
      } else {
        multiply(sums, describe(tile_a + group * 8192 + k * 32, 16, 1024), from, accumulate);
      }
    }
    wgmma_commit();
    wgmma_wait();
  }
  for (int i = 0; i < REGISTERS; ++i) d[threadIdx.x * REGISTERS + i] = sums[i];
}

#define KERNELS(KIND, T, COUNT, COLUMNS)                                                                        \
  KERNEL __launch_bounds__(256) KIND##_shared(const uint8_t* a, const uint8_t* b, T* d, int pitch, int start) { \
    tile<T, COUNT, COLUMNS, false>(a, b, d, pitch, start,                                                       \
                                   [](T* d, uint64_t a, uint64_t b, int go) { KIND(d, a, b, go); });            \
  }                                                                                                             \
  KERNEL __launch_bounds__(256) KIND##_registers(const uint8_t* a, const uint8_t* b, T* d, int pitch, int start) { \
    tile<T, COUNT, COLUMNS, true>(a, b, d, pitch, start,                                                        \
                                  [](T* d, const uint32_t* a, uint64_t b, int go) { KIND##_rs(d, a, b, go); }); \
  }
KERNELS(bf16_f32, float, 64, false)
KERNELS(bf16_f32_negated, float, 64, false)
KERNELS(bf16_f32_columns, float, 64, true)
KERNELS(f16_f32, float, 64, false)
KERNELS(f16_f16, uint32_t, 32, false)
KERNELS(tf32_f32, float, 64, false)
KERNELS(e4m3_f32, float, 64, false)
KERNELS(e4m3_f16, uint32_t, 32, false)
KERNELS(e5m2_f32, float, 64, false)
KERNELS(e4m3_e5m2_f32, float, 64, false)
KERNELS(e5m2_e4m3_f32, float, 64, false)
