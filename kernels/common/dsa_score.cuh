// What the score kernels of the certified DsaIndexSelect share: what they multiply, their tiles, which of them a block
// computes, and what bounds the error of a row.
#pragma once

#include "common/block_scan.cuh"
#include "common/dsa_bound.cuh"
#include "common/dsa_layout.cuh"
#include "common/dsa_norm.cuh"
#include "common/element.cuh"

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kThreads = THREADS;
static_assert(kHeadDim == 64 || kHeadDim == 128, "what shared memory is laid out for");

constexpr int kColumns = COLUMNS;  // (row, head) pairs of a tile
constexpr int kTileRows = kColumns / kHeads;
static_assert(kTileRows * kHeads == kColumns && (kTileRows == 1 || kTileRows % 2 == 0), "a tile is one row, or pairs");

struct Tile {
    unsigned int row;   // of the first row, counted over all batches
    unsigned int rows;  // how many rows it has; 0 ends the sequence
    unsigned int batch;
    unsigned int key;  // the first key's position in its batch
};

struct Problem {
    const Element* query;
    const Element* weights;
    const float* bias;  // null where there are tiles
    const unsigned char* tiles;
    float* scores;
    KeyWord* key_words;
    RowBound* bounds;
    unsigned int batch, q_seq, key_seq, row_stride;
    float scale, weights_scale, error_scale;
    NormWeights norm_weights;

    __device__ __forceinline__ unsigned int key_blocks() const { return (key_seq + kBlockKeys - 1) / kBlockKeys; }
    __device__ __forceinline__ unsigned int row_tiles() const { return (q_seq + kTileRows - 1) / kTileRows; }
    __device__ __forceinline__ unsigned int n_tiles() const { return batch * key_blocks() * row_tiles(); }

    __device__ __forceinline__ Tile tile(unsigned int index) const {
        const unsigned int s0 = index % row_tiles() * kTileRows;
        const unsigned int block = index / row_tiles();
        const unsigned int b = block / key_blocks();
        return {b * q_seq + s0, min(q_seq - s0, unsigned(kTileRows)), b, block % key_blocks() * kBlockKeys};
    }
};

__device__ __forceinline__ unsigned int count_flags(uint4 flags) {
    return __popc(flags.x) + __popc(flags.y) + __popc(flags.z) + __popc(flags.w);
}

// How many tiles this block computes; where its run begins goes to shared memory, whose members `scan`, `first_vector`
// and `skipped` are for it.
template <typename Smem>
__device__ __forceinline__ unsigned int find_run(Smem& smem, const Problem& problem) {
    const unsigned int n_tiles = problem.n_tiles();
    if (problem.tiles == nullptr) {
        return (blockIdx.x + 1ull) * n_tiles / gridDim.x - 1ull * blockIdx.x * n_tiles / gridDim.x;
    }
    const uint4* vectors = reinterpret_cast<const uint4*>(problem.tiles);
    const unsigned int n_vectors = (n_tiles + 15) / 16;
    const unsigned int share = (n_vectors + kThreads - 1) / kThreads;
    const unsigned int begin = min(threadIdx.x * share, n_vectors);
    const unsigned int end = min(begin + share, n_vectors);
    unsigned int own = 0;
#pragma unroll 4
    for (unsigned int i = begin; i < end; ++i) own += count_flags(vectors[i]);
    unsigned int wanted;
    unsigned int before = block_exclusive_scan<kThreads>(own, wanted, smem.scan);
    const unsigned int first = 1ull * blockIdx.x * wanted / gridDim.x;
    if (before <= first && first < before + own) {
        unsigned int i = begin;
        for (unsigned int n; before + (n = count_flags(vectors[i])) <= first; ++i) before += n;
        smem.first_vector = i;
        smem.skipped = first - before;
    }
    return (blockIdx.x + 1ull) * wanted / gridDim.x - first;
}

// Walks the wanted tiles of the block's run; a warp's work, 128 flags at a time.
class TileWalk {
public:
    template <typename Smem>
    __device__ __forceinline__ TileWalk(const Smem& smem, const Problem& problem, unsigned int run) {
        words_ = reinterpret_cast<const unsigned int*>(problem.tiles);
        n_words_ = (problem.n_tiles() + 3) / 4;
        if (words_ == nullptr) {
            next_ = 1ull * blockIdx.x * problem.n_tiles() / gridDim.x;
        } else if (run != 0) {
            next_ = smem.first_vector * 16;
            load();
            for (unsigned int i = 0; i < smem.skipped; ++i) next();
        }
    }

    // The index of the next wanted tile. There must be one.
    __device__ __forceinline__ unsigned int next() {
        if (words_ == nullptr) return next_++;
        unsigned int lanes;
        while ((lanes = __ballot_sync(kFullWarp, flags_ != 0)) == 0) {
            next_ += 128;
            load();
        }
        const int lane = __ffs(lanes) - 1;
        const int flag = (__ffs(__shfl_sync(kFullWarp, flags_, lane)) - 1) / 8;
        if (threadIdx.x % 32 == lane) flags_ &= flags_ - 1;
        return next_ + lane * 4 + flag;
    }

private:
    __device__ __forceinline__ void load() {
        const unsigned int word = next_ / 4 + threadIdx.x % 32;
        flags_ = word < n_words_ ? words_[word] : 0;
    }

    const unsigned int* words_;
    unsigned int n_words_;
    unsigned int next_;   // the tile of this window's first flag, or the next tile where all are wanted
    unsigned int flags_;  // of four tiles: those still to come
};

// What bounds the error of one row; a warp's work.
__device__ __forceinline__ void store_bound(const Problem& problem, unsigned int row) {
    constexpr int kWidth = 16 / sizeof(Element);
    constexpr int kAccesses = kHeadDim / kWidth;  // lanes that share a head
    constexpr int kWarpHeads = 32 / kAccesses;
    constexpr int kLoads = 8;  // on their way at once
    static_assert(kHeads % (kLoads * kWarpHeads) == 0, "no head is left over");
    const int lane = threadIdx.x % 32;
    const int d = lane % kAccesses * kWidth;
    HeadSums sums;
#pragma unroll 1
    for (int h0 = lane / kAccesses; h0 < kHeads; h0 += kLoads * kWarpHeads) {
        const unsigned long long first = 1ull * row * kHeads + h0;
        Pack<Element, kWidth> packs[kLoads];
        float weights[kLoads];
        float squares[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            packs[j] = load_pack<kWidth>(problem.query + (first + j * kWarpHeads) * kHeadDim + d);
            weights[j] = to_f32(problem.weights[first + j * kWarpHeads]);
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            weights[j] = __fmul_rn(weights[j], problem.weights_scale);
            squares[j] = sums.squares<kHeadDim>(packs[j], weights[j], d, problem.norm_weights);
        }
#pragma unroll
        for (int step = 1; step < kAccesses; step *= 2) {
#pragma unroll
            for (int j = 0; j < kLoads; ++j) squares[j] += __shfl_xor_sync(kFullWarp, squares[j], step);
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            sums.add_head(squares[j], weights[j], problem.error_scale, problem.norm_weights);
        }
    }
    // Lanes of one head hold the same; the sums go over the heads that a warp has at once.
#pragma unroll
    for (int step = kAccesses; step < 32; step *= 2) sums.join(step);
    sums.is_zero = __all_sync(kFullWarp, sums.is_zero);
    sums.fuses = __all_sync(kFullWarp, sums.fuses);
    if (lane == 0) problem.bounds[row] = sums.bound<kHeadDim>(problem.scale);
}
