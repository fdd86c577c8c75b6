// What every attention kernel agrees on: the macros of a specialisation, which keys a query row may
// see, how a score is made, and what a row without keys becomes.
//
// Row i of batch b sees the keys begin <= j < end, where
//   keys  = total_lengths[b], else sk                    (a count, clamped to [0, sk])
//   limit = past_lengths[b] + i, else keys - sq + i      (the last key of the causal triangle)
//   end   = CAUSAL     ? min(keys, limit + 1)                  : keys
//   begin = HAS_WINDOW ? max(0, limit + 1 - local_window)      : 0
// less those whose additive mask is -inf. Nothing stored at any other key reaches the result.
//
// Entries are declared __launch_bounds__(kThreads, 1), or with the blocks that were found to be worth it: left to its
// own choice, ptxas spills a few registers of some specialisations to fit one more block.
#pragma once

#include "common/element.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr bool kCausal = CAUSAL;
constexpr bool kHasMask = HAS_MASK;
constexpr bool kHasWindow = HAS_WINDOW;
constexpr bool kHasSoftcap = HAS_SOFTCAP;
constexpr int kThreads = THREADS;
constexpr int kLoadWidth = LOAD_WIDTH;  // elements of a q, key, value or output access

static_assert(1 <= kHeadDim && kHeadDim <= 128, "head_dim lies in [1, 128]");
static_assert(kHeadDim % kLoadWidth == 0, "a row is a whole number of accesses");
static_assert(kThreads % 32 == 0, "a block is a whole number of warps");

constexpr unsigned int kFullWarp = 0xffffffffu;

// The weight of a key that a row may not see. It is zero to arithmetic, and its sign tells it from
// the weight of a key that may be seen but has underflowed: inf * -0 must not be computed, inf * +0 must.
constexpr float kExcluded = -0.0f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fc00000); }
__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __int_as_float(0x7f800000); }
__device__ __forceinline__ bool is_excluded(float weight) { return __float_as_uint(weight) == 0x80000000u; }

// The rows of one (batch, head) plane of queries that a block works on.
//
// Positions of queries and keys are unsigned: sq and sk may reach 2^31 - 1, and a tile reaches beyond.
template <unsigned int kBlockQueries>
struct QueryTile {
    unsigned int plane;  // b * q_heads + h
    unsigned int b;
    unsigned int h;
    unsigned int first;  // query
    unsigned int last;   // inclusive

    __device__ QueryTile(int q_heads, int sq, unsigned int index = blockIdx.x) {
        const unsigned int tiles = (sq + kBlockQueries - 1) / kBlockQueries;
        plane = index / tiles;
        b = plane / q_heads;
        h = plane % q_heads;
        const unsigned int tile = index % tiles;
        // The later a causal tile, the more keys it sees; the long ones start first.
        first = (kCausal ? tiles - 1 - tile : tile) * kBlockQueries;
        last = min(first + kBlockQueries, static_cast<unsigned int>(sq)) - 1;
    }
};

struct KeyRange {
    unsigned int begin;
    unsigned int end;

    __device__ bool contains(unsigned int key) const { return begin <= key && key < end; }
};

// The lengths of one batch element. A bad length is clamped, so that no value in device memory can
// lead outside a buffer, and told to the host through the capture-error word.
struct Lengths {
    long long keys;
    long long origin;  // row i has the causal limit origin + i

    __device__ Lengths(const int* total_lengths, const int* past_lengths, unsigned int b, int sq, int sk,
                       unsigned int* capture_error) {
        keys = sk;
        if (total_lengths != nullptr) {
            const int total = total_lengths[b];
            keys = min(max(total, 0), sk);
            if (keys != total && threadIdx.x == 0) atomicOr(capture_error, TOTAL_LENGTH_ERROR);
        }
        origin = keys - sq;
        if (past_lengths != nullptr) {
            const int past = past_lengths[b];
            origin = max(past, 0);
            if (past < 0 && threadIdx.x == 0) atomicOr(capture_error, PAST_LENGTH_ERROR);
        }
    }

    __device__ KeyRange range(unsigned int row, int local_window) const {
        const long long past_limit = origin + row + 1;
        const long long end = kCausal ? max(min(keys, past_limit), 0ll) : keys;
        const long long begin = kHasWindow ? max(min(keys, past_limit - local_window), 0ll) : 0;
        return {static_cast<unsigned int>(begin), static_cast<unsigned int>(end)};
    }
};

// softcap(scale * q.k) + mask. The product is rounded before anything is subtracted from it: fused
// into the exponent, the residue of its rounding would grow to exp(247) where logits are near 1e12.
__device__ __forceinline__ float attention_score(float dot, float scale, float softcap, float mask) {
    float score = __fmul_rn(dot, scale);
    if (kHasSoftcap) score = softcap * tanhf(score / softcap);
    if (kHasMask) score += mask;
    return score;
}

// exp(a - b) never meets -inf - -inf: a row that has seen only scores of -inf is measured from 0.
__device__ __forceinline__ float softmax_origin(float row_max) {
    return row_max == negative_infinity() ? 0.0f : row_max;
}

// numerator / denominator. Over no key at all the result is 0; over keys whose scores are all -inf
// softmax has no value, and the result says so.
__device__ __forceinline__ float normalise(float numerator, float denominator, bool has_key) {
    if (denominator != 0.0f) return numerator / denominator;
    return has_key ? quiet_nan() : 0.0f;
}
