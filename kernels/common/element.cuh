// The element type of a specialisation, and the way from memory to f32 and back.
//
// ELEMENT is float, __half or __nv_bfloat16. Arithmetic is f32 in every kernel: widening is exact,
// narrowing rounds to nearest even, and overflow becomes infinity.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ELEMENT
#error "compile with -DELEMENT=float, __half or __nv_bfloat16"
#endif

using Element = ELEMENT;

__device__ __forceinline__ float to_f32(float value) { return value; }
__device__ __forceinline__ float to_f32(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_f32(float value);
template <>
__device__ __forceinline__ float from_f32<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_f32<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// kCount neighbours that move in one access of up to 16 bytes. The address must be aligned to the
// whole pack.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
    static_assert((kCount & (kCount - 1)) == 0, "a pack holds a power of two of elements");
    static_assert(kCount * sizeof(T) <= 16, "a pack is at most 16 bytes");
    T values[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* source) {
    return *reinterpret_cast<const Pack<T, kCount>*>(source);
}

template <int kCount, typename T>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, kCount>& pack) {
    *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
}

// Read source[0 .. kCount) as f32, in one access.
template <int kCount>
__device__ __forceinline__ void load_f32(const Element* source, float (&values)[kCount]) {
    const auto pack = load_pack<kCount>(source);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_f32(pack.values[i]);
}

// Write values to target[0 .. kCount), rounded to the element type, in one access.
template <int kCount>
__device__ __forceinline__ void store_f32(Element* target, const float (&values)[kCount]) {
    Pack<Element, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.values[i] = from_f32<Element>(values[i]);
    store_pack(target, pack);
}
