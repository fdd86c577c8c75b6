// DsaIndexSelect, certified: approximate scores on Hopper's tensor cores, and what bounds their error.
//
//     query [B S H, D], key [B, T, D], weights [B S, H]; accounts, tiles: see dsa_index_select_prepare.cu
//     ->  scores [B S, row_stride] f32, without the bias, where a tile is wanted
//         key_words [B, W], bounds [B S] of the rows that need scores: see dsa_layout.cuh
//
// accounts and tiles may be null: then all scores are computed, and bias [B S, T] f32 is added to them: what it masks
// is kMaskedScore. f16 and bf16 vectors are multiplied as they are; f32 ones as the two parts that
// dsa_index_select_split.cu makes of each, [high, low], in three products: low * high, high * low, high * high.
//
// A tile is kBlockKeys keys x kTileRows rows: kColumns columns, for a row brings all its heads. Keys are the M side of
// the product and (row, head) the N side, so that the four lanes that share a key hold all its dots and sum the heads
// in registers: relu, one fused multiply-add by scale * weight, two shuffles.
//
// The wanted tiles, in order of batch, key block, row tile, are cut into one run of equal length a block. A block
// keeps its keys in shared memory (kKeyStages buffers) and streams queries past them (kQueryStages buffers). Roles:
// one warp streams queries, one brings keys, two bound the errors of rows; two warpgroups own half of the keys each,
// in accumulators of 64 keys: two each of 256 keys, one each of the 128 that have two parts. While one warpgroup
// reduces what it has, the tensor cores work for the other.
//
// Every cell is summed in the same order in every run: results do not depend on the grid.
#include "common/dsa_score.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kQueryStages = QUERY_STAGES;
constexpr int kKeyStages = KEY_STAGES;

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
static_assert(kThreads == (1 + kConsumers) * kWarpgroup, "a producer and the consumers");
constexpr int kConsumerThreads = kConsumers * kWarpgroup;  // each gives back the stages that it has read
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

constexpr int kSlabs = kHeadDim / 64;   // of one part
constexpr int kAllSlabs = kSlabs * kParts;
constexpr int kAtomKeys = 64;  // keys of one accumulator
constexpr int kAccumulator = kAtomKeys * kColumns / kWarpgroup;
constexpr int kAtoms = 2 / kParts;  // of a warpgroup: two accumulators, or one of parts
static_assert(kBlockKeys == kConsumers * kAtoms * kAtomKeys, "the consumers divide a tile's keys");

struct alignas(1024) Slab {
    Part values[8][64];  // eight rows of 128 bytes, with the 128-byte swizzle
};

// Weights of a lane are 32 consecutive values, apart by 36: four lanes read four different banks.
constexpr int kLaneWeights = kColumns / 4;

// A lane reduces this many (row, key) sums of an accumulator, and stores a quarter of them; of two, every other lane
// one.
constexpr int kSums = 2 * kTileRows;
constexpr int kLaneScores = kSums < 4 ? 1 : kSums / 4;

struct Smem {
    Slab keys[kKeyStages][kAllSlabs][kBlockKeys / 8];
    Slab queries[kQueryStages][kAllSlabs][kColumns / 8];
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

// Stream the queries of the block's tiles, their weights, and what tile each is; a warp's work.
__device__ __forceinline__ void produce_queries(
    Smem& smem, const Problem& problem, const TensorMap& query_map, unsigned int n_tiles) {
    const int lane = threadIdx.x % 32;
    TileWalk walk(smem, problem, n_tiles);
    RingPlace<kQueryStages> place;
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const Tile tile = problem.tile(walk.next());
        mbarrier_wait(smem.empty_query[place.stage], place.parity ^ 1);
        Barrier& full = smem.full_query[place.stage];
        if (lane == 0) {
            mbarrier_arrive_expect_tx(full, sizeof(smem.queries[0]));
            for (int slab = 0; slab < kAllSlabs; ++slab) {
                tma_load_3d(smem.queries[place.stage][slab], query_map, full, slab * 64, tile.row * kHeads, 0,
                            CacheHint::kEvictLast);
            }
            smem.tiles[place.stage] = tile;
        }
        // Column 8 g + 2 c + p of the product belongs to lane c of a quad, as its weight 2 g + p.
        const Element* weights = problem.weights + 1ull * tile.row * kHeads;
#pragma unroll
        for (int j = 0; j < kColumns / 32; ++j) {
            const int column = j * 32 + lane;
            const float weight = column < tile.rows * kHeads ? to_f32(weights[column]) : 0.0f;
            smem.weights[place.stage][column / 2 % 4][column / 8 * 2 + column % 2] =
                __fmul_rn(problem.scale, __fmul_rn(weight, problem.weights_scale));
        }
        mbarrier_arrive(full);
        place.advance();
    }
    mbarrier_wait(smem.empty_query[place.stage], place.parity ^ 1);
    if (lane == 0) {
        smem.tiles[place.stage].rows = 0;
        mbarrier_arrive(smem.full_query[place.stage]);
    }
    mbarrier_arrive(smem.full_query[place.stage]);
}

