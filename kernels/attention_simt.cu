// Attention over tiles of keys on the f32 pipes, for every element type and head size.
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B, H, sq, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// A block owns BLOCK_QUERIES rows of one plane and walks their keys in tiles of BLOCK_KEYS. Its
// threads stand in a grid, kRowLanes by 16: a thread keeps kRows x kKeys scores, and kRows x kColumns
// of the output, in registers. A warp holds whole rows, so row statistics need only shuffles.
//
// Sums are blocked: a tile's values are summed on their own and then added to the running output,
// which keeps the rounding of long rows near that of short ones, and costs nothing, since the output
// has to be rescaled at that point anyway.
#include "common/attention.cuh"

constexpr int kBlockQueries = BLOCK_QUERIES;
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kLanes = 16;  // threads side by side: over keys for the scores, over columns for the output
constexpr int kRowLanes = kThreads / kLanes;
constexpr int kRows = kBlockQueries / kRowLanes;
constexpr int kKeys = kBlockKeys / kLanes;
static_assert(kRows * kRowLanes == kBlockQueries, "the threads cover the query rows evenly");
static_assert(kKeys * kLanes == kBlockKeys && kBlockKeys % 4 == 0, "the lanes cover the keys evenly");

constexpr int kDotDim = (kHeadDim + 3) / 4 * 4;
constexpr int kPaddedDim = (kHeadDim + kLanes - 1) / kLanes * kLanes;
constexpr int kColumns = kPaddedDim / kLanes;
constexpr int kColumnWidth = kColumns % 4 == 0 ? 4 : kColumns % 2 == 0 ? 2 : 1;
constexpr int kStoreWidth = kColumnWidth < kLoadWidth ? kColumnWidth : kLoadWidth;
constexpr int kTileWidth = kLoadWidth < 4 ? kLoadWidth : 4;

// Row strides are an odd number of 16-byte units: eight rows read at one column hit all 32 banks.
constexpr int kTileStride = kPaddedDim + 4;
constexpr int kWeightStride = kBlockKeys + 4;

struct Smem {
    float q[kBlockQueries][kTileStride];
    float kv[kBlockKeys][kTileStride];  // the keys of a tile, then its values
    float weights[kBlockQueries][kWeightStride];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

// Fill a tile with rows first, first + 1, ... of source: those within `rows` as f32, others as zeros.
// Returns whether all values are finite.
template <int kTileRows>
__device__ __forceinline__ bool load_tile(
    float (&tile)[kTileRows][kTileStride], const Element* source, unsigned int first, KeyRange rows) {
    constexpr int kPacks = kHeadDim / kLoadWidth;
    bool finite = true;
#pragma unroll 4
    for (int i = threadIdx.x; i < kTileRows * kPacks; i += kThreads) {
        const int row = i / kPacks;
        const int column = i % kPacks * kLoadWidth;
        float values[kLoadWidth] = {};
        if (rows.contains(first + row)) {
            load_f32(source + static_cast<long long>(first + row) * kHeadDim + column, values);
        }
#pragma unroll
        for (int j = 0; j < kLoadWidth; j += kTileWidth) {
            Pack<float, kTileWidth> pack;
#pragma unroll
            for (int k = 0; k < kTileWidth; ++k) {
                pack.values[k] = values[j + k];
                finite &= is_finite(values[j + k]);
            }
            store_pack(&tile[row][column + j], pack);
        }
    }
    return finite;
}

// scores[r][j] = q[row r] . key[key j]
__device__ __forceinline__ void dot_products(const Smem& smem, int row_lane, int lane, float (&scores)[kRows][kKeys]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kKeys; ++j) scores[r][j] = 0.0f;
    }
#pragma unroll 2
    for (int d = 0; d < kDotDim; d += 4) {
        Pack<float, 4> k[kKeys];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) k[j] = load_pack<4>(&smem.kv[lane + j * kLanes][d]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const auto q = load_pack<4>(&smem.q[row_lane + r * kRowLanes][d]);
#pragma unroll
            for (int j = 0; j < kKeys; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[r][j] = fmaf(q.values[e], k[j].values[e], scores[r][j]);
            }
        }
    }
}

// sums[r][c] = sum over the tile's keys of weight[row r] * value[column c]. With kGuarded, excluded
// keys are left out one by one, because 0 * NaN and 0 * inf are NaN.
template <bool kGuarded>
__device__ __forceinline__ void weighted_values(
    const Smem& smem, int row_lane, int lane, float (&sums)[kRows][kColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] = 0.0f;
    }
