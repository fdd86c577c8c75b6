// DsaIndexSelect, certified, for f32: queries and keys as pairs of bf16, which the tensor cores multiply.
//
//     query [query_vectors, D], key [key_vectors, D] f32
//     ->  query_parts [query_vectors, 2 D], key_parts [key_vectors, 2 D] bf16
//
// The first D elements of a vector are its values rounded to nearest, the last D what that left, rounded again. What is
// too large for bf16 becomes an infinity, and its norm says so.
//
// A thread takes four neighbouring elements.
#include <cuda_bf16.h>

constexpr int kHeadDim = HEAD_DIM;
constexpr int kThreads = THREADS;
constexpr int kVectorAccesses = kHeadDim / 4;

struct alignas(8) Four {
    __nv_bfloat16 values[4];
};

__device__ __forceinline__ void split(const float* vectors, __nv_bfloat16* parts, unsigned long long access) {
    const float4 source = reinterpret_cast<const float4*>(vectors)[access];
    const float values[4] = {source.x, source.y, source.z, source.w};
    Four high, low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        high.values[i] = __float2bfloat16_rn(values[i]);
        low.values[i] = __float2bfloat16_rn(__fsub_rn(values[i], __bfloat162float(high.values[i])));
    }
    __nv_bfloat16* vector = parts + access / kVectorAccesses * (2 * kHeadDim) + access % kVectorAccesses * 4;
    *reinterpret_cast<Four*>(vector) = high;
    *reinterpret_cast<Four*>(vector + kHeadDim) = low;
}

extern "C" __global__ void __launch_bounds__(kThreads) dsa_index_select_split(
    const float* __restrict__ query, const float* __restrict__ key, __nv_bfloat16* __restrict__ query_parts,
    __nv_bfloat16* __restrict__ key_parts, unsigned long long query_vectors, unsigned long long key_vectors) {
    const unsigned long long query_accesses = query_vectors * kVectorAccesses;
    const unsigned long long accesses = query_accesses + key_vectors * kVectorAccesses;
    const unsigned long long stride = 1ull * gridDim.x * kThreads;
    for (unsigned long long i = 1ull * blockIdx.x * kThreads + threadIdx.x; i < accesses; i += stride) {
        if (i < query_accesses) {
            split(query, query_parts, i);
        } else {
            split(key, key_parts, i - query_accesses);
        }
    }
}
