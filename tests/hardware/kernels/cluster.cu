// Clusters: distributed shared memory, remote arrivals, asynchronous remote stores and copies.
#include "common.cuh"

// A ring: every CTA passes its words to the next one, which reads, changes and passes them on.
KERNEL ring(const uint32_t* in, uint32_t* out, int ranks) {
  __shared__ uint32_t words[64];
  __shared__ uint32_t total;
  __shared__ uint64_t full;
  uint32_t t = threadIdx.x, rank = cluster_rank(), next = (rank + 1) % ranks;
  if (t == 0) {
    total = 0;
    barrier_init(&full, 64);
    fence_barrier_init();
  }
  cluster_sync();
  uint32_t mine = in[blockIdx.x * 64 + t];
  for (int turn = 0; turn < ranks; ++turn) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_rank(&words[t], next)), "r"(mine) : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(map_rank(&full, next)) : "memory");
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done) : "r"(address(&full)), "r"(turn & 1) : "memory");
    }
    mine = words[t] * 3 + rank;
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(map_rank(&total, next)), "r"(mine) : "memory");
    cluster_sync();
  }
  uint32_t far;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(far) : "r"(map_rank(&total, next)) : "memory");
  out[(blockIdx.x * 2 + 0) * 64 + t] = mine;
  out[(blockIdx.x * 2 + 1) * 64 + t] = far;
  cluster_sync();
}

// An asynchronous store completes bytes on the barrier of the CTA that it writes.
KERNEL store_async(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t words[64];
  __shared__ uint64_t got;
  uint32_t t = threadIdx.x, other = cluster_rank() ^ 1;
  if (t == 0) {
    barrier_init(&got, 1);
    fence_barrier_init();
    expect_bytes(&got, 64 * 4);
  }
  cluster_sync();
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(map_rank(&words[t], other)),
               "r"(in[blockIdx.x * 64 + t]), "r"(map_rank(&got, other)) : "memory");
  barrier_wait(&got, 0);
  out[blockIdx.x * 64 + t] = words[t];
  cluster_sync();
}

// From shared memory to that of another CTA, by the bulk copy engine.
KERNEL bulk_to_neighbour(const uint32_t* in, uint32_t* image, int bytes) {
  __shared__ uint64_t barrier;
  uint32_t other = cluster_rank() ^ 1;
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic);
  fill(bytes / 2);
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    fence_barrier_init();
    expect_bytes(&barrier, bytes);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = in[blockIdx.x * bytes / 4 + i];
  fence_async();
  cluster_sync();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     map_rank(dynamic + bytes, other)), "r"(address(dynamic)), "r"(bytes), "r"(map_rank(&barrier, other))
                 : "memory");
  }
  barrier_wait(&barrier, 0);
  show(image + blockIdx.x * bytes / 2, bytes / 2);
  cluster_sync();
}
