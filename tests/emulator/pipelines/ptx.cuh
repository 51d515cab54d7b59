// Inline PTX that the kernels here share. Addresses of shared memory are 32-bit offsets.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  u8 bytes[128];
};

__device__ __forceinline__ u32 offset_of(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ bool elect() {
  u32 chosen;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.b32 %0, 1, 0, p;\n\t}"
               : "=r"(chosen));
  return chosen;
}

// --- barriers ---

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes the initialization known to the cluster and to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// In the CTA of a cluster that has this rank.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 over;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.b32 %0, 1, 0, p;\n\t}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!over);
}

// The same where arrivals come from other CTAs.
__device__ __forceinline__ void wait_cluster(u32 barrier, u32 parity) {
  u32 over;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], "
        "%2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!over);
}

__device__ __forceinline__ void meet(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Relaxed: enough after fence_mbarrier_init.
__device__ __forceinline__ void meet_cluster_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- copies ---

__device__ __forceinline__ void load_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// To the same offset of several CTAs, whose barriers are told.
__device__ __forceinline__ void load_tile_multicast(u32 to, const TensorMap* map, int x, int y,
                                                    u32 barrier, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   map),
               "r"(x), "r"(y), "r"(from)
               : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the sources of all but the last `left` groups can be written again.
template <int left>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}

template <int left>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- ordinary shared memory, 16 bytes at a time ---

// Where chunk `chunk` (16 bytes) of row `row` lies in a tile of 128-byte rows with 128B swizzle.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) {
  return row * 128 + ((chunk ^ (row & 7)) * 16);
}

__device__ __forceinline__ void store16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void load16(u32 from, u32 (&values)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
