// DsaIndexSelect, certified: approximate scores on the tensor cores of sm_80 and later, through mma.sync, ldmatrix and
// cp.async, and what bounds their error.
//
//     query [B S H, D], key [B, T, D], weights [B S, H]; accounts, tiles: see dsa_index_select_prepare.cu
//     ->  scores [B S, row_stride] f32, without the bias, where a tile is wanted
//         key_words [B, W], bounds [B S] of the rows that need scores: see dsa_layout.cuh
//
// accounts and tiles may be null: then all scores are computed, and bias [B S, T] f32 is added to them: what it masks
// is kMaskedScore. query_vectors and key_vectors are what is multiplied: f16 and bf16 vectors as they are, of f32 ones
// the two parts [high, low] that dsa_index_select_split.cu makes of each, in three products: low * high, high * low,
// high * high.
//
// A tile is kBlockKeys keys x kTileRows rows. The wanted tiles, in order of batch, key block, row tile, are cut into
// one run of equal length a block. A warp keeps its own keys in registers and has all queries pass by, in slices of
// kSliceColumns (row, head) pairs: one read of a slice from shared memory serves all 32 vectors of a warp. Keys are the
// M side of the product and (row, head) the N side, so that the four lanes that share a key hold all its dots and sum
// the heads in registers: relu, one fused multiply-add by scale * weight, two shuffles. While the tensor cores fill
// one half of a slice the dots of the half before are reduced.
//
// Roles: eight warps multiply, one streams queries, two bound the errors of rows. Every cell is summed in the same
// order in every run: results do not depend on the grid.
#include "common/async_copy.cuh"
#include "common/dsa_score.cuh"
#include "common/half_element.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"

constexpr int kStages = QUERY_STAGES;
constexpr int kConsumerWarps = 8;
constexpr int kBoundWarps = 2;
static_assert(kThreads == (kConsumerWarps + 1 + kBoundWarps) * kWarpSize, "the roles");

constexpr int kSliceColumns = 64;
constexpr int kSliceRows = kSliceColumns / kHeads;
static_assert(kSliceRows * kHeads == kSliceColumns && kSliceRows <= 2, "a slice is a row, or two");

// A warp has two fragments of keys: sixteen keys and sixteen more, or the high and the low parts of sixteen.
constexpr int kFragments = 2;
constexpr int kFragmentKeys = 16;
constexpr int kGroups = kFragments / kParts;  // of sixteen keys
constexpr int kWarpKeys = kGroups * kFragmentKeys;
static_assert(kBlockKeys == kConsumerWarps * kWarpKeys, "the warps share a block of keys");

constexpr int kSteps = kHeadDim / 16;
constexpr int kChunks = kHeadDim / 8;  // of 16 bytes in a row of shared memory
constexpr int kRowBytes = kHeadDim * sizeof(Part);

// Half a slice at a time: kTiles products of eight columns.
constexpr int kHalfColumns = kSliceColumns / 2;
constexpr int kTiles = kHalfColumns / 8;
constexpr int kLaneWeights = kHalfColumns / 4;
constexpr bool kRowPerHalf = kSliceRows == 2;

// What a lane holds of half a slice: element [group][n][i] is of column 8 n + i % 2 from the lane's first on, which is
// 2 (lane % 4), and of key lane / 4 + 8 (i / 2) of the group.
using Dots = float[kGroups][kTiles][4];
using Keys = unsigned int[kFragments][kSteps][4];
using Sums = float[kGroups][2];

struct Slice {
    unsigned int row;   // of the first row, counted over all batches
    unsigned int rows;  // how many rows it has; 0 ends the sequence
    unsigned int batch;
    unsigned int key;         // the first key's position in its batch
    unsigned int next_batch;  // of the next slice, if that has other keys
    unsigned int next_key;
    bool has_new_keys;  // others than the slice before
    bool next_has_new;
};

// Of sixteen keys, half a KeyWord: see store_norms.
struct HalfWord {
    unsigned int irregular;
    unsigned int norm;
};