// Bring keys wherever the block's tiles go over to others; a warp's work.
__device__ __forceinline__ void produce_keys(
    Smem& smem, const Problem& problem, const TensorMap& key_map, unsigned int n_tiles) {
    TileWalk walk(smem, problem, n_tiles);
    RingPlace<kKeyStages> place;
    unsigned int batch = ~0u;
    unsigned int key = ~0u;
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const Tile tile = problem.tile(walk.next());
        if (tile.key == key && tile.batch == batch) continue;
        batch = tile.batch;
        key = tile.key;
        mbarrier_wait(smem.empty_key[place.stage], place.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            Barrier& full = smem.full_key[place.stage];
            mbarrier_arrive_expect_tx(full, sizeof(smem.keys[0]));
            for (int slab = 0; slab < kAllSlabs; ++slab) {
                tma_load_3d(smem.keys[place.stage][slab], key_map, full, slab * 64, key, batch,
                            CacheHint::kEvictFirst);
            }
        }
        place.advance();
    }
}

// The descriptor, known to the compiler as the same in all lanes: the next ones then follow from it without a detour
// through each lane's registers.
__device__ __forceinline__ unsigned long long uniform(unsigned long long descriptor) {
    const unsigned int low = __shfl_sync(kFullWarp, static_cast<unsigned int>(descriptor), 0);
    return descriptor >> 32 << 32 | low;
}

// Start the dots of 64 keys with all columns; of pairs of parts, small products first.
__device__ __forceinline__ void start_dots(
    float (&dots)[kAccumulator], unsigned long long key_matrix, unsigned long long query_matrix) {
    constexpr int kProducts = kParts == 2 ? 3 : 1;
    constexpr unsigned int kKeySlab = sizeof(Slab) * (kBlockKeys / 8);
    constexpr unsigned int kQuerySlab = sizeof(Slab) * (kColumns / 8);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const int key_part = kParts == 2 && product == 0 ? kSlabs : 0;
        const int query_part = product == 1 ? kSlabs : 0;
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16) {
            const unsigned long long a = advance(key_matrix, (key_part + d / 64) * kKeySlab + d % 64 * 2);
            const unsigned long long b = advance(query_matrix, (query_part + d / 64) * kQuerySlab + d % 64 * 2);
            Wgmma<Part, kColumns>::ss(dots, a, b, product != 0 || d != 0);
        }
    }
    wgmma_commit();
}

// Where score i of a lane goes, after its quad has been summed: row and key within the tile. There is no row kTileRows.
struct Cell {
    unsigned int row, key;
};

__device__ __forceinline__ Cell lane_cell(int first_key, int i) {
    const int lane = threadIdx.x % 32;
    const int sum = lane / 2 % 2 * (kSums / 2) + lane % 2 * (kSums / 4) + i;
    const bool is_copy = kSums < 4 && lane % 2 == 1;
    const int key = first_key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4 + sum % 2 * 8;
    return {unsigned(is_copy ? kTileRows : sum / 2), unsigned(key)};
}

