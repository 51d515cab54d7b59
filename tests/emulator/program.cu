// A program with its own main(), run by test_programs.py against the emulated CUDA runtime.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

__global__ void scale(float* data, float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] *= by;
}

__global__ void add_rank(float* data) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  data[blockIdx.x * blockDim.x + threadIdx.x] += rank;
}

// The tensor map of rows of 64 floats, as the driver encodes it.
static void print_map(float* data, unsigned rows) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status);
  alignas(64) CUtensorMap map;
  cuuint64_t shape[] = {64, rows}, strides[] = {256};
  cuuint32_t box[] = {32, 8}, steps[] = {1, 1};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ, 2, data, shape, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);
  for (unsigned char byte : reinterpret_cast<unsigned char(&)[128]>(map)) printf("%02x", byte);
  printf("\n");
}

int main(int argc, char** argv) {
  const char* way = argv[1];
  int n = 256;
  size_t size = n * sizeof(float);
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, 0);
  printf("%d.%d, %d SMs\n", properties.major, properties.minor, properties.multiProcessorCount);

  float* data;
  cudaMalloc(&data, size);
  std::vector<float> host(n, 1.5f);
  cudaMemcpy(data, host.data(), size, cudaMemcpyHostToDevice);
  cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(data), 0x40000000, n / 2, 0);  // 2.f
  int reached = strcmp(way, "wild") ? n : n + 1;
  scale<<<(reached + 63) / 64, 64>>>(data, 2.f, reached);
  if (cudaGetLastError() != cudaSuccess) exit(3);

  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  config.gridDim = 4;
  config.blockDim = 64;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, add_rank, data);
  cudaMemcpy(host.data(), data, size, cudaMemcpyDeviceToHost);
  bool right = true;
  for (int i = 0; i < n; ++i) right &= host[i] == (i < n / 2 ? 4 : 3) + i / 64 % 2;

  print_map(data, 4);
  float* much;
  if (!strcmp(way, "managed")) cudaMallocManaged(&much, size);
  if (!strcmp(way, "copy")) cudaMemcpy(data, host.data(), size + 1, cudaMemcpyHostToDevice);
  cudaFree(data);
  puts(right ? "right" : "wrong");
  return argc;
}
