// DsaIndexSelect, first launch: the score of every (query row, key) cell, in strict order.
//
//     query [B, S, H, D]   key [B, T, D]   weights [B, S, H]   bias [B, S, T] f32
//     scores [B, S, T] f32   allowed [B, S, T] u8, 0 or 1            S, H, D, T < 2^31; H, D > 0
//
// A block computes tiles of kTileRows query rows x kTileKeys keys of one batch. A thread owns one row
// and kKeys keys and walks all heads alone, kHeads at a time: dots[kHeads][kKeys] stay in registers
// over ascending d and are then added to the kKeys sums over ascending h. No sum is ever split between
// threads, which is what strict order asks for. Keys and queries pass through shared memory as f32,
// kDepth elements of D at a time, transposed so that a thread reads them four at a time.
//
// A tile without one allowed cell costs its bias reads and its writes.
#include "common/element.cuh"
#include "common/strict_score.cuh"

using Index = unsigned long long;

constexpr int kThreads = THREADS;
constexpr int kTileRows = TILE_ROWS;
constexpr int kKeys = KEYS_PER_THREAD;
constexpr int kHeads = HEADS_PER_THREAD;
constexpr int kDepth = TILE_DEPTH;
constexpr int kLoadWidth = LOAD_WIDTH;  // elements of a query or key access
static_assert(kThreads % 32 == 0 && kThreads % kTileRows == 0, "every row has the same number of threads");
static_assert(kKeys % 4 == 0 && kHeads % 4 == 0, "operands are read from shared memory four at a time");

constexpr int kKeyGroups = kThreads / kTileRows;
constexpr int kTileKeys = kKeyGroups * kKeys;

// 64 dots a thread take some 160 registers: 384 threads fill an SM.
constexpr int kBlocksPerSm = 384 / kThreads;

// kDepth consecutive elements of kVectors vectors, transposed. A warp stores one element of every
// access at once: kGroups accesses side by side in depth, of 4 * kLoadWidth vectors. With rows of
// 4 (mod 32) words those fall into 32 different banks.
constexpr int kStoreDepths = 8;
constexpr int kGroups = kStoreDepths / kLoadWidth;
static_assert(kGroups * kLoadWidth == kStoreDepths && kDepth % kStoreDepths == 0, "accesses fill the depth evenly");

template <int kVectors>
struct alignas(16) TransposedTile {
    float values[kDepth][kVectors + 4];
};

struct Smem {
    TransposedTile<kTileKeys> keys;
    TransposedTile<kTileRows * kHeads> queries;
};

// Copy elements [d0, d0 + kDepth) of every vector into a tile, zeros beyond depth; vector(v) is the
// address of vector v. Adds what this thread copied to range.
template <int kVectors, typename VectorAddress>
__device__ __forceinline__ void stage(
    TransposedTile<kVectors>& tile, VectorAddress vector, unsigned int d0, unsigned int depth, ExactRange& range) {
    constexpr int kAccesses = kVectors * kDepth / kLoadWidth;
#pragma unroll(kLoadWidth == 1 ? 4 : 2)
    for (int i = 0; i < kAccesses; i += kThreads) {
        const int access = i + threadIdx.x;
        if (kAccesses % kThreads != 0 && access >= kAccesses) break;
        const int v = access / kGroups % kVectors;
        const int d = access / (kGroups * kVectors) * kStoreDepths + access % kGroups * kLoadWidth;
        float values[kLoadWidth] = {};
        if (d0 + d < depth) load_f32(vector(v) + d0 + d, values);
#pragma unroll
        for (int j = 0; j < kLoadWidth; ++j) {
            range.add(values[j]);
            tile.values[d + j][v] = values[j];
        }
    }
}

// Where key j of a thread lies in the tile: runs of four, dealt out to the key groups in turn.
__device__ __forceinline__ unsigned int key_in_tile(int group, int j) {
    return j / 4 * (kKeyGroups * 4) + group * 4 + j % 4;
}

