// Attention of a single query row per (batch, head): each key and value is read once, so the kernel
// is a stream of memory, and needs neither tiles nor shared memory for them.
//
//   q, output   [B, H, 1, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [1, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// A block owns one plane. Its warps take turns at runs of 32 keys and keep their own softmax state,
// which is merged once at the end, in warp order. Within a warp a row of D elements is spread over
// kRowLanes lanes, so that 32 / kRowLanes rows move at once; a lane owns the score of one key of the
// run. Loads are unconditional, so that many are in flight; what they bring of a key that the row may
// not see is thrown away, not multiplied by zero.
#include "common/attention.cuh"

constexpr int kWarps = kThreads / 32;
constexpr int kPacks = kHeadDim / kLoadWidth;

__host__ __device__ constexpr int row_lanes(int packs) {
    int lanes = 1;
    while (lanes < packs && lanes < 32) lanes *= 2;
    return lanes;
}

constexpr int kRowLanes = row_lanes(kPacks);
constexpr int kRowsAtOnce = 32 / kRowLanes;
constexpr int kAccesses = (kPacks + kRowLanes - 1) / kRowLanes;  // of a lane to one row

struct Smem {
    float numerator[kWarps][kHeadDim];
    float row_max[kWarps];
    float row_sum[kWarps];
    bool has_key[kWarps];
};

__device__ __forceinline__ float max_over_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
    return value;
}

__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    return value;
}

// A lane's part of a row: its accesses, with zeros where they lie beyond the row.
struct RowPart {
    float values[kAccesses][kLoadWidth];

    __device__ void load(const Element* row, int lane) {
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
            const int pack = a * kRowLanes + lane % kRowLanes;
            if (pack < kPacks) {
                load_f32(row + pack * kLoadWidth, values[a]);
            } else {
#pragma unroll
                for (int i = 0; i < kLoadWidth; ++i) values[a][i] = 0.0f;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    __shared__ Smem smem;

    const QueryTile<1> tile(q_heads, sq);
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    const KeyRange range = lengths.range(0, local_window);
    const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
    const Element* key_plane = key + kv_plane;
    const Element* value_plane = value + kv_plane;
    const long long q_plane = static_cast<long long>(tile.plane) * kHeadDim;
    const Element* mask_row = mask + tile.b * mask_batch_stride + tile.h * mask_head_stride;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;

    // The end of a run may lie beyond the range; its lanes read the last key again.
    const auto row_offset = [&](unsigned int k) { return static_cast<long long>(min(k, range.end - 1)) * kHeadDim; };

    RowPart query;
    query.load(q + q_plane, lane);

    RowPart sums = {};
    float row_max = negative_infinity();
    float row_sum = 0.0f;  // of this lane's keys
    bool has_key = false;

    for (unsigned int first_key = range.begin + warp * 32; first_key < range.end; first_key += kWarps * 32) {
        const unsigned int own_key = first_key + lane;
        bool is_allowed = own_key < range.end;
        float bias = 0.0f;
        if (kHasMask && is_allowed) {
            bias = to_f32(mask_row[own_key]);
            is_allowed = bias != negative_infinity();
        }
        has_key |= __any_sync(kFullWarp, is_allowed);

        float own_dot = 0.0f;
#pragma unroll 8
        for (int turn = 0; turn < kRowLanes; ++turn) {
            RowPart row;
            row.load(key_plane + row_offset(first_key + turn * kRowsAtOnce + lane / kRowLanes), lane);
            float dot = 0.0f;
#pragma unroll
            for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
                for (int i = 0; i < kLoadWidth; ++i) dot = fmaf(query.values[a][i], row.values[a][i], dot);
            }
#pragma unroll
            for (int step = kRowLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullWarp, dot, step);
            // Key turn * kRowsAtOnce + g was summed by lane group g, and belongs to the lane of its number.
            dot = __shfl_sync(kFullWarp, dot, lane % kRowsAtOnce * kRowLanes);
            if (lane / kRowsAtOnce == turn) own_dot = dot;
        }

        const float score = is_allowed ? attention_score(own_dot, scale, softcap, bias) : negative_infinity();
        const float new_max = fmaxf(row_max, max_over_warp(score));
        const float origin = softmax_origin(new_max);
        const float rescale = expf(row_max - origin);
        const float weight = is_allowed ? expf(score - origin) : kExcluded;
        row_max = new_max;
        row_sum = fmaf(row_sum, rescale, weight);
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
            for (int i = 0; i < kLoadWidth; ++i) sums.values[a][i] *= rescale;
        }

#pragma unroll 8
        for (int turn = 0; turn < kRowLanes; ++turn) {
            const int run_key = turn * kRowsAtOnce + lane / kRowLanes;
            RowPart row;
            row.load(value_plane + row_offset(first_key + run_key), lane);
            const float key_weight = __shfl_sync(kFullWarp, weight, run_key);
            if (is_excluded(key_weight)) continue;
#pragma unroll
            for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
                for (int i = 0; i < kLoadWidth; ++i) {
                    sums.values[a][i] = fmaf(key_weight, row.values[a][i], sums.values[a][i]);
                }
            }
        }
    }

    row_sum = sum_over_warp(row_sum);
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
        const int pack = a * kRowLanes + lane;
#pragma unroll
        for (int i = 0; i < kLoadWidth; ++i) {
            float sum = sums.values[a][i];
#pragma unroll
            for (int step = kRowLanes; step < 32; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
            if (lane < kRowLanes && pack < kPacks) smem.numerator[warp][pack * kLoadWidth + i] = sum;
        }
    }
    if (lane == 0) {
        smem.row_max[warp] = row_max;
        smem.row_sum[warp] = row_sum;
        smem.has_key[warp] = has_key;
    }
    __syncthreads();

    float block_max = negative_infinity();
    bool block_has_key = false;
    for (int w = 0; w < kWarps; ++w) {
        block_max = fmaxf(block_max, smem.row_max[w]);
        block_has_key |= smem.has_key[w];
    }
    const float origin = softmax_origin(block_max);
    for (int column = threadIdx.x; column < kHeadDim; column += kThreads) {
        float numerator = 0.0f;
        float denominator = 0.0f;
        for (int w = 0; w < kWarps; ++w) {
            const float rescale = expf(smem.row_max[w] - origin);
            numerator = fmaf(smem.numerator[w][column], rescale, numerator);
            denominator = fmaf(smem.row_sum[w], rescale, denominator);
        }
        output[q_plane + column] = from_f32<Element>(normalise(numerator, denominator, block_has_key));
    }
}
