// Attention for f16 on the tensor cores, through the portable wmma interface (compute capability 7.0
// and later, head_dim a multiple of 16).
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B, H, sq, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// A block owns BLOCK_QUERIES rows of one plane, 16 to a warp, and walks their keys in tiles of
// BLOCK_KEYS. Both products accumulate in f32. A warp takes its scores through shared memory, where
// two lanes share a row, and keeps its 16 x D outputs in accumulator fragments. How a fragment lies
// in registers is not specified, so a per-row factor reaches it as a second fragment, loaded from a
// 16 x 16 tile with one value a row.
//
// The weights enter the second product as f16. They are scaled by 2^15, the greatest power of two
// that keeps a weight of 1 finite: weights down to 2^-39 of the largest then survive, where unscaled
// f16 would drop the tail of a long row below 2^-25. The denominator sums the rounded weights, so a
// row is a convex combination of its values to f32 accuracy, and finite where they are.
//
// 0 * NaN is NaN on a tensor core too, so values that are not finite are taken out of the tile on
// loading. Only a tile that had some adds them afterwards, to the rows that may see them.
#include <mma.h>

#include "common/attention.cuh"

using namespace nvcuda;

constexpr int kBlockQueries = BLOCK_QUERIES;
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kWarps = kThreads / 32;
constexpr int kFragment = 16;  // rows and columns of a fragment
constexpr int kHalf = kFragment / 2;
constexpr int kDimFragments = kHeadDim / kFragment;
constexpr int kKeyFragments = kBlockKeys / kFragment;
static_assert(kHeadDim % kFragment == 0, "head_dim is a multiple of 16");
static_assert(kBlockQueries == kWarps * kFragment, "a warp owns 16 query rows");
static_assert(kBlockKeys % kFragment == 0, "a tile is a whole number of fragments");

// Row strides are an odd number of 16-byte units: eight rows read at one column hit all 32 banks.
constexpr int kTileStride = kHeadDim + 8;
constexpr int kScoreStride = kBlockKeys + 4;
constexpr int kWeightStride = kBlockKeys + 8;

constexpr float kWeightScale = 32768.0f;
constexpr float kLog2E = 1.4426950408889634f;

struct Weights {
    __half values[kFragment][kWeightStride];
    alignas(32) float rows[kFragment][kFragment];  // one tile of per-row values, on its way to a fragment
};

struct Smem {
    __half q[kBlockQueries][kTileStride];
    __half k[kBlockKeys][kTileStride];
    __half v[kBlockKeys][kTileStride];
    // A warp's own: the scores of a tile, then its weights, and at the end 64 columns of the output.
    union Scratch {
        float scores[kFragment][kScoreStride];
        Weights weights;
    } warps[kWarps];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

using QueryFragment = wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major>;
using KeyFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major>;  // K^T
using ValueFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

__device__ __forceinline__ bool is_finite(__half value) { return (__half_as_ushort(value) & 0x7c00) != 0x7c00; }
__device__ __forceinline__ bool is_excluded(__half weight) { return __half_as_ushort(weight) == 0x8000; }

// Fill a tile with rows first, first + 1, ... of source that lie within `rows`, and zeros elsewhere.
// With kScrub, values that are not finite become zeros too. Returns whether there were none.
template <bool kScrub, int kTileRows>
__device__ __forceinline__ bool load_tile(
    __half (&tile)[kTileRows][kTileStride], const __half* source, unsigned int first, KeyRange rows) {
    constexpr int kPacks = kHeadDim / kLoadWidth;
    bool finite = true;
#pragma unroll 8
    for (int i = threadIdx.x; i < kTileRows * kPacks; i += kThreads) {
        const int row = i / kPacks;
        const int column = i % kPacks * kLoadWidth;
        Pack<__half, kLoadWidth> pack = {};
        if (rows.contains(first + row)) {
            pack = load_pack<kLoadWidth>(source + static_cast<long long>(first + row) * kHeadDim + column);
        }
        if (kScrub) {
#pragma unroll
            for (int j = 0; j < kLoadWidth; ++j) {
                if (is_finite(pack.values[j])) continue;
                finite = false;
                pack.values[j] = __ushort_as_half(0);
            }
        }
        store_pack(&tile[row][column], pack);
    }
    return finite;
}

// Where a lane stands in its warp's 16 rows: two lanes share a row, and of every eight columns the
// even lane has the first four.
struct LanePlace {
    int row;
    int half;

