// Rows of bf16 (M, K) to MXFP8: e4m3 (M, K), and for each 32 along K a ue8m0 scale, rounded up, in
// tiles of 128 x 4. One thread a row of a 128 x 128 tile; tiles are loaded ahead and stored behind.
#include "ptx.cuh"

constexpr u32 ROWS = 128, COLUMNS = 128, BUFFERS = 2;  // of a tile
constexpr u32 HALF = ROWS * 128;                       // bytes of 64 columns of bf16
constexpr u32 SCALES = 512;

struct alignas(1024) Shared {
  u8 in[BUFFERS][2][HALF];
  u8 out[BUFFERS][ROWS * COLUMNS];
  u64 full[BUFFERS];
};

__device__ __forceinline__ void fetch(Shared& s, const TensorMap* in, u32 tile, u32 turn) {
  u32 at = turn % BUFFERS, full = offset_of(&s.full[at]);
  expect(full, sizeof(s.in[at]));
  load_tile(offset_of(s.in[at][0]), in, tile * COLUMNS, blockIdx.y * ROWS, full);
  load_tile(offset_of(s.in[at][1]), in, tile * COLUMNS + 64, blockIdx.y * ROWS, full);
}

__device__ __forceinline__ u32 low(u32 pair) { return pair << 16; }
__device__ __forceinline__ u32 high(u32 pair) { return pair & 0xffff0000; }

// Biased exponent of the smallest power of two that is at least largest / 448; 255 for NaN and
// infinity. 448 is 1.75 * 2^8.
__device__ __forceinline__ u32 scale_of(u32 largest) {
  if (largest >= 0x7f800000) return 255;
  u32 exponent = largest + 0x1fffff >> 23;
  return exponent < 8 ? 0 : exponent - 8;
}

// Four e4m3 of two pairs of bf16, each times `by`.
__device__ __forceinline__ u32 convert(u32 first, u32 second, float by) {
  u16 a, b;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(a)
      : "f"(__uint_as_float(high(first)) * by), "f"(__uint_as_float(low(first)) * by));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(b)
      : "f"(__uint_as_float(high(second)) * by), "f"(__uint_as_float(low(second)) * by));
  return a | b << 16;
}

extern "C" __global__ void __launch_bounds__(128)
    quantize(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out,
             u32* scales, u32 tiles) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32 row = threadIdx.x;
  if (row == 0) {
#pragma unroll 1
    for (u32 i = 0; i < BUFFERS; ++i) mbarrier_init(offset_of(&s.full[i]), 1);
    fence_async();
#pragma unroll 1
    for (u32 i = 0; i < BUFFERS && i < tiles; ++i) fetch(s, &in, i, i);
  }
#pragma unroll 1
  for (u32 tile = 0; tile < tiles; ++tile) {
    u32 at = tile % BUFFERS;
    if (row == 0) wait_stores_read<BUFFERS - 1>();
    __syncthreads();
    wait(offset_of(&s.full[at]), tile / BUFFERS & 1);
    u32 word = 0;
#pragma unroll 1
    for (u32 block = 0; block < 4; ++block) {
      u32 x[4][4], largest = 0;
      u32 from = offset_of(s.in[at][block / 2]);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        load16(from + swizzled(row, block % 2 * 4 + i), x[i]);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          largest = max(largest, low(x[i][j]) & 0x7fffffff);
          largest = max(largest, high(x[i][j]) & 0x7fffffff);
        }
      }
      u32 scale = scale_of(largest);
      word |= scale << 8 * block;
      // 2^-(scale - 127); of 255 a NaN
      float by = __uint_as_float(scale == 255 ? 0x7fffffff : 254 - scale << 23);
#pragma unroll
      for (u32 i = 0; i < 2; ++i)
        store16(offset_of(s.out[at]) + swizzled(row, 2 * block + i),
                convert(x[2 * i][0], x[2 * i][1], by), convert(x[2 * i][2], x[2 * i][3], by),
                convert(x[2 * i + 1][0], x[2 * i + 1][1], by),
                convert(x[2 * i + 1][2], x[2 * i + 1][3], by));
    }
    scales[(blockIdx.y * tiles + tile) * (SCALES / 4) + row % 32 * 4 + row / 32] = word;
    fence_async();
    __syncthreads();
    if (row == 0) {
      store_tile(&out, tile * COLUMNS, blockIdx.y * ROWS, offset_of(s.out[at]));
      commit_stores();
      if (tile + BUFFERS < tiles) fetch(s, &in, tile + BUFFERS, tile + BUFFERS);
    }
  }
  if (row == 0) wait_stores<0>();
}
