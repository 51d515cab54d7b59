// MXFP8: rows of fp32 to E4M3 in blocks of 32 with an E8M0 scale, rounded up. A warp takes a row.
#include "common.cuh"

// The least power of two s with amax / s <= 448 = 1.75 * 2^8, as its biased exponent.
DEVICE uint32_t scale_of(uint32_t amax) {
  int exponent = amax >> 23, fraction = amax & 0x7FFFFF;
  if (exponent == 255) return 255;
  int scale = exponent - 8 + (fraction > 0x600000);
  return scale < 0 ? 0 : scale;
}

KERNEL quantize(const float* in, uint8_t* codes, uint8_t* scales, int rows, int columns) {
  int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  for (int column = 0; column < columns; column += 64) {
    // A lane has two neighbours; a block of 32 is half a warp.
    float2 pair = *reinterpret_cast<const float2*>(in + (size_t)row * columns + column + 2 * lane);
    uint32_t amax = max(__float_as_uint(pair.x) & 0x7FFFFFFF, __float_as_uint(pair.y) & 0x7FFFFFFF);
    amax = min(amax, 0x7F800000u);
    for (int by = 8; by; by /= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFF, amax, by));
    uint32_t scale = scale_of(amax);
    // 2^(127 - scale), subnormal for the largest scale.
    float inverse = __uint_as_float(scale >= 254 ? 0x400000u >> (scale - 254) : (254 - scale) << 23);
    if (scale == 255) inverse = __uint_as_float(0x7FFFFFFF);
    uint16_t code;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(pair.y * inverse), "f"(pair.x * inverse));
    reinterpret_cast<uint16_t*>(codes + (size_t)row * columns + column)[lane] = code;
    if (lane % 16 == 0) scales[(size_t)row * (columns / 32) + column / 32 + lane / 16] = scale;
  }
}
