// What differs between the two 16-bit element types of tensor-core attention, and their masks.
#pragma once

#include "common/element.cuh"

template <typename T>
struct ElementTraits;
template <>
struct ElementTraits<__half> {
    static constexpr float kWeightExponent = 12.0f;  // the weight at the origin is 2^12
    static constexpr float kHeadroom = 3.0f;         // and the greatest 2^15
    static constexpr unsigned int kInfinity = 0x7c00;
    static constexpr bool kMayOverflow = true;  // where f32 does not
    static constexpr float kMax = 65504.0f;
    static __device__ __forceinline__ float unpack(unsigned int pair, int i) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16 * i)));
    }
    static __device__ __forceinline__ unsigned int pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const unsigned int&>(pair);
    }
    static __device__ __forceinline__ unsigned int add_zero_times(unsigned int sum, unsigned int word) {
        constexpr unsigned int kZero = 0;
        const __half2 pair =
            __hfma2(reinterpret_cast<const __half2&>(word), reinterpret_cast<const __half2&>(kZero),
                    reinterpret_cast<const __half2&>(sum));
        return reinterpret_cast<const unsigned int&>(pair);
    }
    static __device__ __forceinline__ unsigned int max(unsigned int a, unsigned int b) {
        const __half2 pair = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
        return reinterpret_cast<const unsigned int&>(pair);
    }
};
template <>
struct ElementTraits<__nv_bfloat16> {
    static constexpr float kWeightExponent = 0.0f;
    static constexpr float kHeadroom = 8.0f;
    static constexpr unsigned int kInfinity = 0x7f80;
    static constexpr bool kMayOverflow = false;
    static constexpr float kMax = 3.38953139e38f;
    static __device__ __forceinline__ float unpack(unsigned int pair, int i) {
        return __int_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u);
    }
    static __device__ __forceinline__ unsigned int pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const unsigned int&>(pair);
    }
    static __device__ __forceinline__ unsigned int add_zero_times(unsigned int sum, unsigned int word) {
        constexpr unsigned int kZero = 0;
        const __nv_bfloat162 pair =
            __hfma2(reinterpret_cast<const __nv_bfloat162&>(word), reinterpret_cast<const __nv_bfloat162&>(kZero),
                    reinterpret_cast<const __nv_bfloat162&>(sum));
        return reinterpret_cast<const unsigned int&>(pair);
    }
    static __device__ __forceinline__ unsigned int max(unsigned int a, unsigned int b) {
        const __nv_bfloat162 pair =
            __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
        return reinterpret_cast<const unsigned int&>(pair);
    }
};
using Traits = ElementTraits<Element>;

// Two neighbouring elements, of which those from `end` on are not read. kWidth is how many one access may move.
template <int kWidth>
__device__ __forceinline__ unsigned int load_pair(const Element* source, int end) {
    if (kWidth == 2) return 0 < end ? *reinterpret_cast<const unsigned int*>(source) : 0;
    const auto* const bits = reinterpret_cast<const unsigned short*>(source);
    const unsigned int low = 0 < end ? bits[0] : 0;
    const unsigned int high = 1 < end ? bits[1] : 0;
    return high << 16 | low;
}
