// What bounds the error of a row's scores, from its query and weights; docs/dsa_exactness.md derives it.
#pragma once

#include "common/dsa_layout.cuh"
#include "common/dsa_norm.cuh"
#include "common/element.cuh"
#include "common/strict_score.cuh"

// What the tensor cores multiply.
template <typename T>
struct PartOf {
    using Type = T;
    static constexpr int kParts = 1;
};
template <>
struct PartOf<float> {
    using Type = __nv_bfloat16;
    static constexpr int kParts = 2;
};
using Part = PartOf<Element>::Type;
constexpr int kParts = PartOf<Element>::kParts;

// Sums over the heads that one lane has seen.
struct HeadSums {
    float norm = 0.0f;  // of |weight| u scale times the norm
    float weight = 0.0f;
    float max_norm = 0.0f;
    bool is_zero = true;  // every head has a zero weight or a zero query
    bool fuses = true;    // no element is outside ExactRange

    // The weighted squares of kWidth elements from element d of kDepth on, of a head with this weight.
    template <int kDepth, int kWidth>
    __device__ __forceinline__ float squares(
        const Pack<Element, kWidth>& pack, float head_weight, int d, const NormWeights& norm_weights) {
        NormSums sums;
        ExactRange range;
        unsigned int bits = 0;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float value = to_f32(pack.values[i]);
            if (kExactProducts<Element> == ExactProducts::kInRange) range.add(value);
            bits |= __float_as_uint(value);
            sums.add(value);
            if (kParts == 2) {
                const float rest = __fsub_rn(value, to_f32(from_f32<Part>(value)));
                sums.add_low(to_f32(from_f32<Part>(rest)));
            }
        }
        is_zero = is_zero && ((bits & 0x7fffffff) == 0 || head_weight == 0.0f);
        fuses = fuses && range.holds();
        return sums.weighted(norm_weights, kDepth - d - kWidth, (kDepth - d + 15) / 16);
    }

    // A head's, once its squares have been added up.
    __device__ __forceinline__ void add_head(
        float head_squares, float head_weight, float error_scale, const NormWeights& norm_weights) {
        const float head_norm = norm_weights.norm(head_squares);
        norm += __fmaf_rn(fabsf(head_weight), error_scale, 0x1p-130f) * head_norm;
        weight += fabsf(head_weight);
        max_norm = head_norm > max_norm || isnan(head_norm) ? head_norm : max_norm;
    }

    // Those of other heads, by the lane `step` away: what a sum is made of, not what is true of all.
    __device__ __forceinline__ void join(int step) {
        norm += __shfl_xor_sync(0xffffffffu, norm, step);
        weight += __shfl_xor_sync(0xffffffffu, weight, step);
        const float other = __shfl_xor_sync(0xffffffffu, max_norm, step);
        max_norm = other > max_norm || isnan(other) ? other : max_norm;
    }

    // The row's, if these are of all its heads.
    template <int kDepth>
    __device__ __forceinline__ RowBound bound(float scale) const {
        constexpr float kUp = 1.0f + 0x1p-10f;
        const float infinity = __int_as_float(0x7f800000);
        const float per_norm = norm * kUp;
        const float most = 0x1p120f / (fmaxf(max_norm, 1.0f) * fmaxf(scale, 1.0f) * fmaxf(weight, 1.0f));
        // A NaN or an infinity anywhere ends in one of these sums; fmaxf would drop a NaN.
        const bool is_regular = per_norm < infinity && weight < infinity && max_norm < infinity && most > 0.0f;
        const float floor = (1.0f + weight) * (1.0f + scale) * (kDepth * 0x1p-120f);
        return {is_zero ? 0.0f : per_norm, is_zero ? 0.0f : floor, most,
                (is_regular ? kRegularRow : 0) | (is_zero ? kExactRow : 0) | (fuses ? kFusingRow : 0)};
    }
};