// The bias of the scores that a lane will store, if it is to be added here.
__device__ __forceinline__ void read_bias(
    float (&bias)[kLaneScores], const Problem& problem, const Tile& tile, int first_key) {
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) {
        const Cell cell = lane_cell(first_key, i);
        const unsigned int key = tile.key + cell.key;
        const bool is_there = problem.bias != nullptr && cell.row < tile.rows && key < problem.key_seq;
        bias[i] = is_there ? problem.bias[1ull * (tile.row + cell.row) * problem.key_seq + key] : 0.0f;
    }
}

// Sum the heads of each row for the two keys of this lane, over the lanes of its quad too, and store.
__device__ __forceinline__ void store_scores(
    const float (&dots)[kAccumulator], const float (&weights)[kLaneWeights], const float (&bias)[kLaneScores],
    const Problem& problem, const Tile& tile, int first_key) {
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
    const bool upper = threadIdx.x & 2;
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
        const float away = upper ? sums[i] : sums[i + kSums / 2];
        sums[i] = (upper ? sums[i + kSums / 2] : sums[i]) + __shfl_xor_sync(kFullWarp, away, 2);
    }
    if constexpr (kSums < 4) {
        sums[0] += __shfl_xor_sync(kFullWarp, sums[0], 1);
    } else {
#pragma unroll
        for (int i = 0; i < kLaneScores; ++i) {
            const float away = odd ? sums[i] : sums[i + kLaneScores];
            sums[i] = (odd ? sums[i + kLaneScores] : sums[i]) + __shfl_xor_sync(kFullWarp, away, 1);
        }
    }
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) {
        const Cell cell = lane_cell(first_key, i);
        const unsigned int key = tile.key + cell.key;
        if (cell.row < tile.rows && key < problem.key_seq) {
            const float masked = __uint_as_float(kMaskedScore);
            const float biased = is_allowed(bias[i]) ? __fadd_rn(sums[i], bias[i]) : masked;
            problem.scores[1ull * (tile.row + cell.row) * problem.row_stride + key] =
                problem.bias == nullptr ? sums[i] : biased;
        }
    }
}

// Eight neighbouring elements of a vector in shared memory.
__device__ __forceinline__ void read_elements(float (&values)[8], const Slab& slab, int row, int chunk) {
    const auto pack = load_pack<8>(&slab.values[row][(chunk ^ row) * 8]);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = to_f32(pack.values[i]);
}

// The norm of one key a thread, rounded up; one KeyWord a warp.
__device__ __forceinline__ void store_norms(
    const Slab (&keys)[kAllSlabs][kBlockKeys / 8], const Problem& problem, const Tile& tile) {
    const int key = threadIdx.x - kWarpgroup;
    if (key >= kBlockKeys) return;
    NormSums sums;
#pragma unroll 1
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            float high[8];
            float low[8] = {};
            read_elements(high, keys[slab][key / 8], key % 8, chunk);
            if (kParts == 2) read_elements(low, keys[kSlabs + slab][key / 8], key % 8, chunk);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums.add(high[i] + low[i]);
                if (kParts == 2) sums.add_low(low[i]);
            }
            if (chunk % 2 == 1) sums.end_step();
        }
    }
    const float norm = problem.norm_weights.norm(sums.weighted(problem.norm_weights, 0, 0));
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

// A tile whose queries have arrived.
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

    // Wait for the next tile's queries; one without rows ends the sequence.
    __device__ __forceinline__ Ready next(const Smem& smem) {
        mbarrier_wait(smem.full_query[query.stage], query.parity);
        const Tile tile = smem.tiles[query.stage];
        const bool has_new_keys = tile.rows != 0 && (tile.key != present_key || tile.batch != present_batch);
        const Ready ready = {tile, query.stage, has_new_keys ? key.stage : key_stage, has_new_keys};
        query.advance();
        return ready;
    }

    // Wait for its keys, if they are others than those before. To bring them the producer may need to have those back.
    __device__ __forceinline__ void await_keys(const Smem& smem, const Ready& ready) {
        if (!ready.has_new_keys) return;
        mbarrier_wait(smem.full_key[key.stage], key.parity);
        key_stage = key.stage;
        present_key = ready.tile.key;
        present_batch = ready.tile.batch;
        key.advance();
    }
};