struct Smem {
    alignas(256) Part queries[kStages][kParts][kSliceColumns][kHeadDim];
    Part keys[kConsumerWarps][kFragmentKeys][kHeadDim];  // a fragment on its way to a warp's registers
    alignas(16) float weights[kStages][kSliceColumns];
    Slice slices[kStages];
    Barrier full[kStages];
    Barrier empty[kStages];
    HalfWord half_words[kConsumerWarps];
    BlockScanScratch<kThreads> scan;
    unsigned int first_vector;  // where the block's run begins: 16 tiles to a vector,
    unsigned int skipped;       // of which the first wanted ones belong to the block before
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much");

// Where a 16-byte chunk of a row lies. The chunks of eight rows at one column hit all 32 banks.
__device__ __forceinline__ unsigned int chunk_offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// Stream the queries of the block's tiles slice by slice, their weights, and what slice each is; a warp's work.
__device__ __forceinline__ void produce(
    Smem& smem, const Problem& problem, const Part* query_vectors, unsigned int n_tiles) {
    const int lane = threadIdx.x % kWarpSize;
    TileWalk walk(smem, problem, n_tiles);
    RingPlace<kStages> place;
    Tile tile = {};
    if (n_tiles != 0) tile = problem.tile(walk.next());
    bool has_new_keys = true;
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const Tile next = i + 1 < n_tiles ? problem.tile(walk.next()) : tile;
        const bool next_has_new = next.key != tile.key || next.batch != tile.batch;
        for (unsigned int r = 0; r < tile.rows; r += kSliceRows) {
            const unsigned int rows = min(tile.rows - r, unsigned(kSliceRows));
            const unsigned int columns = rows * kHeads;
            const unsigned long long vector = 1ull * (tile.row + r) * kHeads;
            float weights[kSliceColumns / kWarpSize];
#pragma unroll
            for (int j = 0; j < kSliceColumns / kWarpSize; ++j) {
                const unsigned int column = j * kWarpSize + lane;
                const float weight = column < columns ? to_f32(problem.weights[vector + column]) : 0.0f;
                weights[j] = __fmul_rn(problem.scale, __fmul_rn(weight, problem.weights_scale));
            }
            mbarrier_wait(smem.empty[place.stage], place.parity ^ 1);
            const Part* source = query_vectors + vector * (kParts * kHeadDim);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const unsigned int target = shared_address(smem.queries[place.stage][part]);
#pragma unroll 8
                for (int access = lane; access < kSliceColumns * kChunks; access += kWarpSize) {
                    const unsigned int column = access / kChunks;
                    const int chunk = access % kChunks;
                    const bool is_there = column < columns;
                    const int offset = (column * kParts + part) * kHeadDim + chunk * 8;
                    copy_async<16>(target + chunk_offset(column, chunk), source + (is_there ? offset : 0), is_there);
                }
            }
            copy_async_arrive(shared_address(&smem.full[place.stage]));
#pragma unroll
            for (int j = 0; j < kSliceColumns / kWarpSize; ++j) {
                smem.weights[place.stage][j * kWarpSize + lane] = weights[j];
            }
            if (lane == 0) {
                const bool is_last = r + kSliceRows >= tile.rows;
                smem.slices[place.stage] = {tile.row + r, rows,     tile.batch,   tile.key,
                                            next.batch,   next.key, has_new_keys, is_last && next_has_new};
            }
            has_new_keys = false;
            mbarrier_arrive(smem.full[place.stage]);
            place.advance();
        }
        has_new_keys = next_has_new;
        tile = next;
    }
    mbarrier_wait(smem.empty[place.stage], place.parity ^ 1);
    if (lane == 0) smem.slices[place.stage].rows = 0;
    copy_async_arrive(shared_address(&smem.full[place.stage]));
    mbarrier_arrive(smem.full[place.stage]);
}

// Start bringing a fragment of a warp's keys to its place in shared memory; zeros beyond the last key.
__device__ __forceinline__ void stage_keys(
    Smem& smem, const Problem& problem, const Part* key_vectors, unsigned int batch, unsigned int key, int fragment) {
    const int lane = fresh_thread() % kWarpSize;
    const int warp = fresh_thread() / kWarpSize;
    const int group = kParts == 2 ? 0 : fragment;
    const int part = kParts == 2 ? fragment : 0;
    const unsigned int first = key + warp * kWarpKeys + group * kFragmentKeys;
    const Part* source =
        key_vectors + (1ull * batch * problem.key_seq + first) * (kParts * kHeadDim) + part * kHeadDim;
    const unsigned int target = shared_address(smem.keys[warp]);
#pragma unroll
    for (int i = 0; i < kFragmentKeys * kChunks; i += kWarpSize) {
        const int row = (i + lane) / kChunks;
        const int chunk = lane % kChunks;
        const bool is_there = first + row < problem.key_seq;
        const Part* place = is_there ? source + row * (kParts * kHeadDim) + chunk * 8 : key_vectors;
        copy_async<16>(target + chunk_offset(row, chunk), place, is_there);
    }
    copy_async_commit();
}