#pragma unroll 1
    for (int key = 0; key < kBlockKeys; key += 4) {
        Pack<float, 4> weights[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) weights[r] = load_pack<4>(&smem.weights[row_lane + r * kRowLanes][key]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int c = 0; c < kColumns; c += kColumnWidth) {
                const auto value = load_pack<kColumnWidth>(&smem.kv[key + e][c * kLanes + lane * kColumnWidth]);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const float weight = weights[r].values[e];
                    if (kGuarded && is_excluded(weight)) continue;
#pragma unroll
                    for (int i = 0; i < kColumnWidth; ++i) {
                        sums[r][c + i] = fmaf(weight, value.values[i], sums[r][c + i]);
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
    return value;
}

__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    return value;
}

__device__ __forceinline__ unsigned int union_over_lanes(unsigned int bits) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) bits |= __shfl_xor_sync(kFullWarp, bits, step);
    return bits;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

    const QueryTile<kBlockQueries> tile(q_heads, sq);
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    // Ranges move right with the row, so the first row begins and the last row ends what the block sees.
    const KeyRange seen{lengths.range(tile.first, local_window).begin, lengths.range(tile.last, local_window).end};

    const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
    const long long q_plane = static_cast<long long>(tile.plane) * sq * kHeadDim;
    const Element* mask_plane = mask + tile.b * mask_batch_stride + tile.h * mask_head_stride;

    const int lane = threadIdx.x % kLanes;
    const int row_lane = threadIdx.x / kLanes;

    // Dot products read beyond the head, up to a multiple of four; loads leave those columns alone.
    for (int d = kHeadDim; d < kDotDim; ++d) {
        for (int row = threadIdx.x; row < kBlockQueries; row += kThreads) smem.q[row][d] = 0.0f;
        for (int row = threadIdx.x; row < kBlockKeys; row += kThreads) smem.kv[row][d] = 0.0f;
    }
    load_tile(smem.q, q + q_plane, tile.first, KeyRange{0, static_cast<unsigned int>(sq)});

    float sums[kRows][kColumns] = {};
    float row_max[kRows];
    float row_sum[kRows] = {};  // of this thread's keys; summed over the lanes at the end
    unsigned int has_key = 0;   // one bit a row, of this thread's keys
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = negative_infinity();

    for (unsigned int first_key = seen.begin; first_key < seen.end; first_key += kBlockKeys) {
        load_tile(smem.kv, key + kv_plane, first_key, seen);
        __syncthreads();

        float scores[kRows][kKeys];
        dot_products(smem, row_lane, lane, scores);

        float rescale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row_lane + r * kRowLanes;
            const unsigned int query = tile.first + row;
            const KeyRange range = query < sq ? lengths.range(query, local_window) : KeyRange{0, 0};
            unsigned int allowed = 0;
            float tile_max = negative_infinity();
#pragma unroll
            for (int j = 0; j < kKeys; ++j) {
                const unsigned int key_index = first_key + lane + j * kLanes;
                bool is_allowed = range.contains(key_index);
                float bias = 0.0f;
                if (kHasMask && is_allowed) {
                    bias = to_f32(mask_plane[static_cast<long long>(query) * sk + key_index]);
                    is_allowed = bias != negative_infinity();
                }
                scores[r][j] = attention_score(scores[r][j], scale, softcap, bias);
                allowed |= static_cast<unsigned int>(is_allowed) << j;
                if (is_allowed) tile_max = fmaxf(tile_max, scores[r][j]);
            }
            const float new_max = fmaxf(row_max[r], max_over_lanes(tile_max));
            const float origin = softmax_origin(new_max);
            rescale[r] = expf(row_max[r] - origin);
            row_max[r] = new_max;
            row_sum[r] *= rescale[r];
            has_key |= static_cast<unsigned int>(allowed != 0) << r;
#pragma unroll
            for (int j = 0; j < kKeys; ++j) {
                const float weight = allowed >> j & 1 ? expf(scores[r][j] - origin) : kExcluded;
                row_sum[r] += weight;
                smem.weights[row][lane + j * kLanes] = weight;
            }
        }
        __syncthreads();

        const bool finite = load_tile(smem.kv, value + kv_plane, first_key, seen);
        float tile_sums[kRows][kColumns];
        if (__syncthreads_and(finite)) {
            weighted_values<false>(smem, row_lane, lane, tile_sums);
        } else {
            weighted_values<true>(smem, row_lane, lane, tile_sums);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sums[r][c] = fmaf(sums[r][c], rescale[r], tile_sums[r][c]);
        }
        __syncthreads();
    }

    has_key = union_over_lanes(has_key);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float denominator = sum_over_lanes(row_sum[r]);
        const unsigned int query = tile.first + row_lane + r * kRowLanes;
        if (query >= sq) continue;
        Element* row = output + q_plane + static_cast<long long>(query) * kHeadDim;
#pragma unroll
        for (int c = 0; c < kColumns; c += kStoreWidth) {
            const int column = c / kColumnWidth * kColumnWidth * kLanes + lane * kColumnWidth + c % kColumnWidth;
            if (column >= kHeadDim) continue;
            float values[kStoreWidth];
#pragma unroll
            for (int i = 0; i < kStoreWidth; ++i) values[i] = normalise(sums[r][c + i], denominator, has_key >> r & 1);
            store_f32(row + column, values);
        }
    }
}