// Everything that reads the stages of a tile is done; its keys are given back once the next tile has others.
__device__ __forceinline__ Ready release(Smem& smem, const Ready& done, Places& places) {
    mbarrier_arrive(smem.empty_query[done.query_stage]);
    const Ready next = places.next(smem);
    if (next.has_new_keys) mbarrier_arrive(smem.empty_key[done.key_stage]);
    return next;
}

__device__ __forceinline__ void consume(Smem& smem, const Problem& problem) {
    const int first_key = (threadIdx.x / kWarpgroup - 1) * kAtoms * kAtomKeys;
    Places places;
    Ready ready = places.next(smem);
    while (ready.tile.rows != 0) {
        places.await_keys(smem, ready);
        float dots[kAtoms][kAccumulator];
        float weights[kLaneWeights];
        float bias[kAtoms][kLaneScores];
        const unsigned long long keys = uniform(wgmma_descriptor(&smem.keys[ready.key_stage][0][first_key / 8], 0));
        const unsigned long long queries = uniform(wgmma_descriptor(smem.queries[ready.query_stage], 0));
#pragma unroll
        for (int i = 0; i < kAtoms; ++i) start_dots(dots[i], advance(keys, i * kAtomKeys / 8 * sizeof(Slab)), queries);
        if (ready.has_new_keys) store_norms(smem.keys[ready.key_stage], problem, ready.tile);
        read_weights(weights, smem, ready.query_stage);
#pragma unroll
        for (int i = 0; i < kAtoms; ++i) read_bias(bias[i], problem, ready.tile, first_key + i * kAtomKeys);
        const Tile tile = ready.tile;
        if constexpr (kAtoms == 2) {
            wgmma_wait<1>();
            store_scores(dots[0], weights, bias[0], problem, tile, first_key);
        }
        wgmma_wait<0>();
        ready = release(smem, ready, places);
        constexpr int kLast = kAtoms - 1;
        store_scores(dots[kLast], weights, bias[kLast], problem, tile, first_key + kLast * kAtomKeys);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) dsa_index_select_score_sm90(
    const Element* __restrict__ query, const Element* __restrict__ weights, const float* __restrict__ bias,
    const unsigned int* __restrict__ accounts, const unsigned char* __restrict__ tiles, float* __restrict__ scores,
    KeyWord* __restrict__ key_words, RowBound* __restrict__ bounds, const __grid_constant__ TensorMap query_map,
    const __grid_constant__ TensorMap key_map, unsigned int batch, unsigned int q_seq, unsigned int key_seq,
    unsigned int row_stride, unsigned int top_k, float scale, float weights_scale, float error_scale,
    float first_weight, float element_weight, float step_weight, float low_weight, float norm_floor) {
    extern __shared__ __align__(1024) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const Problem problem = {query, weights, bias, tiles, scores, key_words, bounds, batch, q_seq, key_seq, row_stride,
                             scale, weights_scale, error_scale,
                             {first_weight, element_weight, step_weight, low_weight, norm_floor}};
    if (threadIdx.x == 0) {
        prefetch_tensormap(query_map);
        prefetch_tensormap(key_map);
        for (int i = 0; i < kQueryStages; ++i) {
            mbarrier_init(smem.full_query[i], 1 + 32);  // the bytes, and each lane's weights
            mbarrier_init(smem.empty_query[i], kConsumerThreads);
        }
        for (int i = 0; i < kKeyStages; ++i) {
            mbarrier_init(smem.full_key[i], 1);
            mbarrier_init(smem.empty_key[i], kConsumerThreads);
        }
        fence_mbarrier_init();
    }
    const unsigned int n_tiles = find_run(smem, problem);
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<kProducerRegisters>();
        const unsigned int warp = threadIdx.x / 32;
        if (warp == 0) {
            produce_queries(smem, problem, query_map, n_tiles);
        } else if (warp == 1) {
            produce_keys(smem, problem, key_map, n_tiles);
        } else {
            for (unsigned int row = blockIdx.x * 2 + warp - 2; row < batch * q_seq; row += gridDim.x * 2) {
                if (accounts == nullptr || (accounts[row] & ~kBiased) > top_k) store_bound(problem, row);
            }
        }
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(smem, problem);
    }
}
