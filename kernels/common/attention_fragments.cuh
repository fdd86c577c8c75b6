// What the f32 attention kernels share: scores, weights and sums as a lane holds them, a fragment of matrix products.
//
// A warp owns 16 query rows, and a lane the rows lane / 4 and, 8 below, the next; r says which. Scores, later weights:
// element [n][i] is of row r = i / 2 and of key 8 n + 2 (lane % 4) + i % 2. Sums of weighted values: element [n][v][i]
// is of row r = i / 2 and of column 8 kVector n + (2 (lane % 4) + i % 2) kVector + v.
#pragma once

#include "common/attention_tile.cuh"
#include "common/ptx.cuh"

constexpr int kWarpRows = 16;
constexpr float kLog2E = 1.4426950408889634f;

using Rows = TileRows<kWarpRows>;

struct RowState {
    float max[2];
    float sum[2];  // of the weights of this lane's keys

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            max[r] = negative_infinity();
            sum[r] = 0.0f;
        }
    }
};

template <int kGroups, int kVector>
__device__ __forceinline__ void clear(float (&sums)[kGroups][kVector][4]) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][v][i] = 0.0f;
        }
    }
}

// Dot products to scores, and -inf where a row may not see the key. `first_key` is of the lane's first column. With a
// mask, bit r of has_key says whether row r saw a key.
template <int kKeyTiles>
__device__ __forceinline__ void finish_scores(
    float (&scores)[kKeyTiles][4], const Rows& rows, float scale, float softcap, int first_key, bool is_partial,
    unsigned int& has_key) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[n][i] = __fmul_rn(scores[n][i], scale);
            if (kHasSoftcap) scores[n][i] = softcap * tanhf(scores[n][i] / softcap);
        }
    }
    if (!kHasMask && !is_partial) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const KeyRange range = rows.range(r);
        const int begin = static_cast<int>(range.begin) - first_key;
        const int end = static_cast<int>(range.end) - first_key;
        const float* const mask = kHasMask ? rows.mask(r) + first_key : nullptr;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = n * 8 + i;
                float& score = scores[n][r * 2 + i];
                bool is_allowed = column < end && (!kHasWindow || begin <= column);
                if (kHasMask && is_allowed) {
                    const float bias = mask[column];
                    is_allowed = bias != negative_infinity();
                    score += bias;
                    has_key |= static_cast<unsigned int>(is_allowed) << r;
                }
                if (!is_allowed) score = negative_infinity();
            }
        }
    }
}

// Turn scores into weights, and add them to the rows' sums; `rescale` is for what was summed before.
template <int kKeyTiles>
__device__ __forceinline__ void weigh(float (&scores)[kKeyTiles][4], RowState& state, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float row_max = state.max[r];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            row_max = fmaxf(row_max, fmaxf(scores[n][r * 2], scores[n][r * 2 + 1]));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
        const float origin = softmax_origin(row_max);
        rescale[r] = ex2((state.max[r] - origin) * kLog2E);
        state.max[r] = row_max;
        float sums[2] = {};
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = scores[n][r * 2 + i];
                score = ex2((score - origin) * kLog2E);
                sums[i] += score;
            }
        }
        state.sum[r] = fmaf(state.sum[r], rescale[r], sums[0] + sums[1]);
    }
}

// Add the values that are not finite of a block of `keys` keys to the rows that may see them. A finite positive weight
// does not change an infinity or a NaN, and a NaN weight has spoilt the row already.
template <int kGroups, int kVector>
__device__ __forceinline__ void add_spoilt_values(
    float (&sums)[kGroups][kVector][4], const float* values, const Rows& rows, unsigned int first_key, int keys) {
    const int lane_column = fresh_thread() % 4 * 2 * kVector;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const KeyRange range = rows.range(r);
        const unsigned int end = min(range.end, first_key + keys);
#pragma unroll 1
        for (unsigned int key = max(range.begin, first_key); key < end; ++key) {
            if (kHasMask && rows.mask(r)[key] == negative_infinity()) continue;
            const float* const row = values + static_cast<long long>(key) * kHeadDim;
#pragma unroll
            for (int n = 0; n < kGroups; ++n) {
#pragma unroll
                for (int j = 0; j < 2 * kVector; ++j) {
                    const int column = n * 8 * kVector + lane_column + j;
                    const float value = column < kHeadDim ? row[column] : 0.0f;
                    if (!is_finite(value)) sums[n][j % kVector][r * 2 + j / kVector] += value;
                }
            }
        }
    }
}

template <int kGroups, int kVector>
__device__ __forceinline__ bool are_finite(const float (&sums)[kGroups][kVector][4]) {
    float spoilt = 0.0f;  // becomes NaN
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) spoilt = fmaf(sums[n][v][i], 0.0f, spoilt);
        }
    }
    return spoilt == 0.0f;
}

// Divide by the denominators and store the lane's parts of its rows in their plane of the output.
template <int kGroups, int kVector>
__device__ __forceinline__ void store_output(
    float* output, const float (&sums)[kGroups][kVector][4], const RowState& state, const Rows& rows,
    unsigned int has_key) {
    constexpr int kWidth = kLoadWidth < 2 * kVector ? kLoadWidth : 2 * kVector;
    if (kHasMask) {
        has_key |= __shfl_xor_sync(kFullWarp, has_key, 1);
        has_key |= __shfl_xor_sync(kFullWarp, has_key, 2);
    }
    const int lane_column = threadIdx.x % 4 * 2 * kVector;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.sum[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        const KeyRange range = rows.range(r);
        const bool has = kHasMask ? (has_key >> r & 1) != 0 : range.begin < range.end;
        if (rows.query(r) >= rows.sq) continue;
        float* const row = output + static_cast<long long>(rows.query(r)) * kHeadDim;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
            for (int first = 0; first < 2 * kVector; first += kWidth) {
                const int column = n * 8 * kVector + lane_column + first;
                float values[kWidth];
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    values[j] = normalise(sums[n][(first + j) % kVector][r * 2 + (first + j) / kVector], sum, has);
                }
                if (column < kHeadDim) store_f32(row + column, values);
            }
        }
    }
}
