// DsaIndexSelect, certified, second launch: approximate scores on Hopper's tensor cores, and what bounds
// their error.
//
//     query [B S H, D], key [B, T, D], weights [B S, H], tiles [B, T / 256, S / kTileRows] u8 or null
//     ->  scores [B S, row_stride] f32, without the bias, where a tile is wanted (all where tiles is null)
//         key_words [B, W]: see dsa_layout.cuh
//
// A tile is 256 keys x kTileRows rows: 256 x 128 dots, for a row brings all its heads. Keys are the M
// side of the product and (row, head) the N side, so that the four lanes that share a key hold all its
// dots and sum the heads in registers: relu, one fused multiply-add by scale * weight, two shuffles.
//
// The wanted tiles, in order of batch, key block, row tile, are cut into one run of equal length a block.
// A block keeps its keys in shared memory (two buffers, for the change to the next key block) and streams
// queries past them (kQueryStages buffers). Roles: one warp walks the tiles and issues all loads; two
// warpgroups own 128 keys each, as two accumulators of 64 keys, and reduce one while the tensor cores
// fill the other.
//
// Every cell is summed in the same order in every run: results do not depend on the grid.
#include "common/block_scan.cuh"
#include "common/dsa_layout.cuh"
#include "common/element.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kQueryStages = QUERY_STAGES;
constexpr int kKeyStages = 2;

constexpr int kColumns = 128;  // (row, head) pairs of a tile
constexpr int kTileRows = kColumns / kHeads;
static_assert(kTileRows * kHeads == kColumns && kTileRows % 2 == 0, "a tile is an even number of whole rows");
static_assert(kHeadDim == 64 || kHeadDim == 128, "whole slabs of 64 columns, within shared memory");

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = THREADS;
static_assert(kThreads == (1 + kConsumers) * kWarpgroup, "a producer and the consumers");
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kSlabs = kHeadDim / 64;
constexpr int kAtomKeys = 64;  // keys of one accumulator
constexpr int kAccumulator = kAtomKeys * kColumns / kWarpgroup;

struct alignas(1024) Slab {
    Element values[8][64];  // eight rows of 128 bytes, with the 128-byte swizzle
};

struct Tile {
    unsigned int row;   // of the first row, counted over all batches
    unsigned int rows;  // how many rows it has; 0 ends the sequence
    unsigned int batch;
    unsigned int key;  // the first key's position in its batch
};

// Weights of a lane are 32 consecutive values, apart by 36: four lanes read four different banks.
constexpr int kLaneWeights = kColumns / 4;

struct Smem {
    Slab keys[kKeyStages][kSlabs][kBlockKeys / 8];
    Slab queries[kQueryStages][kSlabs][kColumns / 8];
    alignas(16) float weights[kQueryStages][4][kLaneWeights + 4];
    Tile tiles[kQueryStages];
    Barrier full_query[kQueryStages];
    Barrier empty_query[kQueryStages];
    Barrier full_key[kKeyStages];
    Barrier empty_key[kKeyStages];
    BlockScanScratch<kThreads> scan;
    unsigned int first_vector;  // where the block's run begins: 16 tiles to a vector,
    unsigned int skipped;       // of which the first wanted ones belong to the block before
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much");

struct Problem {
    const Element* weights;
    const unsigned char* tiles;
    float* scores;
    KeyWord* key_words;
    unsigned int batch, q_seq, key_seq, row_stride;
    float scale, weights_scale, norm_floor;

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

// How many tiles this block computes; where its run begins goes to shared memory.
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

__device__ __forceinline__ void produce(
    Smem& smem, const Problem& problem, const TensorMap& query_map, const TensorMap& key_map, unsigned int n_tiles) {
    const int lane = threadIdx.x % 32;
    TileWalk walk(smem, problem, n_tiles);
    RingPlace<kQueryStages> query_place;
    RingPlace<kKeyStages> key_place;
    unsigned int batch = ~0u;
    unsigned int key = ~0u;
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const Tile tile = problem.tile(walk.next());
        const unsigned int stage = query_place.stage;
        if (tile.key != key || tile.batch != batch) {
            batch = tile.batch;
            key = tile.key;
            mbarrier_wait(smem.empty_key[key_place.stage], key_place.parity ^ 1);
            if (lane == 0) {
                Barrier& full = smem.full_key[key_place.stage];
                mbarrier_arrive_expect_tx(full, sizeof(smem.keys[0]));
                for (int slab = 0; slab < kSlabs; ++slab) {
                    tma_load_3d(smem.keys[key_place.stage][slab], key_map, full, slab * 64, key, batch,
                                CacheHint::kEvictFirst);
                }
            }
            key_place.advance();
        }
        mbarrier_wait(smem.empty_query[stage], query_place.parity ^ 1);
        Barrier& full = smem.full_query[stage];
        if (lane == 0) {
            mbarrier_arrive_expect_tx(full, sizeof(smem.queries[0]));
            for (int slab = 0; slab < kSlabs; ++slab) {
                tma_load_3d(smem.queries[stage][slab], query_map, full, slab * 64, tile.row * kHeads, 0,
                            CacheHint::kEvictLast);
            }
            smem.tiles[stage] = tile;
        }
        // Column 8 g + 2 c + p of the product belongs to lane c of a quad, as its weight 2 g + p.
        const Element* weights = problem.weights + 1ull * tile.row * kHeads;
#pragma unroll
        for (int j = 0; j < kColumns / 32; ++j) {
            const int column = j * 32 + lane;
            const float weight = column < tile.rows * kHeads ? to_f32(weights[column]) : 0.0f;
            smem.weights[stage][column / 2 % 4][column / 8 * 2 + column % 2] =
                __fmul_rn(problem.scale, __fmul_rn(weight, problem.weights_scale));
        }
        mbarrier_arrive(full);
        query_place.advance();
    }
    mbarrier_wait(smem.empty_query[query_place.stage], query_place.parity ^ 1);
    if (lane == 0) {
        smem.tiles[query_place.stage].rows = 0;
        mbarrier_arrive(smem.full_query[query_place.stage]);
    }
    mbarrier_arrive(smem.full_query[query_place.stage]);
}

// Start the dots of 64 keys with all columns.
__device__ __forceinline__ void start_dots(
    float (&dots)[kAccumulator], const Slab (&keys)[kSlabs][kBlockKeys / 8], int first_key,
    const Slab (&queries)[kSlabs][kColumns / 8]) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
        const unsigned long long a = wgmma_descriptor(&keys[d / 64][first_key / 8], 0);
        const unsigned long long b = wgmma_descriptor(&queries[d / 64][0], 0);
        Wgmma<Element, kColumns>::ss(dots, advance(a, d % 64 * 2), advance(b, d % 64 * 2), d != 0);
    }
    wgmma_commit();
}

