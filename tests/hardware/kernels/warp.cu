// What the lanes of a warp do together; matrices of 8x8 in shared memory.
#include "common.cuh"

KERNEL collectives(const uint32_t* in, uint32_t* out) {
  uint32_t t = threadIdx.x, v = in[t], every = 0xFFFFFFFF, r[14];
  int agree;
  r[0] = __shfl_sync(every, v, v & 31);
  r[1] = __shfl_up_sync(every, v, 3, 16);
  r[2] = __shfl_down_sync(every, v, 5, 8);
  r[3] = __shfl_xor_sync(every, v, 9);
  r[4] = __ballot_sync(every, v & 1);
  r[5] = __any_sync(every, v == in[7]) * 2 + __all_sync(every, v >> 31);
  r[6] = __reduce_add_sync(every, v);
  r[7] = __reduce_min_sync(every, (int)v);
  r[8] = __reduce_max_sync(every, v);
  r[9] = __reduce_xor_sync(every, v);
  r[10] = __match_any_sync(every, v & 3);
  r[11] = __match_all_sync(every, v & 0, &agree) + agree;
  r[12] = v & 4 ? __activemask() & 0 : __popc(v);
  if (t % 32 < 20) r[13] = __reduce_or_sync(0xFFFFF, v & 0xFF);
  else r[13] = __reduce_and_sync(0xFFF00000, v | 0xFF);
  for (int i = 0; i < 14; ++i) out[t * 14 + i] = r[i];
}

// Sums, extremes and counters that come out the same in whatever order lanes take their turns.
KERNEL atomics(const uint32_t* in, uint32_t* words, float* sums, unsigned long long* wide) {
  __shared__ uint32_t mine[8];
  uint32_t t = threadIdx.x, v = in[blockIdx.x * blockDim.x + t];
  if (t < 8) mine[t] = 0;
  __syncthreads();
  atomicAdd(&mine[0], v);
  atomicMax(&mine[1], v);
  atomicMin(reinterpret_cast<int*>(&mine[2]), (int)v);
  atomicOr(&mine[3], v & 0x0F0F0F0F);
  atomicXor(&mine[4], v);
  atomicInc(&mine[5], 6);
  atomicDec(&mine[6], 10);
  __syncthreads();
  if (t < 7) atomicAdd(&words[t], mine[t]);
  atomicAnd(&words[7], ~(v & 0x11));
  atomicAdd(&sums[v % 4], (float)(v % 1000));
  atomicMax(&wide[0], (unsigned long long)v * v);
  atomicAdd(&wide[1], (unsigned long long)v << 20);
}

#define LOAD(COUNT, TRANS, LIST, ...)                                                                            \
  asm volatile("ldmatrix.sync.aligned.m8n8.x" #COUNT TRANS ".shared.b16 " LIST : __VA_ARGS__ : "r"(from) : "memory")
#define STORE(COUNT, TRANS, LIST, ...)                                                                           \
  asm volatile("stmatrix.sync.aligned.m8n8.x" #COUNT TRANS ".shared.b16 [%0], " LIST ::"r"(to), __VA_ARGS__ : "memory")

// Rows at addresses from ``rows``; 14 words of a lane out, then the image of shared memory.
KERNEL matrices(const uint32_t* in, const uint32_t* rows, uint32_t* out, uint32_t* image) {
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic);
  uint32_t t = threadIdx.x, r[14];
  for (int i = t; i < 512; i += 32) words[i] = in[i];
  for (int i = t; i < 1024; i += 32) words[512 + i] = 0xEEEEEEEE;
  __syncthreads();
  uint32_t from = address(dynamic) + 16 * rows[t], to = address(dynamic) + 2048 + 16 * rows[t];
  LOAD(1, "", "{%0}, [%1];", "=r"(r[0]));
  LOAD(2, "", "{%0, %1}, [%2];", "=r"(r[1]), "=r"(r[2]));
  LOAD(4, "", "{%0, %1, %2, %3}, [%4];", "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]));
  LOAD(1, ".trans", "{%0}, [%1];", "=r"(r[7]));
  LOAD(2, ".trans", "{%0, %1}, [%2];", "=r"(r[8]), "=r"(r[9]));
  LOAD(4, ".trans", "{%0, %1, %2, %3}, [%4];", "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]));
  for (int i = 0; i < 14; ++i) out[14 * t + i] = r[i];
  STORE(4, "", "{%1, %2, %3, %4};", "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]));
  to += 2048;
  STORE(4, ".trans", "{%1, %2, %3, %4};", "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]));
  __syncwarp();
  STORE(2, "", "{%1, %2};", "r"(r[10]), "r"(r[11]));
  __syncwarp();
  STORE(1, ".trans", "{%1};", "r"(r[12]));
  __syncthreads();
  for (int i = t; i < 1536; i += 32) image[i] = words[i];
}
