// IEEE 754 total order of f32 as unsigned integers.
#pragma once

// x precedes y in total order (-NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN) exactly if
// total_order_key(x) < total_order_key(y). Zero is the key of one negative NaN only, which no
// canonical score is, so it can stand for "no score".
__device__ __forceinline__ unsigned int total_order_key(float x) {
    const unsigned int bits = __float_as_uint(x);
    const unsigned int is_negative = bits >> 31;
    return bits ^ (is_negative ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_total_order_key(unsigned int key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
