// Attention for f32 on the tensor cores of sm_80 and later: every product is three products of TF32 numbers.
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B, H, sq, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// An f32 number is a high part, its first 11 bits, and a low part, the rest, of which a product sees 11 bits too:
//   a b = a_high b_high + a_high b_low + a_low b_high, to 2^-20 of its size.
// Tensor cores cut their sums off instead of rounding them. So only short runs of products are summed there, from
// zero, and the runs are added in f32: 16 columns of a score, and a block of keys of an output, where the running
// output has to be rescaled anyway.
//
// A block owns BLOCK_QUERIES rows of one plane, 16 to a warp, and walks their keys from the last block of BLOCK_KEYS
// to the first. Blocks of keys and of values alternate in a ring of STAGES tiles of shared memory, filled STAGES - 1
// ahead.
//
// Parts of infinities and NaN are not numbers, and 0 * NaN is NaN. A tile is first computed as if all operands were
// finite. Only if a sum is not, it is computed again, guarded: then infinities have no low part and meet none, and
// values that are not finite are taken out of the tiles and added afterwards, to the rows that may see them.
#include "common/attention_fragments.cuh"
#include "common/mma.cuh"

constexpr int kBlockQueries = BLOCK_QUERIES;
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kStages = STAGES;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;
constexpr int kDepths = kPaddedDim / 8;  // of the products of a score
// How many blocks of threads a multiprocessor should hold; elsewhere it has no shared memory for them.
constexpr int kBlocks = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 ? BLOCKS : 1;
static_assert(sizeof(Element) == 4, "f32");
static_assert(kBlockQueries == kThreads / 32 * kWarpRows, "a warp owns 16 query rows");
static_assert(kBlockKeys % 8 == 0, "a block of keys is a whole number of products");

// A lane reads kVector neighbours of a row of values at once: it takes them for one column each of as many tiles.
constexpr int kVector = kPaddedDim % 32 == 0 ? 4 : 2;
constexpr int kGroupColumns = 8 * kVector;
constexpr int kGroups = kPaddedDim / kGroupColumns;

// Of a row in shared memory. Eight rows at one 16-byte chunk hit all 32 banks, and so do a warp's vectors of every
// other row.
constexpr int kTileStride = kPaddedDim + 4;

// Beside the tiles lies what does not change while a tile of rows is computed: registers are short.
struct Smem {
    float q[kBlockQueries][kTileStride];
    float ring[kStages][kBlockKeys][kTileStride];
    Rows rows;
    KeyBlocks blocks;
    const float* planes[2];  // of keys and of values
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

struct TileLayout {
    static constexpr int kColumns = kPaddedDim;
    static __device__ __forceinline__ unsigned int offset(int row, int column) {
        return (row * kTileStride + column) * sizeof(float);
    }
};

using Scores = float[kKeyTiles][4];
using Sums = float[kGroups][kVector][4];

// Of two operands one is rounded to its high part, so that what is left out has no sign of its own; the other, which
// there is more of, is cut.
enum class Cut { kRound, kTruncate };

// The parts of kCount f32 numbers as operands; products see no more than 11 bits of the low one. `cross` is the high
// part for products with low parts.
template <bool kGuarded, Cut kCut, int kCount>
struct Parts {
    unsigned int high[kCount];
    unsigned int low[kCount];
    unsigned int cross[kCount];

    __device__ __forceinline__ explicit Parts(const unsigned int (&numbers)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float number = __uint_as_float(numbers[i]);
            constexpr unsigned int kHalf = kCut == Cut::kRound && !kGuarded ? 0x1000 : 0;  // may carry to infinity
            high[i] = (numbers[i] + kHalf) & 0xffffe000u;
            low[i] = __float_as_uint(number - __uint_as_float(high[i]));
            cross[i] = high[i];
            if (kGuarded && !is_finite(number)) {
                if (number != number) high[i] = 0x7fffe000u;
                low[i] = cross[i] = 0;
            }
        }
    }
};