// Sum the heads of each row for the two keys of this lane, over the lanes of its quad too, and store.
__device__ __forceinline__ void store_scores(
    const float (&dots)[kAccumulator], const float (&weights)[kLaneWeights], const Problem& problem, const Tile& tile,
    int first_key) {
    constexpr int kSums = 2 * kTileRows;
    const int lane = threadIdx.x % 32;
    float sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < kLaneWeights; ++i) {
        const int row = i / 2 * 8 / kHeads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float dot = dots[i / 2 * 4 + half * 2 + i % 2];
            sums[row * 2 + half] = __fmaf_rn(fmaxf(dot, 0.0f), weights[i], sums[row * 2 + half]);
        }
    }
    // Each step adds across a pair of lanes and leaves each of them half of the sums.
    const bool upper = lane & 2;
    const bool odd = lane & 1;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
        const float away = upper ? sums[i] : sums[i + kSums / 2];
        sums[i] = (upper ? sums[i + kSums / 2] : sums[i]) + __shfl_xor_sync(kFullWarp, away, 2);
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
        const float away = odd ? sums[i] : sums[i + kSums / 4];
        sums[i] = (odd ? sums[i + kSums / 4] : sums[i]) + __shfl_xor_sync(kFullWarp, away, 1);
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
        const int sum = upper * (kSums / 2) + odd * (kSums / 4) + i;
        const unsigned int row = sum / 2;
        const unsigned int key = tile.key + first_key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4 + sum % 2 * 8;
        if (row < tile.rows && key < problem.key_seq) {
            problem.scores[1ull * (tile.row + row) * problem.row_stride + key] = sums[i];
        }
    }
}

// The norm of one key a thread, rounded up; one KeyWord a warp.
__device__ __forceinline__ void store_norms(
    const Slab (&keys)[kSlabs][kBlockKeys / 8], const Problem& problem, const Tile& tile) {
    const int key = threadIdx.x - kWarpgroup;
    float sum = 0.0f;
    for (int slab = 0; slab < kSlabs; ++slab) {
        const Element* row = keys[slab][key / 8].values[key % 8];
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            float values[8];
            load_f32(row + (chunk ^ key % 8) * 8, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = __fmaf_rn(values[i], values[i], sum);
        }
    }
    const float norm = __fmaf_rn(sqrtf(sum), 1.0f + 0x1p-10f, problem.norm_floor);
    const bool is_regular = norm < __int_as_float(0x7f800000);
    const unsigned int irregular = __ballot_sync(kFullWarp, !is_regular);
    const unsigned int greatest = __reduce_max_sync(kFullWarp, is_regular ? __float_as_uint(norm) : 0);
    if (threadIdx.x % 32 == 0) {
        const unsigned int words = problem.key_blocks() * kBlockWords;
        problem.key_words[1ull * tile.batch * words + (tile.key + key) / 32] = {irregular, __uint_as_float(greatest)};
    }
}

__device__ __forceinline__ void read_weights(float (&weights)[kLaneWeights], const Smem& smem, unsigned int stage) {
    const float* lane_weights = smem.weights[stage][threadIdx.x % 4];
#pragma unroll
    for (int i = 0; i < kLaneWeights; i += 4) {
        *reinterpret_cast<float4*>(&weights[i]) = *reinterpret_cast<const float4*>(&lane_weights[i]);
    }
}

