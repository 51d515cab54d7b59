// D = A B^T in NVFP4 on pairs of CTAs: A (M, K) and B (N, K) e2m1, a ue4m3 scale for each 16 along
// K, D (M, N) bf16. A pair works on 256 rows: each CTA loads its half of A and of B, and half of the
// scales of B for both. The even CTA multiplies; each stores its own rows. Persistent.
#include "tcgen05.cuh"

constexpr u32 ROWS = 256, COLUMNS = 128, DEPTH = 256;  // of a tile of the pair; DEPTH in elements
constexpr u32 BYTES = DEPTH / 2;                       // of a row
constexpr u32 STAGES = 2, ACCUMULATORS = 2, STEPS = DEPTH / 64;
constexpr u32 SCALES = 512;  // bytes of 128 x 4 scales: one step
constexpr u32 TMEM = 512, SFA = 256, SFB = 272;  // columns: allocated, and where scales start
constexpr u32 BOTH = 3;                          // mask of the CTAs
constexpr u32 EVEN = 0xfeffffff;                 // clears the lowest bit of the rank in an address

struct Stage {
  u8 a[ROWS / 2 * BYTES], b[COLUMNS / 2 * BYTES], sfa[STEPS * SCALES], sfb[STEPS * SCALES];
};
struct alignas(1024) Shared {
  Stage stage[STAGES];
  u8 out[2][128 * 128];
  u64 full[STAGES], empty[STAGES], ready[ACCUMULATORS], freed[ACCUMULATORS];
  u32 columns;
};

// Bytes are counted by the barrier of the even CTA.
__device__ __forceinline__ void load_pair(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier & EVEN)
      : "memory");
}

__device__ __forceinline__ void load_pair_multicast(u32 to, const TensorMap* map, int x, int y,
                                                    u32 barrier, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier & EVEN), "h"(ctas)
      : "memory");
}

__device__ void load(Shared& s, u32 rank, const TensorMap* a, const TensorMap* b,
                     const TensorMap* sfa, const TensorMap* sfb, u32 tiles, u32 depths) {
  u32 turn = 0;
#pragma unroll 1
  for (u32 tile = 0; tile < tiles; ++tile) {
#pragma unroll 1
    for (u32 k = 0; k < depths; ++k, ++turn) {
      u32 at = turn % STAGES, full = offset_of(&s.full[at]);
      Stage& stage = s.stage[at];
      wait_cluster(offset_of(&s.empty[at]), turn / STAGES & 1 ^ 1);
      if (rank == 0) expect(full, 2 * sizeof(Stage));
      load_pair(offset_of(stage.a), a, k * DEPTH, rank * ROWS / 2, full);
      load_pair(offset_of(stage.b), b, k * DEPTH, tile * COLUMNS + rank * COLUMNS / 2, full);
      load_pair(offset_of(stage.sfa), sfa, 0, (rank * depths + k) * STEPS, full);
      load_pair_multicast(offset_of(stage.sfb) + rank * sizeof(stage.sfb) / 2, sfb, 0,
                          (tile * depths + k) * STEPS + rank * STEPS / 2, full, BOTH);
    }
  }
}

__device__ void multiply(Shared& s, u32 tmem, u32 tiles, u32 depths) {
  constexpr u32 SHAPE = 1 << 7 | 1 << 10 | COLUMNS / 8 << 17 | ROWS / 128 << 27;  // e2m1, ue4m3
  u32 turn = 0;
#pragma unroll 1
  for (u32 tile = 0; tile < tiles; ++tile) {
    u32 to = tile % ACCUMULATORS;
    wait_cluster(offset_of(&s.freed[to]), tile / ACCUMULATORS & 1 ^ 1);
    after_sync();
#pragma unroll 1
    for (u32 k = 0; k < depths; ++k, ++turn) {
      u32 at = turn % STAGES;
      Stage& stage = s.stage[at];
      wait_cluster(offset_of(&s.full[at]), turn / STAGES & 1);
      after_sync();
#pragma unroll 1
      for (u32 step = 0; step < STEPS; ++step) {
        copy_scales<2>(tmem + SFA + 4 * step, scale_tile(offset_of(stage.sfa) + SCALES * step));
        copy_scales<2>(tmem + SFB + 4 * step, scale_tile(offset_of(stage.sfb) + SCALES * step));
        mma_nvfp4_pair(tmem + to * COLUMNS, operand_tile(offset_of(stage.a) + 32 * step),
                       operand_tile(offset_of(stage.b) + 32 * step), SHAPE, tmem + SFA + 4 * step,
                       tmem + SFB + 4 * step, k | step);
      }
      commit_pair(offset_of(&s.empty[at]), BOTH);
    }
    commit_pair(offset_of(&s.ready[to]), BOTH);
  }
}

__device__ void store(Shared& s, u32 rank, u32 tmem, const TensorMap* d, u32 tiles) {
  u32 row = threadIdx.x % 128;
  bool first = row == 0;
#pragma unroll 1
  for (u32 tile = 0; tile < tiles; ++tile) {
    u32 from = tile % ACCUMULATORS;
    wait_cluster(offset_of(&s.ready[from]), tile / ACCUMULATORS & 1);
    after_sync();
    u32 columns = tmem + (row / 32 * 32 << 16) + from * COLUMNS;
#pragma unroll 1
    for (u32 part = 0; part < COLUMNS / 64; ++part) {
      // The part was stored from the same place for the tile before.
      if (first) wait_stores_read<1>();
      meet(1, 128);
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
        u32 x[32];
        load_columns(x, columns + 64 * part + 32 * half);
        wait_load();
        store_columns(offset_of(s.out[part]), row, 4 * half, x);
      }
      if (part == COLUMNS / 64 - 1) {
        before_sync();
        __syncwarp();
        if (row % 32 == 0) arrive_at(offset_of(&s.freed[from]), 0);
      }
      fence_async();
      meet(1, 128);
      if (first) {
        store_tile(d, tile * COLUMNS + 64 * part, rank * ROWS / 2, offset_of(s.out[part]));
        commit_stores();
      }
    }
  }
  if (first) wait_stores<0>();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192)
    gemm_nvfp4(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap sfa, const __grid_constant__ TensorMap sfb,
               const __grid_constant__ TensorMap d, u32 tiles, u32 depths) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32 warp = threadIdx.x / 32, rank = cluster_rank();
  if (warp == 0 && elect()) {
#pragma unroll 1
    for (u32 i = 0; i < STAGES; ++i) {
      mbarrier_init(offset_of(&s.full[i]), 1);
      mbarrier_init(offset_of(&s.empty[i]), 1);
    }
#pragma unroll 1
    for (u32 i = 0; i < ACCUMULATORS; ++i) {
      mbarrier_init(offset_of(&s.ready[i]), 1);
      mbarrier_init(offset_of(&s.freed[i]), 8);
    }
    fence_mbarrier_init();
  }
  if (warp == 1) {
    allocate<2>(offset_of(&s.columns), TMEM);
    relinquish<2>();
  }
  __syncthreads();
  meet_cluster_relaxed();
  u32 tmem = s.columns;
  if (warp == 0) {
    if (elect()) load(s, rank, &a, &b, &sfa, &sfb, tiles, depths);
  } else if (warp == 1) {
    if (rank == 0 && elect()) multiply(s, tmem, tiles, depths);
  } else {
    store(s, rank, tmem, &d, tiles);
  }
  meet_cluster();
  if (warp == 1) deallocate<2>(tmem, TMEM);
}