__device__ __forceinline__ void read_four(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

// Advance all dots of a thread by the kDepth elements in shared memory.
template <bool kExactProduct>
__device__ __forceinline__ void accumulate(float (&dots)[kHeads][kKeys], const Smem& smem, int row, int group) {
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
        alignas(16) float k[kKeys];
        alignas(16) float q[kHeads];
#pragma unroll
        for (int j = 0; j < kKeys; j += 4) read_four(&k[j], &smem.keys.values[d][key_in_tile(group, j)]);
#pragma unroll
        for (int h = 0; h < kHeads; h += 4) read_four(&q[h], &smem.queries.values[d][row * kHeads + h]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
            for (int j = 0; j < kKeys; ++j) dots[h][j] = add_product<kExactProduct>(dots[h][j], q[h], k[j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) dsa_index_select_score(
    const Element* __restrict__ query, const Element* __restrict__ key, const Element* __restrict__ weights,
    const float* __restrict__ bias, float* __restrict__ scores, unsigned char* __restrict__ allowed,
    unsigned long long batch, unsigned long long q_seq, unsigned long long heads, unsigned long long head_dim,
    unsigned long long key_seq, float scale, float weights_scale) {
    __shared__ Smem smem;
    const int group = threadIdx.x % kKeyGroups;
    const int row = threadIdx.x / kKeyGroups;

    const unsigned int n_heads = heads;
    const unsigned int depth = head_dim;
    const unsigned int row_tiles = (q_seq + kTileRows - 1) / kTileRows;
    const unsigned int key_tiles = (key_seq + kTileKeys - 1) / kTileKeys;
    const Index tiles = batch * row_tiles * key_tiles;
    for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned int t0 = tile % key_tiles * kTileKeys;
        const unsigned int s0 = tile / key_tiles % row_tiles * kTileRows;
        const Index b = tile / key_tiles / row_tiles;
        const Index row0 = b * q_seq + s0;
        const Element* tile_query = query + row0 * n_heads * depth;
        const Element* tile_key = key + (b * key_seq + t0) * depth;
        const Element* row_weights = weights + (row0 + row) * n_heads;
        const Index row_cells = (row0 + row) * key_seq + t0;
        const unsigned int tile_rows = q_seq - s0;  // those left, more than a tile or fewer
        const unsigned int tile_keys = key_seq - t0;
        const unsigned int row_keys = row < tile_rows ? tile_keys : 0;

        bool any_allowed = false;
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
            const unsigned int t = key_in_tile(group, j);
            any_allowed = any_allowed || (t < row_keys && is_allowed(bias[row_cells + t]));
        }

        float sums[kKeys] = {};
        if (__syncthreads_or(any_allowed)) {
            for (unsigned int h0 = 0; h0 < n_heads; h0 += kHeads) {
                // A vector beyond the tensor repeats the last one; what becomes of it is never written.
                const auto key_vector = [=](int v) {
                    return tile_key + Index(min(unsigned(v), tile_keys - 1)) * depth;
                };
                const auto query_vector = [=](int v) {
                    const unsigned int h = min(h0 + v % kHeads, n_heads - 1);
                    return tile_query + (Index(min(unsigned(v / kHeads), tile_rows - 1)) * n_heads + h) * depth;
                };
                float dots[kHeads][kKeys] = {};
                for (unsigned int d0 = 0; d0 < depth; d0 += kDepth) {
                    __syncthreads();  // all threads are done with the last stage
                    ExactRange range;
                    stage(smem.keys, key_vector, d0, depth, range);
                    stage(smem.queries, query_vector, d0, depth, range);
                    if constexpr (kExactProducts<Element> == ExactProducts::kInRange) {
                        // The barrier that publishes the stage also votes on it.
                        if (__syncthreads_and(range.holds())) {
                            accumulate<true>(dots, smem, row, group);
                        } else {
                            accumulate<false>(dots, smem, row, group);
                        }
                    } else {
                        __syncthreads();
                        accumulate<kExactProducts<Element> == ExactProducts::kAlways>(dots, smem, row, group);
                    }
                }
                if (row_keys == 0) continue;
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    if (h0 + h >= n_heads) break;
                    const float weight = __fmul_rn(to_f32(row_weights[h0 + h]), weights_scale);
#pragma unroll
                    for (int j = 0; j < kKeys; ++j) sums[j] = add_head(sums[j], dots[h][j], weight, scale);
                }
            }
        }

#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
            const unsigned int t = key_in_tile(group, j);
            if (t >= row_keys) continue;
            const float cell_bias = bias[row_cells + t];
            const bool is_scored = is_allowed(cell_bias);
            scores[row_cells + t] = is_scored ? finish_score(sums[j], cell_bias) : masked_score();
            allowed[row_cells + t] = is_scored;
        }
    }
}
