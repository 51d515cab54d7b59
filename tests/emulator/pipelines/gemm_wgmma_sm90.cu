// D = A B in bf16: A (M, K) and B (K, N) row by row, D (M, N). A cluster of two CTAs shares the
// columns of B: each loads half of them for both. One warpgroup loads, two multiply 64 rows each.
#include "ptx.cuh"

constexpr u32 ROWS = 128, COLUMNS = 128, DEPTH = 64;  // of a tile
constexpr u32 STAGES = 4, STEPS = DEPTH / 16;
constexpr u32 PANEL = DEPTH * 128;  // bytes of 64 columns of B
constexpr u32 BOTH = 3;             // mask of the CTAs

struct Stage {
  u8 a[ROWS * DEPTH * 2], b[2][PANEL];
};
struct alignas(1024) Shared {
  Stage stage[STAGES];
  u8 out[2][2][64 * 128];  // of each warpgroup, 64 rows of 64 columns
  u64 full[STAGES], empty[STAGES];
};

// Bits 0-13 start / 16, 16-29 leading / 16, 32-45 stride / 16, 62-63 swizzle: 128B.
__device__ __forceinline__ u64 matrix(u32 start, u32 leading, u32 stride) {
  return u64(start >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}

#define RW8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), \
                  "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])

// 64 x 128 += 64 x 16 times 16 x 128; B lies row by row.
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, bool add) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 1;\n\t}"
      : RW8(d, 0), RW8(d, 8), RW8(d, 16), RW8(d, 24), RW8(d, 32), RW8(d, 40), RW8(d, 48), RW8(d, 56)
      : "l"(a), "l"(b), "r"(u32(add))
      : "memory");
}

__device__ __forceinline__ void fence_registers() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int left>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Four 8 x 8 matrices of bf16 of a warp; each lane names a row.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ void load(Shared& s, u32 rank, const TensorMap* a, const TensorMap* b, u32 depths) {
#pragma unroll 1
  for (u32 k = 0; k < depths; ++k) {
    u32 at = k % STAGES, full = offset_of(&s.full[at]);
    Stage& stage = s.stage[at];
    wait_cluster(offset_of(&s.empty[at]), k / STAGES & 1 ^ 1);
    expect(full, sizeof(Stage));
    load_tile(offset_of(stage.a), a, k * DEPTH, blockIdx.x * ROWS, full);
    load_tile_multicast(offset_of(stage.b[rank]), b, blockIdx.y * COLUMNS + 64 * rank, k * DEPTH,
                        full, BOTH);
  }
}

// The stage may be filled again, as far as this warpgroup is concerned: by either CTA.
__device__ __forceinline__ void release(Shared& s, u32 k) {
  if (threadIdx.x % 128 < 2) arrive_at(offset_of(&s.empty[k % STAGES]), threadIdx.x % 128);
}

__device__ void consume(Shared& s, const TensorMap* d, u32 depths) {
  u32 group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
  float sum[64];  // the first product does not add to it
#pragma unroll 1
  for (u32 k = 0; k < depths; ++k) {
    Stage& stage = s.stage[k % STAGES];
    wait(offset_of(&s.full[k % STAGES]), k / STAGES & 1);
    fence_registers();
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step)
      multiply(sum, matrix(offset_of(stage.a) + 64 * 128 * group + 32 * step, 16, 1024),
               matrix(offset_of(stage.b) + 16 * 128 * step, PANEL, 1024), k | step);
    commit_products();
    wait_products<1>();
    if (k) release(s, k - 1);
  }
  wait_products<0>();

  u32 row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    float* x = sum + 8 * i;
    store_matrices(offset_of(s.out[group][i / 4]) + swizzled(row, i % 4 * 2 + lane / 16),
                   pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                   pack_bf16(x[6], x[7]));
  }
  fence_async();
  meet(1 + group, 128);
  if (thread == 0) {
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half)
      store_tile(d, blockIdx.y * COLUMNS + 64 * half, blockIdx.x * ROWS + 64 * group,
                 offset_of(s.out[group][half]));
    commit_stores();
    wait_stores<0>();
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap d, u32 depths) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32 rank = cluster_rank();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (u32 i = 0; i < STAGES; ++i) {
      mbarrier_init(offset_of(&s.full[i]), 1);
      mbarrier_init(offset_of(&s.empty[i]), 4);
    }
    fence_mbarrier_init();
  }
  meet_cluster_relaxed();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) load(s, rank, &a, &b, depths);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(s, &d, depths);
  }
  meet_cluster();
}