// scores[n] = q . keys 8 n to 8 n + 7 of a tile; `q` and `keys` are where the lane's matrices begin. Products with low
// parts are summed apart: their sum is small enough to be cut off.
template <bool kGuarded>
__device__ __forceinline__ void multiply_keys(Scores& scores, unsigned int q, unsigned int keys) {
    Scores low = {};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kDepths; d += 2) {
        unsigned int rows[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) ldmatrix_x4(rows[j], q + TileLayout::offset(0, (d + j) * 8));
        const Parts<kGuarded, Cut::kRound, 4> a0(rows[0]);
        const Parts<kGuarded, Cut::kRound, 4> a1(rows[1]);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            unsigned int numbers[4];
            ldmatrix_x4(numbers, keys + TileLayout::offset(n * 8, d * 8));
            const Parts<kGuarded, Cut::kTruncate, 4> b(numbers);
            float run[4] = {};
            mma_m16n8k8_tf32(run, a0.high, b.high[0], b.high[1]);
            mma_m16n8k8_tf32(low[n], a0.low, b.cross[0], b.cross[1]);
            mma_m16n8k8_tf32(run, a1.high, b.high[2], b.high[3]);
            mma_m16n8k8_tf32(low[n], a0.cross, b.low[0], b.low[1]);
            mma_m16n8k8_tf32(low[n], a1.low, b.cross[2], b.cross[3]);
            mma_m16n8k8_tf32(low[n], a1.cross, b.low[2], b.low[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] += run[i];
        }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] += low[n][i];
    }
}

// sums = rescale * sums + weights . values of a tile; `values` is where the lane's vectors begin. Depth t of a
// product is key 2 t, and depth t + 4 key 2 t + 1: so the weights are an operand as they lie. Only groups
// first_group <= n < end_group of the sums are computed.
template <bool kGuarded>
__device__ __forceinline__ void add_values(
    Sums& sums, int first_group, int end_group, const Scores& weights, const float (&rescale)[2], const float* values) {
#pragma unroll
    for (int n = first_group; n < end_group; ++n) {
        float runs[kVector][4] = {};
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
            const float* const row = values + k * 8 * kTileStride + n * kGroupColumns;
            const auto even = load_pack<kVector>(row);
            const auto odd = load_pack<kVector>(row + kTileStride);
            const unsigned int depths[4] = {__float_as_uint(weights[k][0]), __float_as_uint(weights[k][2]),
                                            __float_as_uint(weights[k][1]), __float_as_uint(weights[k][3])};
            const Parts<kGuarded, Cut::kRound, 4> a(depths);
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                const unsigned int numbers[2] = {__float_as_uint(even.values[v]), __float_as_uint(odd.values[v])};
                const Parts<kGuarded, Cut::kTruncate, 2> b(numbers);
                mma_m16n8k8_tf32(runs[v], a.low, b.cross[0], b.cross[1]);
                mma_m16n8k8_tf32(runs[v], a.cross, b.low[0], b.low[1]);
                mma_m16n8k8_tf32(runs[v], a.high, b.high[0], b.high[1]);
            }
        }
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][v][i] = fmaf(sums[n][v][i], rescale[i / 2], runs[v][i]);
        }
    }
}

// Replace what is not finite in a tile of values by zeros; returns whether there was anything.
__device__ __forceinline__ bool take_out_spoilt(float (&values)[kBlockKeys][kTileStride]) {
    bool found = false;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockKeys * kPaddedDim; i += kThreads) {
        float& value = values[i / kPaddedDim][i % kPaddedDim];
        if (is_finite(value)) continue;
        value = 0.0f;
        found = true;
    }
    return found;
}