// Wait for a staged fragment and take it into registers; its place is then free.
__device__ __forceinline__ void take_keys(unsigned int (&keys)[kSteps][4], const Smem& smem) {
    const int lane = fresh_thread() % kWarpSize;
    copy_async_wait<0>();
    __syncwarp();
    const unsigned int staged = shared_address(smem.keys[fresh_thread() / kWarpSize]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        ldmatrix_x4(keys[step], staged + chunk_offset(lane % 16, step * 2 + lane / 16));
    }
    __syncwarp();
}

// The norm of one key of a lane's quad, rounded up, from the keys that lie in the registers of its lanes: `row` says
// which of the two of a group.
__device__ __forceinline__ float key_norm(const Keys& keys, const NormWeights& weights, int group, int row) {
    using PartTraits = ElementTraits<Part>;
    // A lane has elements 0, 1, 8 and 9 of each step, counted from its own first one.
    const float after = kHeadDim - 9 - static_cast<int>(fresh_thread() % 4) * 2;
    float weighted = 0.0f;
    float below = 0.0f;
    float low_squares = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float squares[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = i / 2 * 2 + row;
            float x = PartTraits::unpack(keys[group][step][place], i % 2);
            if (kParts == 2) {
                const float low = PartTraits::unpack(keys[kFragments - 1][step][place], i % 2);
                low_squares = __fmaf_rn(low, low, low_squares);
                x += low;
            }
            squares[i] = __fmul_rn(x, x);
        }
        const float each = __fmaf_rn(after - step * 16, weights.per_element,
                                     __fmaf_rn(static_cast<float>(kSteps - step), weights.per_step, weights.first));
        weighted = __fmaf_rn(each, squares[0] + squares[1] + (squares[2] + squares[3]), weighted);
        below += __fmaf_rn(9.0f, squares[0], __fmaf_rn(8.0f, squares[1], squares[2]));
    }
    weighted = __fmaf_rn(weights.per_element, below, __fmaf_rn(weights.low, low_squares, weighted));
    weighted += __shfl_xor_sync(kFullWarp, weighted, 1);
    weighted += __shfl_xor_sync(kFullWarp, weighted, 2);
    return weights.norm(weighted);
}

// What is known of the warp's keys, from their norms. With parts two warps make a KeyWord, and meet at a barrier of
// their own.
__device__ __forceinline__ void store_norms(
    const Keys& keys, Smem& smem, const Problem& problem, const Slice& slice) {
    const int lane = fresh_thread() % kWarpSize;
    const int warp = fresh_thread() / kWarpSize;
    // Each lane of a quad keeps the norm of one of its keys; with parts, every other lane the same.
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
        const float norm = key_norm(keys, problem.norm_weights, i / 2, i % 2);
        if (lane % (kGroups * 2) == i) own = norm;
    }
    const int key = lane % (kGroups * 2) * 8 + lane / 4;
    const bool is_regular = own < __int_as_float(0x7f800000);
    unsigned int irregular = __reduce_or_sync(kFullWarp, is_regular ? 0 : 1u << key);
    unsigned int norm = __reduce_max_sync(kFullWarp, is_regular ? __float_as_uint(own) : 0);
    if constexpr (kParts == 2) {
        if (lane == 0) smem.half_words[warp] = {irregular, norm};
        named_barrier_sync(1 + warp / 2, 2 * kWarpSize);
        const HalfWord other = smem.half_words[warp ^ 1];
        named_barrier_sync(1 + warp / 2, 2 * kWarpSize);  // both have read it
        irregular |= other.irregular << kFragmentKeys;    // the even warp stores
        norm = max(norm, other.norm);
    }
    if (lane == 0 && warp % kParts == 0) {
        const unsigned int words = problem.key_blocks() * kBlockWords;
        const unsigned int word = (slice.key + warp * kWarpKeys) / 32;
        problem.key_words[1ull * slice.batch * words + word] = {irregular, __uint_as_float(norm)};
    }
}

