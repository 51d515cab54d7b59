// D = A B^T in MXFP8 on one CTA: A (M, K) and B (N, K) e4m3, a ue8m0 scale for each 32 along K,
// D (M, N) bf16. Persistent: one warp loads, one multiplies, four store; two accumulators.
#include "tcgen05.cuh"

constexpr u32 ROWS = 128, COLUMNS = 64, DEPTH = 128;  // of a tile; DEPTH in elements = bytes
constexpr u32 STAGES = 3, ACCUMULATORS = 2, STEPS = DEPTH / 32;
constexpr u32 SCALES = 512;                  // bytes of 128 x 4 scales
constexpr u32 TMEM = 256, SFA = 128, SFB = 132;  // columns: allocated, and where scales start

struct Stage {
  u8 a[ROWS * DEPTH], b[COLUMNS * DEPTH], sfa[SCALES], sfb[SCALES];
};
struct alignas(1024) Shared {
  Stage stage[STAGES];
  alignas(1024) u8 out[ROWS * COLUMNS * 2];
  u64 full[STAGES], empty[STAGES], ready[ACCUMULATORS], freed[ACCUMULATORS];
  u32 columns;
};

__device__ void load(Shared& s, const TensorMap* a, const TensorMap* b, const u8* sfa,
                     const u8* sfb, u32 tiles, u32 depths) {
  u32 turn = 0;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
    for (u32 k = 0; k < depths; ++k, ++turn) {
      u32 at = turn % STAGES, full = offset_of(&s.full[at]);
      Stage& stage = s.stage[at];
      wait(offset_of(&s.empty[at]), turn / STAGES & 1 ^ 1);
      expect(full, sizeof(Stage));
      load_tile(offset_of(stage.a), a, k * DEPTH, 0, full);
      load_tile(offset_of(stage.b), b, k * DEPTH, tile * COLUMNS, full);
      load_bulk(offset_of(stage.sfa), sfa + k * SCALES, SCALES, full);
      load_bulk(offset_of(stage.sfb), sfb + (tile * depths + k) * SCALES, SCALES, full);
    }
  }
}

__device__ void multiply(Shared& s, u32 tmem, u32 tiles, u32 depths) {
  // e4m3 times e4m3, ue8m0 scales; the ids of the scales are added below
  constexpr u32 SHAPE = COLUMNS / 8 << 17 | 1 << 23 | ROWS / 128 << 27;
  u32 turn = 0, done = 0;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++done) {
    u32 to = done % ACCUMULATORS;
    wait(offset_of(&s.freed[to]), done / ACCUMULATORS & 1 ^ 1);
    after_sync();
#pragma unroll 1
    for (u32 k = 0; k < depths; ++k, ++turn) {
      u32 at = turn % STAGES;
      Stage& stage = s.stage[at];
      wait(offset_of(&s.full[at]), turn / STAGES & 1);
      after_sync();
      copy_scales<1>(tmem + SFA, scale_tile(offset_of(stage.sfa)));
      copy_scales<1>(tmem + SFB, scale_tile(offset_of(stage.sfb)));
#pragma unroll 1
      for (u32 step = 0; step < STEPS; ++step)
        mma_mxfp8(tmem + to * COLUMNS, operand_tile(offset_of(stage.a) + 32 * step),
                  operand_tile(offset_of(stage.b) + 32 * step), SHAPE | step << 4 | step << 29,
                  tmem + SFA, tmem + SFB, k | step);
      commit(offset_of(&s.empty[at]));
    }
    commit(offset_of(&s.ready[to]));
  }
}

__device__ void store(Shared& s, u32 tmem, const TensorMap* d, u32 tiles) {
  u32 lane = threadIdx.x % 128 / 32 * 32, row = threadIdx.x % 128, done = 0;
  bool first = row == 0;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++done) {
    u32 from = done % ACCUMULATORS;
    wait(offset_of(&s.ready[from]), done / ACCUMULATORS & 1);
    after_sync();
    if (first) wait_stores_read<0>();
    meet(1, 128);
    u32 columns = tmem + (lane << 16) + from * COLUMNS;
#pragma unroll 1
    for (u32 half = 0; half < COLUMNS / 32; ++half) {
      u32 x[32];
      load_columns(x, columns + 32 * half);
      wait_load();
      store_columns(offset_of(s.out), row, 4 * half, x);
    }
    before_sync();
    arrive(offset_of(&s.freed[from]));
    fence_async();
    meet(1, 128);
    if (first) {
      store_tile(d, tile * COLUMNS, 0, offset_of(s.out));
      commit_stores();
    }
  }
  if (first) wait_stores<0>();
}

extern "C" __global__ void __launch_bounds__(192)
    gemm_mxfp8(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const u8* sfa, const u8* sfb, const __grid_constant__ TensorMap d, u32 tiles,
               u32 depths) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32 warp = threadIdx.x / 32;
  if (warp == 0 && elect()) {
#pragma unroll 1
    for (u32 i = 0; i < STAGES; ++i) {
      mbarrier_init(offset_of(&s.full[i]), 1);
      mbarrier_init(offset_of(&s.empty[i]), 1);
    }
#pragma unroll 1
    for (u32 i = 0; i < ACCUMULATORS; ++i) {
      mbarrier_init(offset_of(&s.ready[i]), 1);
      mbarrier_init(offset_of(&s.freed[i]), 128);
    }
    fence_mbarrier_init();
  }
  if (warp == 1) {
    allocate<1>(offset_of(&s.columns), TMEM);
    relinquish<1>();
  }
  __syncthreads();
  u32 tmem = s.columns;
  if (warp == 0) {
    if (elect()) load(s, &a, &b, sfa, sfb, tiles, depths);
  } else if (warp == 1) {
    if (elect()) multiply(s, tmem, tiles, depths);
  } else {
    store(s, tmem, &d, tiles);
  }
  __syncthreads();
  if (warp == 1) deallocate<1>(tmem, TMEM);
}
