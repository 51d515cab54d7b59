// Inline PTX of the fifth-generation tensor cores; `group` is the number of CTAs that work together.
#pragma once
#include "ptx.cuh"

#define GROUP(group, one, two)      \
  if constexpr ((group) == 1) {     \
    one;                            \
  } else {                          \
    two;                            \
  }

template <int group>
__device__ __forceinline__ void allocate(u32 where, u32 columns) {
  GROUP(group,
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(where),
                     "r"(columns)
                     : "memory"),
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(where),
                     "r"(columns)
                     : "memory"))
}

template <int group>
__device__ __forceinline__ void relinquish() {
  GROUP(group, asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"),
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"))
}

template <int group>
__device__ __forceinline__ void deallocate(u32 address, u32 columns) {
  GROUP(group,
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address),
                     "r"(columns)),
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address),
                     "r"(columns)))
}

__device__ __forceinline__ void before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// A matrix in shared memory: bits 0-13 start / 16, 16-29 leading / 16, 32-45 stride / 16, 46 fixed,
// 61-63 swizzle.
__device__ __forceinline__ u64 matrix(u32 start, u32 leading, u32 stride, u32 swizzle) {
  return u64(start >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 46 |
         u64(swizzle) << 61;
}

// 8 rows of 128 bytes, swizzled, then the next 8.
__device__ __forceinline__ u64 operand_tile(u32 start) { return matrix(start, 16, 1024, 2); }

// 128 x 4 scales: 32 rows of 16 bytes.
__device__ __forceinline__ u64 scale_tile(u32 start) { return matrix(start, 16, 128, 0); }

// Scales from shared memory to four columns, once for each 32 lanes.
template <int group>
__device__ __forceinline__ void copy_scales(u32 to, u64 from) {
  GROUP(group,
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from)
                     : "memory"),
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from)
                     : "memory"))
}

__device__ __forceinline__ void mma_mxfp8(u32 d, u64 a, u64 b, u32 shape, u32 sfa, u32 sfb,
                                          bool add) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X "
      "[%0], %1, %2, %3, [%4], [%5], p;\n\t}" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(u32(add))
      : "memory");
}

__device__ __forceinline__ void mma_nvfp4_pair(u32 d, u64 a, u64 b, u32 shape, u32 sfa, u32 sfb,
                                               bool add) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.scale_vec::4X "
      "[%0], %1, %2, %3, [%4], [%5], p;\n\t}" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(u32(add))
      : "memory");
}

__device__ __forceinline__ void commit(u32 barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// Tells the barrier at this offset of each CTA in the mask.
__device__ __forceinline__ void commit_pair(u32 barrier, u16 ctas) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier),
      "h"(ctas)
      : "memory");
}

#define R8(x, i) "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3]), "=r"(x[i + 4]), \
                 "=r"(x[i + 5]), "=r"(x[i + 6]), "=r"(x[i + 7])

// 32 columns of the lane of each thread.
__device__ __forceinline__ void load_columns(u32 (&x)[32], u32 from) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
      "%30, %31}, [%32];"
      : R8(x, 0), R8(x, 8), R8(x, 16), R8(x, 24)
      : "r"(from)
      : "memory");
}

__device__ __forceinline__ void wait_load() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// A row of 64 fp32 columns of Tensor Memory as bf16 into a row of 128 bytes, swizzled. Where the
// compiler sees both, a use of a register before wait_load() is held back by nothing but `volatile`.
__device__ __forceinline__ void store_columns(u32 tile, u32 row, u32 first, const u32 (&x)[32]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 word[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      word[j] = pack_bf16(__uint_as_float(x[8 * i + 2 * j]), __uint_as_float(x[8 * i + 2 * j + 1]));
    store16(tile + swizzled(row, first + i), word[0], word[1], word[2], word[3]);
  }
}