    __device__ LanePlace() : row(threadIdx.x % 32 / 2), half(threadIdx.x % 2) {}
    __device__ int column(int i) const { return i / 4 * 8 + half * 4 + i % 4; }
};
constexpr int kLaneKeys = kBlockKeys / 2;

// Spread values[kHalf] of each lane, its half of a 16-column row, into an accumulator fragment.
__device__ __forceinline__ void to_fragment(
    Weights& weights, const LanePlace& lane, const float (&values)[kHalf], Accumulator& fragment) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) weights.rows[lane.row][lane.half * kHalf + i] = values[i];
    __syncwarp();
    wmma::load_matrix_sync(fragment, &weights.rows[0][0], kFragment, wmma::mem_row_major);
}

// Add to the output the values of this tile that load_tile took out. A finite positive weight does
// not change an infinity or a NaN, and a NaN weight has spoilt the row already.
__device__ __forceinline__ void add_nonfinite_values(
    Weights& weights, const LanePlace& lane, const __half* values, Accumulator (&sums)[kDimFragments]) {
#pragma unroll
    for (int n = 0; n < kDimFragments; ++n) {
        float found[kHalf] = {};
#pragma unroll 1
        for (int j = 0; j < kBlockKeys; ++j) {
            if (is_excluded(weights.values[lane.row][j])) continue;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const int column = n * kFragment + lane.half * kHalf + i;
                const __half value = values[static_cast<long long>(j) * kHeadDim + column];
                if (!is_finite(value)) found[i] += __half2float(value);
            }
        }
        Accumulator extra;
        to_fragment(weights, lane, found, extra);
#pragma unroll
        for (int i = 0; i < extra.num_elements; ++i) sums[n].x[i] += extra.x[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) flash_attention_f16_tc(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(32) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

    const QueryTile<kBlockQueries> tile(q_heads, sq);
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    // Ranges move right with the row, so the first row begins and the last row ends what the block sees.
    const KeyRange seen{lengths.range(tile.first, local_window).begin, lengths.range(tile.last, local_window).end};

    const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
    const long long q_plane = static_cast<long long>(tile.plane) * sq * kHeadDim;

    const int warp = threadIdx.x / 32;
    const LanePlace lane;
    const unsigned int query = tile.first + warp * kFragment + lane.row;
    const KeyRange range = query < sq ? lengths.range(query, local_window) : KeyRange{0, 0};
    const Element* mask_row = mask + tile.b * mask_batch_stride + tile.h * mask_head_stride +
                              static_cast<long long>(query) * sk;
    Smem::Scratch& scratch = smem.warps[warp];

    load_tile<false>(smem.q, q + q_plane, tile.first, KeyRange{0, static_cast<unsigned int>(sq)});

    Accumulator sums[kDimFragments];
#pragma unroll
    for (int n = 0; n < kDimFragments; ++n) wmma::fill_fragment(sums[n], 0.0f);
    float row_max = negative_infinity();
    float row_sum = 0.0f;  // of this lane's keys; its neighbour's are added at the end
    bool has_key = false;

    for (unsigned int first_key = seen.begin; first_key < seen.end; first_key += kBlockKeys) {
        load_tile<false>(smem.k, key + kv_plane, first_key, seen);
        const bool finite = load_tile<true>(smem.v, value + kv_plane, first_key, seen);
        const bool all_finite = __syncthreads_and(finite);

        {
            Accumulator scores[kKeyFragments];
#pragma unroll
            for (int n = 0; n < kKeyFragments; ++n) wmma::fill_fragment(scores[n], 0.0f);
#pragma unroll
            for (int d = 0; d < kHeadDim; d += kFragment) {
                QueryFragment a;
                wmma::load_matrix_sync(a, &smem.q[warp * kFragment][d], kTileStride);
#pragma unroll
                for (int n = 0; n < kKeyFragments; ++n) {
                    KeyFragment b;
                    wmma::load_matrix_sync(b, &smem.k[n * kFragment][d], kTileStride);
                    wmma::mma_sync(scores[n], a, b, scores[n]);
                }
            }
#pragma unroll
            for (int n = 0; n < kKeyFragments; ++n) {
                wmma::store_matrix_sync(
                    &scratch.scores[0][n * kFragment], scores[n], kScoreStride, wmma::mem_row_major);
            }
        }
        __syncwarp();

        float scores[kLaneKeys];
#pragma unroll
        for (int i = 0; i < kLaneKeys; i += 4) {
            const auto pack = load_pack<4>(&scratch.scores[lane.row][lane.column(i)]);
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i + e] = pack.values[e];
        }
        __syncwarp();  // the weights take the place of the scores

        unsigned int allowed = 0;
        float tile_max = negative_infinity();
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            const unsigned int key_index = first_key + lane.column(i);
            bool is_allowed = range.contains(key_index);
            float bias = 0.0f;
            if (kHasMask && is_allowed) {
                bias = to_f32(mask_row[key_index]);
                is_allowed = bias != negative_infinity();
            }
            scores[i] = attention_score(scores[i], scale, softcap, bias);
            allowed |= static_cast<unsigned int>(is_allowed) << i;
            if (is_allowed) tile_max = fmaxf(tile_max, scores[i]);
        }
        tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullWarp, tile_max, 1));
        const float new_max = fmaxf(row_max, tile_max);
        const float origin = softmax_origin(new_max);
        const float rescale = exp2f((row_max - origin) * kLog2E);
        row_max = new_max;
        row_sum *= rescale;
        has_key |= allowed != 0;