// Walk the tile's keys.
template <bool kGuarded>
__device__ __forceinline__ void attend(
    Smem& smem, Sums& sums, RowState& state, unsigned int& has_key, float scale, float softcap) {
    const int lane = threadIdx.x % 32;
    const unsigned int ring = shared_address(smem.ring);
    constexpr unsigned int kStageBytes = sizeof(smem.ring[0]);
    const unsigned int q_lane =
        shared_address(smem.q) + TileLayout::offset(threadIdx.x / 32 * kWarpRows + lane % 16, lane / 16 * 4);
    const unsigned int key_lane = ring + TileLayout::offset(lane % 8, lane / 8 * 4);
    const int value_lane = lane % 4 * 2 * kTileStride + lane / 4 * kVector;

    state.reset();
    clear(sums);

    // Items in the order of their use: the keys of the last block, its values, the keys of the one before.
    const auto load = [&](int item, int from_block, unsigned int stage) {
        const int block = from_block - item / 2;
        if (block >= smem.blocks.first) {
            load_tile<TileLayout, kBlockKeys>(
                ring + stage * kStageBytes, smem.planes[item % 2], block * kBlockKeys, smem.blocks.seen);
        }
        copy_async_commit();
    };
    unsigned int stage = 0;
    // Wait for what is loaded to a stage. All warps are done with what was in the stage before, and there is room.
    const auto wait = [&] {
        copy_async_wait<kStages - 2>();
        __syncthreads();
    };
    const auto load_behind = [&](int item, int block) {
        load(item + kStages - 1, block, stage == 0 ? kStages - 1 : stage - 1);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load(i, smem.blocks.end - 1, i);

#pragma unroll 1
    for (int block = smem.blocks.end - 1; block >= smem.blocks.first; --block) {
        Scores scores;
        float rescale[2];
        wait();
        const unsigned int keys = key_lane + stage * kStageBytes;
        load_behind(0, block);
        multiply_keys<kGuarded>(scores, q_lane, keys);
        finish_scores(scores, smem.rows, scale, softcap, block * kBlockKeys + lane % 4 * 2,
                      smem.blocks.is_partial(block), has_key);
        weigh(scores, state, rescale);

        wait();
        const bool is_spoilt = kGuarded && __syncthreads_or(take_out_spoilt(smem.ring[stage]));
        const float* const values = &smem.ring[stage][0][0] + value_lane;
        add_values<kGuarded>(sums, 0, kGroups / 2, scores, rescale, values);
        // The branches of loading keep the compiler from putting off the additions of the first groups until it is
        // short of registers.
        load_behind(1, block);
        add_values<kGuarded>(sums, kGroups / 2, kGroups, scores, rescale, values);
        if (is_spoilt) add_spoilt_values(sums, smem.planes[1], smem.rows, block * kBlockKeys, kBlockKeys);
    }
    copy_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

    const QueryTile<kBlockQueries> tile(q_heads, sq, tile_index<kBlockQueries>(sq, sk, group));
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    if (threadIdx.x == 0) {
        const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
        smem.rows = {lengths,      mask + tile.b * mask_batch_stride + tile.h * mask_head_stride,
                     tile.plane,   tile.first,
                     local_window, sq,
                     sk};
        smem.blocks = KeyBlocks(
            lengths.range(tile.first, local_window), lengths.range(tile.last, local_window), kBlockKeys);
        smem.planes[0] = key + kv_plane;
        smem.planes[1] = value + kv_plane;
    }

    const float* const q_plane = q + static_cast<long long>(tile.plane) * sq * kHeadDim;
    load_tile<TileLayout, kBlockQueries>(
        shared_address(smem.q), q_plane, tile.first, KeyRange{0, static_cast<unsigned int>(sq)});
    __syncthreads();

    Sums sums;
    RowState state;
    unsigned int has_key = 0;  // with a mask: a bit a row, of this lane's keys
    attend<false>(smem, sums, state, has_key, scale, softcap);
    if (__syncthreads_or(!are_finite(sums))) attend<true>(smem, sums, state, has_key, scale, softcap);

    store_output(output + static_cast<long long>(smem.rows.plane) * sq * kHeadDim, sums, state, smem.rows, has_key);
}