// sums += relu(dots) * weights, for part `step` of kSteps of half a slice.
__device__ __forceinline__ void reduce_step(
    Sums& sums, const Dots& dots, const float (&weights)[kLaneWeights], int step) {
    constexpr int kCount = kGroups * kTiles * 4 / kSteps;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        const int value = step * kCount + j;
        const int n = value / (kGroups * 4);
        const int group = value / 4 % kGroups;
        const int i = value % 4;
        sums[group][i / 2] =
            __fmaf_rn(fmaxf(dots[group][n][i], 0.0f), weights[n * 2 + i % 2], sums[group][i / 2]);
    }
}

__device__ __forceinline__ void clear(Dots& dots) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) dots[group][n][i] = 0.0f;
        }
    }
}

// dots = the keys . half a slice, whose matrices begin at `columns` for this lane; meanwhile sums += the half before.
// Of pairs of parts, small products first.
__device__ __forceinline__ void multiply_half(
    Dots& dots, const Keys& keys, unsigned int columns, Sums& sums, const Dots& before,
    const float (&weights)[kLaneWeights]) {
    constexpr int kProducts = kParts == 2 ? 3 : 1;
    clear(dots);
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const int query_part = kParts == 2 && product == 0 ? 1 : 0;
        const int key_part = product == 1 ? 1 : 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const unsigned int place = (columns ^ step * 32) + query_part * kSliceColumns * kRowBytes;
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                unsigned int queries[4];
                ldmatrix_x4(queries, place + n * 8 * kRowBytes);
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    const auto& fragment = keys[kParts == 2 ? key_part : group][step];
                    mma_m16n8k16<Part>(dots[group][n], fragment, queries[0], queries[1]);
                    mma_m16n8k16<Part>(dots[group][n + 1], fragment, queries[2], queries[3]);
                }
            }
            if (product == 0) reduce_step(sums, before, weights, step);
        }
        // Or ptxas would bring forward more matrices of the next product than it has registers for.
        if (kProducts > 1) __syncwarp();
    }
}

// The key of the warp whose score this lane stores, after its quad has been summed.
__device__ __forceinline__ unsigned int lane_key() {
    const int lane = fresh_thread() % kWarpSize;
    return fresh_thread() / kWarpSize * kWarpKeys + (kGroups == 2 ? lane % 4 : lane / 2 % 2) * 8 + lane / 4;
}

constexpr unsigned int kNoRow = ~0u;

// Sum over the quad, and store the scores of the row, if it is one; the sums are clear afterwards.
__device__ __forceinline__ void finish_row(
    Sums& sums, const Problem& problem, unsigned int row, unsigned int first_key, float bias) {
    // Each step adds across a pair of lanes and leaves each of them half of the sums.
    const bool upper = fresh_thread() & 2;
    const bool odd = fresh_thread() & 1;
    float sum;
    if constexpr (kGroups == 2) {
        float kept[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float away = upper ? sums[0][i] : sums[1][i];
            kept[i] = (upper ? sums[1][i] : sums[0][i]) + __shfl_xor_sync(kFullWarp, away, 2);
        }
        sum = (odd ? kept[1] : kept[0]) + __shfl_xor_sync(kFullWarp, odd ? kept[0] : kept[1], 1);
    } else {
        const float away = upper ? sums[0][0] : sums[0][1];
        sum = (upper ? sums[0][1] : sums[0][0]) + __shfl_xor_sync(kFullWarp, away, 2);
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
    }
    const unsigned int key = first_key + lane_key();
    if (row != kNoRow && key < problem.key_seq && (kGroups == 2 || !odd)) {
        const float masked = __uint_as_float(kMaskedScore);
        const float biased = is_allowed(bias) ? __fadd_rn(sum, bias) : masked;
        problem.scores[1ull * row * problem.row_stride + key] = problem.bias == nullptr ? sum : biased;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) sums[group][0] = sums[group][1] = 0.0f;
}

__device__ __forceinline__ float read_bias(const Problem& problem, const Slice& slice, unsigned int row) {
    const unsigned int key = slice.key + lane_key();
    const bool is_there = problem.bias != nullptr && row < slice.rows && key < problem.key_seq;
    return is_there ? problem.bias[1ull * (slice.row + row) * problem.key_seq + key] : 0.0f;
}

__device__ __forceinline__ void read_weights(float (&weights)[kLaneWeights], const float* half) {
    const int lane_column = fresh_thread() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        *reinterpret_cast<float2*>(&weights[n * 2]) =
            *reinterpret_cast<const float2*>(&half[n * 8 + lane_column]);
    }
}