// A tile whose operands have arrived.
struct Ready {
    Tile tile;
    unsigned int query_stage;
    unsigned int key_stage;
    bool has_new_keys;
};

// A consumer's place in both rings.
struct Places {
    RingPlace<kQueryStages> query;
    RingPlace<kKeyStages> key;  // the key block after the present one
    unsigned int key_stage = ~0u;
    unsigned int present_key = ~0u;
    unsigned int present_batch = ~0u;

    // Wait for the next tile; one without rows ends the sequence.
    __device__ __forceinline__ Ready next(const Smem& smem) {
        mbarrier_wait(smem.full_query[query.stage], query.parity);
        const Tile tile = smem.tiles[query.stage];
        const bool has_new_keys = tile.rows != 0 && (tile.key != present_key || tile.batch != present_batch);
        if (has_new_keys) {
            mbarrier_wait(smem.full_key[key.stage], key.parity);
            key_stage = key.stage;
            present_key = tile.key;
            present_batch = tile.batch;
            key.advance();
        }
        const Ready ready = {tile, query.stage, key_stage, has_new_keys};
        query.advance();
        return ready;
    }
};

// Everything that reads the stages of a tile is done; its keys are given back once the next tile has others.
__device__ __forceinline__ void release(Smem& smem, const Ready& done, const Ready& next) {
    if (threadIdx.x % kWarpSize == 0) {
        mbarrier_arrive(smem.empty_query[done.query_stage]);
        if (next.has_new_keys) mbarrier_arrive(smem.empty_key[done.key_stage]);
    }
}

// Two tiles a turn: while one accumulator is reduced the tensor cores fill the other, but for the last of
// each turn. (Over the end of a loop ptxas does not follow which product is still running, and would
// serialise all of them.)
__device__ __forceinline__ void consume(Smem& smem, const Problem& problem) {
    const int low_key = (threadIdx.x / kWarpgroup - 1) * 2 * kAtomKeys;
    const int high_key = low_key + kAtomKeys;
    Places places;
    Ready ready = places.next(smem);
    while (ready.tile.rows != 0) {
        float low[kAccumulator];
        float high[kAccumulator];
        float weights[kLaneWeights];
        start_dots(low, smem.keys[ready.key_stage], low_key, smem.queries[ready.query_stage]);
        start_dots(high, smem.keys[ready.key_stage], high_key, smem.queries[ready.query_stage]);
        if (ready.has_new_keys) store_norms(smem.keys[ready.key_stage], problem, ready.tile);
        read_weights(weights, smem, ready.query_stage);
        wgmma_wait<1>();
        store_scores(low, weights, problem, ready.tile, low_key);

        const Ready second = places.next(smem);
        if (second.tile.rows == 0) {
            wgmma_wait<0>();
            store_scores(high, weights, problem, ready.tile, high_key);
            return;
        }
        start_dots(low, smem.keys[second.key_stage], low_key, smem.queries[second.query_stage]);
        if (second.has_new_keys) store_norms(smem.keys[second.key_stage], problem, second.tile);
        wgmma_wait<1>();
        release(smem, ready, second);
        store_scores(high, weights, problem, ready.tile, high_key);
        start_dots(high, smem.keys[second.key_stage], high_key, smem.queries[second.query_stage]);
        read_weights(weights, smem, second.query_stage);
        wgmma_wait<1>();
        store_scores(low, weights, problem, second.tile, low_key);
        wgmma_wait<0>();
        ready = places.next(smem);
        release(smem, second, ready);
        store_scores(high, weights, problem, second.tile, high_key);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) dsa_index_select_score_sm90(
    const Element* __restrict__ weights, const unsigned char* __restrict__ tiles, float* __restrict__ scores,
    KeyWord* __restrict__ key_words, const __grid_constant__ TensorMap query_map,
    const __grid_constant__ TensorMap key_map, unsigned int batch, unsigned int q_seq, unsigned int key_seq,
    unsigned int row_stride, float scale, float weights_scale, float norm_floor) {
    extern __shared__ __align__(1024) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const Problem problem = {weights, tiles, scores, key_words, batch, q_seq, key_seq, row_stride,
                             scale, weights_scale, norm_floor};
    if (threadIdx.x == 0) {
        prefetch_tensormap(query_map);
        prefetch_tensormap(key_map);
        for (int i = 0; i < kQueryStages; ++i) {
            mbarrier_init(smem.full_query[i], 1 + 32);  // the bytes, and each lane's weights
            mbarrier_init(smem.empty_query[i], kConsumerWarps);
        }
        for (int i = 0; i < kKeyStages; ++i) {
            mbarrier_init(smem.full_key[i], 1);
            mbarrier_init(smem.empty_key[i], kConsumerWarps);
        }
        fence_mbarrier_init();
    }
    const unsigned int n_tiles = find_run(smem, problem);
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x < 32) produce(smem, problem, query_map, key_map, n_tiles);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(smem, problem);
    }
}