#pragma unroll
        for (int i = 0; i < kLaneKeys; i += 4) {
            Pack<__half, 4> pack;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float weight = exp2f((scores[i + e] - origin) * kLog2E) * kWeightScale;
                pack.values[e] = __float2half_rn(allowed >> (i + e) & 1 ? weight : kExcluded);
                row_sum += __half2float(pack.values[e]);
            }
            store_pack(&scratch.weights.values[lane.row][lane.column(i)], pack);
        }

        if (!__all_sync(kFullWarp, rescale == 1.0f)) {
            float row[kHalf];
#pragma unroll
            for (int i = 0; i < kHalf; ++i) row[i] = rescale;
            Accumulator factor;
            to_fragment(scratch.weights, lane, row, factor);
#pragma unroll
            for (int n = 0; n < kDimFragments; ++n) {
#pragma unroll
                for (int i = 0; i < factor.num_elements; ++i) sums[n].x[i] *= factor.x[i];
            }
        }
        __syncwarp();

#pragma unroll
        for (int k = 0; k < kKeyFragments; ++k) {
            QueryFragment a;
            wmma::load_matrix_sync(a, &scratch.weights.values[0][k * kFragment], kWeightStride);
#pragma unroll
            for (int n = 0; n < kDimFragments; ++n) {
                ValueFragment b;
                wmma::load_matrix_sync(b, &smem.v[k * kFragment][n * kFragment], kTileStride);
                wmma::mma_sync(sums[n], a, b, sums[n]);
            }
        }
        if (!all_finite) {
            add_nonfinite_values(
                scratch.weights, lane, value + kv_plane + static_cast<long long>(first_key) * kHeadDim, sums);
        }
        __syncthreads();
    }

    const float denominator = row_sum + __shfl_xor_sync(kFullWarp, row_sum, 1);
    has_key |= __shfl_xor_sync(kFullWarp, has_key, 1);
    Element* output_row = output + q_plane + static_cast<long long>(query) * kHeadDim;
#pragma unroll
    for (int first = 0; first < kDimFragments; first += kKeyFragments) {
        __syncwarp();
#pragma unroll
        for (int n = first; n < first + kKeyFragments && n < kDimFragments; ++n) {
            wmma::store_matrix_sync(
                &scratch.scores[0][(n - first) * kFragment], sums[n], kScoreStride, wmma::mem_row_major);
        }
        __syncwarp();
        constexpr int kWidth = kLoadWidth < 4 ? kLoadWidth : 4;
        if (query < sq) {
#pragma unroll
            for (int i = 0; i < kLaneKeys; i += kWidth) {
                const int column = lane.column(i);
                if (first * kFragment + column >= kHeadDim) continue;
                float values[kWidth];
#pragma unroll
                for (int e = 0; e < kWidth; ++e) {
                    values[e] = normalise(scratch.scores[lane.row][column + e], denominator, has_key);
                }
                store_f32(output_row + first * kFragment + column, values);
            }
        }
    }
}
