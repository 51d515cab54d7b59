// The bulk copy engine: tensor maps of rank 1 to 5, with every swizzle; bulk copies; cp.async.
#include "common.cuh"

// Load a box, write out shared memory as it lies there, store the box through another map; a store,
// unlike a load, must not start at negative coordinates.
#define COPY(RANK, COORDINATES, LIST, ...)                                                                        \
  KERNEL copy_##RANK##d(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,         \
                        uint32_t* image, int bytes, int a, int b, int c, int d, int e) {                          \
    __shared__ uint64_t barrier;                                                                                  \
    fill(bytes / 4 + 32);                                                                                         \
    if (threadIdx.x == 0) {                                                                                       \
      barrier_init(&barrier, 1);                                                                                  \
      fence_barrier_init();                                                                                       \
    }                                                                                                             \
    fence_async();                                                                                                \
    __syncthreads();                                                                                              \
    if (threadIdx.x == 0) {                                                                                       \
      expect_bytes(&barrier, bytes);                                                                              \
      asm volatile("cp.async.bulk.tensor." #RANK                                                                  \
                   "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " LIST "], [%2];" ::"r"(     \
                       address(dynamic)), "l"(&from), "r"(address(&barrier)), COORDINATES : "memory");            \
    }                                                                                                             \
    barrier_wait(&barrier, 0);                                                                                    \
    show(image, bytes / 4 + 32);                                                                                  \
    __syncthreads();                                                                                              \
    a = max(a, 0), b = max(b, 0), c = max(c, 0), d = max(d, 0), e = max(e, 0);                                    \
    if (threadIdx.x == 0) {                                                                                       \
      asm volatile("cp.async.bulk.tensor." #RANK "d.global.shared::cta.bulk_group [%1, " LIST "], [%0];" ::"r"(   \
                       address(dynamic)), "l"(&to), "r"(0), COORDINATES : "memory");                              \
      bulk_commit();                                                                                              \
      bulk_wait();                                                                                                \
    }                                                                                                             \
  }
#define WITH(...) __VA_ARGS__
COPY(1, WITH("r"(a)), "{%3}")
COPY(2, WITH("r"(a), "r"(b)), "{%3, %4}")
COPY(3, WITH("r"(a), "r"(b), "r"(c)), "{%3, %4, %5}")
COPY(4, WITH("r"(a), "r"(b), "r"(c), "r"(d)), "{%3, %4, %5, %6}")
COPY(5, WITH("r"(a), "r"(b), "r"(c), "r"(d), "r"(e)), "{%3, %4, %5, %6, %7}")

// Each of two CTAs loads half of the rows into the shared memory of both.
KERNEL multicast(const __grid_constant__ CUtensorMap half, uint32_t* image, int bytes, int x, int y, int rows) {
  __shared__ uint64_t barrier;
  uint32_t rank = cluster_rank();
  fill(bytes / 4);
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    fence_barrier_init();
    expect_bytes(&barrier, bytes);
  }
  fence_async();
  cluster_sync();
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(address(dynamic) + rank * bytes / 2),
        "l"(&half), "r"(address(&barrier)), "r"(x), "r"(y + (int)rank * rows), "h"((uint16_t)3)
        : "memory");
  }
  barrier_wait(&barrier, 0);
  show(image + blockIdx.x * bytes / 4, bytes / 4);
  cluster_sync();
}

// cp.reduce.async.bulk.tensor: the box is added to what is there.
KERNEL reduce_tensor(const __grid_constant__ CUtensorMap to, const uint32_t* from, int words, int x, int y) {
  for (int i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<uint32_t*>(dynamic)[i] = from[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%1, {%2, %3}], [%0];" ::"r"(
                     address(dynamic)), "l"(&to), "r"(x), "r"(y) : "memory");
    bulk_commit();
    bulk_wait();
  }
}

// Without a tensor map: in, out, and added to memory.
KERNEL bulk(const uint32_t* in, uint32_t* out, uint32_t* sums, uint32_t* image, int bytes) {
  __shared__ uint64_t barrier;
  fill(bytes / 4 + 32);
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    fence_barrier_init();
  }
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    expect_bytes(&barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(dynamic)), "l"(in), "r"(bytes), "r"(address(&barrier)) : "memory");
  }
  barrier_wait(&barrier, 0);
  show(image, bytes / 4 + 32);
  __syncthreads();
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t*>(dynamic)[i] += i;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(address(dynamic)),
                 "r"(bytes) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(sums),
                 "r"(address(dynamic)), "r"(bytes) : "memory");
    bulk_commit();
    bulk_wait();
  }
}

// cp.async of 4, 8 and 16 bytes, with fewer bytes read than written; by groups and by an mbarrier.
KERNEL copy_async(const uint8_t* in, uint32_t* image) {
  __shared__ uint64_t barrier;
  uint32_t t = threadIdx.x, there = address(dynamic);
  fill(blockDim.x * 12);
  if (t == 0) barrier_init(&barrier, blockDim.x);
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(there + 16 * t), "l"(in + 4 * t), "r"(t % 5) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(there + 16 * t + 8), "l"(in + 8 * t) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(there + 16 * (blockDim.x + t)), "l"(in + 16 * t),
               "r"(t % 17) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(there + 16 * (2 * blockDim.x + t)), "l"(in + 16 * t)
               : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(&barrier)) : "memory");
  barrier_wait(&barrier, 0);
  __syncthreads();
  show(image, blockDim.x * 12);
}
