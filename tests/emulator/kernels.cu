// Ordinary CUDA C++, compiled by the tests of the emulator.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void reduce(const float* in, float* out, int n) {
  __shared__ float part[8];
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
  for (int by = 16; by; by /= 2) sum += __shfl_down_sync(0xffffffff, sum, by);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < blockDim.x / 32; ++i) sum += part[i];
    atomicAdd(out, sum);
  }
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int n) {
  __shared__ float ta[16][16], tb[16][17];
  int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    ta[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    tb[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum = fmaf(ta[threadIdx.y][i], tb[i][threadIdx.x], sum);
    __syncthreads();
  }
  c[row * n + column] = sum;
}

extern "C" __global__ void histogram(const unsigned char* in, unsigned* bins, int n) {
  extern __shared__ unsigned mine[];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[in[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], mine[i]);
}

extern "C" __global__ void local_sort(int* data) {
  int mine[16];
  int* at = data + (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  for (int i = 0; i < 16; ++i) mine[i] = at[i];
#pragma unroll 1
  for (int i = 1; i < 16; ++i) {
    int value = mine[i], j = i;
    for (; j && mine[j - 1] > value; --j) mine[j] = mine[j - 1];
    mine[j] = value;
  }
  for (int i = 0; i < 16; ++i) at[i] = mine[i];
}

__device__ __noinline__ unsigned collatz(unsigned n) { return n == 1 ? 0 : 1 + collatz(n & 1 ? 3 * n + 1 : n / 2); }
struct Pair { int quotient; long long rest; };
__device__ __noinline__ Pair split(long long a, int b) { return {int(a / b), a % b}; }

extern "C" __global__ void calls(const int* in, long long* out) {
  int t = threadIdx.x, x = in[t];
  Pair p = split((long long)x * 1000003, t + 3);
  long long r;
  switch (t % 7) {
    case 0: r = collatz(t + 1); break;
    case 1: r = p.quotient; break;
    case 2: r = p.rest; break;
    case 3: r = __popc(x) * 100 + __clz(x); break;
    case 4: r = (long long)__brev(x) ^ __byte_perm(x, t, 0x5140); break;
    case 5: r = __umulhi(x, 0x9e3779b9u) + __funnelshift_l(x, t, t); break;
    default: r = x % (t + 1) + (unsigned)x / 7u;
  }
  out[t] = r;
}

extern "C" __global__ void math(const float* in, float* out, double* wide, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float x = in[i];
  out[8 * i] = sqrtf(x);
  out[8 * i + 1] = 1.0f / x;
  out[8 * i + 2] = x / 3.0f;
  out[8 * i + 3] = expf(x);
  out[8 * i + 4] = logf(x);
  out[8 * i + 5] = sinf(x);
  out[8 * i + 6] = floorf(x) + rintf(x * 2) + fminf(x, 2.0f) + fabsf(x - 5);
  out[8 * i + 7] = tanhf(x) + powf(x, 1.5f);
  wide[i] = sqrt((double)x) / 3.0 + exp(-(double)x) * x;
}

extern "C" __global__ void copy4(const float4* in, float4* out, const uchar4* bytes, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 v = in[i];
  uchar4 b = bytes[i];
  out[i] = make_float4(v.w + b.x, v.z + b.y, v.y + b.z, v.x + b.w);
}

extern "C" __global__ void halves(const __half2* a, const __half2* b, __half2* c, const __nv_bfloat16* d, __nv_bfloat16* e, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  c[i] = __hfma2(a[i], b[i], __hmax2(a[i], b[i]));
  float x = __bfloat162float(d[2 * i]), y = __bfloat162float(d[2 * i + 1]);
  __nv_bfloat162 both = __floats2bfloat162_rn(x * y, x + y);
  e[2 * i] = __low2bfloat16(both);
  e[2 * i + 1] = __hadd(__high2bfloat16(both), d[2 * i]);
}

extern "C" __global__ void scan(int* data) {
  int lane = threadIdx.x % 32, value = data[threadIdx.x];
  for (int by = 1; by < 32; by *= 2) {
    int other = __shfl_up_sync(0xffffffff, value, by);
    if (lane >= by) value += other;
  }
  unsigned odd = __ballot_sync(0xffffffff, value & 1);
  int most = __reduce_max_sync(0xffffffff, value), many = __syncthreads_count(value > 100);
  data[threadIdx.x] = value * 1000 + __popc(odd) + most + many;
}
