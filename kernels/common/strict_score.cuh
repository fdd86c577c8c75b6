// The arithmetic of one DSA score. Every operation is rounded to f32 on its own and in this order,
// so that the result is bit-equal to the NumPy oracle whatever computes it:
//
//     dot    = +0; for d ascending: dot += q[h][d] * k[d]
//     sum    = +0; for h ascending: sum += relu(scale * dot[h]) * (w[h] * weights_scale)
//     score  = sum + bias, a NaN of any sign or payload made +qNaN
//
// A NaN dot counts as zero. Neither sum can become -0, so adding the zero products of padding
// changes no bit.
#pragma once

#include "common/element.cuh"

// Bias at or below this is the -inf or finfo.min fill of a mask; NaN is masked too.
constexpr float kMaskThreshold = -1e30f;

__device__ __forceinline__ bool is_allowed(float bias) { return bias > kMaskThreshold; }

// What a masked cell scores; nothing selects it.
__device__ __forceinline__ float masked_score() { return __int_as_float(0xff800000); }

// One step of a dot product. kExactProduct promises that a * b is an f32; a fused multiply-add then
// rounds where the sum rounds, and gives the same bits in one instruction instead of two.
template <bool kExactProduct>
__device__ __forceinline__ float add_product(float dot, float a, float b) {
    return kExactProduct ? __fmaf_rn(a, b, dot) : __fadd_rn(dot, __fmul_rn(a, b));
}

// What one head adds. fmaxf returns its other operand where one is NaN.
__device__ __forceinline__ float head_term(float dot, float weight, float scale) {
    return __fmul_rn(fmaxf(__fmul_rn(scale, dot), 0.0f), weight);
}

__device__ __forceinline__ float add_head(float sum, float dot, float weight, float scale) {
    return __fadd_rn(sum, head_term(dot, weight, scale));
}

__device__ __forceinline__ float finish_score(float sum, float bias) {
    const float score = __fadd_rn(sum, bias);
    return isnan(score) ? __int_as_float(0x7fc00000) : score;
}

// Which products of two elements are f32 values with nothing lost.
//   f16:  11 + 11 significant bits, exponents within [-48, 32]: all of them.
//   bf16: 8 + 8 significant bits: those of two values in ExactRange.
//   f32:  24 + 24 significant bits: none can be promised.
enum class ExactProducts { kAlways, kInRange, kNever };

template <typename T>
constexpr ExactProducts kExactProducts = ExactProducts::kNever;
template <>
constexpr ExactProducts kExactProducts<__half> = ExactProducts::kAlways;
template <>
constexpr ExactProducts kExactProducts<__nv_bfloat16> = ExactProducts::kInRange;

// Whether all values seen are zero or of a magnitude in [2^-67, 2^64). The lowest bit of a product of
// two such bf16 values is at least 2^(-67 - 67 - 14) = 2^-148, and the product is below 2^128: neither
// underflow nor overflow touches it. Infinities and NaN are out of range.
class ExactRange {
public:
    __device__ __forceinline__ void add(float value) {
        const unsigned int magnitude = __float_as_uint(value) & 0x7fffffff;
        least_ = min(least_, magnitude - 1);  // makes zero the greatest
        greatest_ = max(greatest_, magnitude);
    }

    __device__ __forceinline__ bool holds() const {
        return least_ >= __float_as_uint(0x1p-67f) - 1 && greatest_ < __float_as_uint(0x1p64f);
    }

private:
    unsigned int least_ = 0xffffffff;  // as the bits of a magnitude, less one
    unsigned int greatest_ = 0;
};