__device__ __forceinline__ void consume(Smem& smem, const Problem& problem, const Part* key_vectors) {
    constexpr int kLastRow = kSliceRows - 1;
    const int lane = threadIdx.x % kWarpSize;
    // Columns lie along lanes 0-7 and 16-23.
    const unsigned int first_column =
        shared_address(smem.queries) + chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    RingPlace<kStages> place;
    Keys keys;
    Dots low;   // of a slice's lower columns,
    Dots high;  // and of its upper ones, which are reduced in the next slice's time
    Sums sums = {};
    alignas(8) float weights[kLaneWeights] = {};
    clear(high);
    unsigned int row = kNoRow;  // to which `high` belongs,
    float row_bias = 0.0f;      // and its key's bias

    unsigned int key = ~0u;
    while (true) {
        mbarrier_wait(smem.full[place.stage], place.parity);
        const Slice& slice = smem.slices[place.stage];
        const bool is_end = slice.rows == 0;
        if (is_end || slice.has_new_keys) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) reduce_step(sums, high, weights, step);
            finish_row(sums, problem, row, key, row_bias);
            if (is_end) return;
            // All but the first have been staged in the time of the slice before.
            if (key == ~0u) stage_keys(smem, problem, key_vectors, slice.batch, slice.key, 0);
            row = kNoRow;
            key = slice.key;
            take_keys(keys[0], smem);
            stage_keys(smem, problem, key_vectors, slice.batch, key, 1);
            take_keys(keys[1], smem);
            store_norms(keys, smem, problem, slice);
        }
        if (slice.next_has_new) stage_keys(smem, problem, key_vectors, slice.next_batch, slice.next_key, 0);
        const unsigned int columns = first_column + place.stage * sizeof(smem.queries[0]);
        const float* const slice_weights = smem.weights[place.stage];

        multiply_half(low, keys, columns, sums, high, weights);
        finish_row(sums, problem, row, key, row_bias);
        read_weights(weights, slice_weights);
        float first_bias;
        if (kRowPerHalf) first_bias = read_bias(problem, slice, 0);
        row_bias = read_bias(problem, slice, kLastRow);

        multiply_half(high, keys, columns + kHalfColumns * kRowBytes, sums, low, weights);
        if (kRowPerHalf) finish_row(sums, problem, slice.row, key, first_bias);
        read_weights(weights, slice_weights + kHalfColumns);
        row = kLastRow < slice.rows ? slice.row + kLastRow : kNoRow;
        mbarrier_arrive(smem.empty[place.stage]);  // each thread gives back what it has read
        place.advance();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) dsa_index_select_score_mma(
    const Element* __restrict__ query, const Element* __restrict__ weights, const float* __restrict__ bias,
    const unsigned int* __restrict__ accounts, const unsigned char* __restrict__ tiles, float* __restrict__ scores,
    KeyWord* __restrict__ key_words, RowBound* __restrict__ bounds, const Part* __restrict__ query_vectors,
    const Part* __restrict__ key_vectors, unsigned int batch, unsigned int q_seq, unsigned int key_seq,
    unsigned int row_stride, unsigned int top_k, float scale, float weights_scale, float error_scale,
    float first_weight, float element_weight, float step_weight, float low_weight, float norm_floor) {
    extern __shared__ __align__(256) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const Problem problem = {query, weights, bias, tiles, scores, key_words, bounds, batch, q_seq, key_seq, row_stride,
                             scale, weights_scale, error_scale,
                             {first_weight, element_weight, step_weight, low_weight, norm_floor}};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(smem.full[i], 2 * kWarpSize);  // each lane's copies, and its weights
            mbarrier_init(smem.empty[i], kConsumerWarps * kWarpSize);
        }
    }
    const unsigned int n_tiles = find_run(smem, problem);
    __syncthreads();
    const unsigned int warp = threadIdx.x / kWarpSize;
    if (warp < kConsumerWarps) {
        consume(smem, problem, key_vectors);
    } else if (warp == kConsumerWarps) {
        produce(smem, problem, query_vectors, n_tiles);
    } else {
        const unsigned int first = blockIdx.x * kBoundWarps + warp - kConsumerWarps - 1;
        for (unsigned int row = first; row < batch * q_seq; row += gridDim.x * kBoundWarps) {
            if (accounts == nullptr || (accounts[row] & ~kBiased) > top_k) store_bound(problem, row);
        }
    }
}
