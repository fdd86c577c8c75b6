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
// in accumulators of 64 keys. Of 256 keys they have two, and reduce one while the tensor cores fill the other; with
// the three products of 128 keys each lets the tensor cores to the other while it reduces.
//
// Every cell is summed in the same order in every run: results do not depend on the grid.
#include "common/block_scan.cuh"
#include "common/dsa_layout.cuh"
#include "common/dsa_norm.cuh"
#include "common/element.cuh"
#include "common/mbarrier.cuh"
#include "common/strict_score.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kQueryStages = QUERY_STAGES;
constexpr int kKeyStages = KEY_STAGES;

// What the tensor cores multiply.
template <typename T>
struct PartOf {
    using Type = T;
    static constexpr int kParts = 1;
};
template <>
struct PartOf<float> {
    using Type = __nv_bfloat16;
    static constexpr int kParts = 2;
};
using Part = PartOf<Element>::Type;
constexpr int kParts = PartOf<Element>::kParts;

constexpr int kColumns = COLUMNS;  // (row, head) pairs of a tile
constexpr int kTileRows = kColumns / kHeads;
static_assert(kTileRows * kHeads == kColumns && (kTileRows == 1 || kTileRows % 2 == 0), "a tile is one row, or pairs");
static_assert(kHeadDim == 64 || kHeadDim == 128, "whole slabs of 64 columns, within shared memory");

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = THREADS;
static_assert(kThreads == (1 + kConsumers) * kWarpgroup, "a producer and the consumers");
constexpr int kConsumerThreads = kConsumers * kWarpgroup;  // each gives back the stages that it has read
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

constexpr int kSlabs = kHeadDim / 64;   // of one part
constexpr int kAllSlabs = kSlabs * kParts;
constexpr int kAtomKeys = 64;  // keys of one accumulator
constexpr int kAccumulator = kAtomKeys * kColumns / kWarpgroup;
static_assert(kBlockKeys == kConsumers * kAtomKeys * 2 / kParts, "two accumulators a warpgroup, or one of parts");

struct alignas(1024) Slab {
    Part values[8][64];  // eight rows of 128 bytes, with the 128-byte swizzle
};

struct Tile {
    unsigned int row;   // of the first row, counted over all batches
    unsigned int rows;  // how many rows it has; 0 ends the sequence
    unsigned int batch;
    unsigned int key;  // the first key's position in its batch
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

// What bounds the error of one row; a warp's work.
__device__ __forceinline__ void store_bound(const Problem& problem, unsigned int row) {
    constexpr int kWidth = 16 / sizeof(Element);
    constexpr int kAccesses = kHeadDim / kWidth;  // lanes that share a head
    constexpr int kWarpHeads = 32 / kAccesses;
    constexpr int kLoads = 8;  // on their way at once
    static_assert(kHeads % (kLoads * kWarpHeads) == 0, "no head is left over");
    const int lane = threadIdx.x % 32;
    const int d = lane % kAccesses * kWidth;
    float norm_sum = 0.0f;
    float weight_sum = 0.0f;
    float max_norm = 0.0f;
    bool is_zero = true;
    ExactRange range;
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
            NormSums sums;
            unsigned int bits = 0;
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const float value = to_f32(packs[j].values[i]);
                if (kExactProducts<Element> == ExactProducts::kInRange) range.add(value);
                bits |= __float_as_uint(value);
                sums.add(value);
                if (kParts == 2) {
                    const float rest = __fsub_rn(value, to_f32(from_f32<Part>(value)));
                    sums.add_low(to_f32(from_f32<Part>(rest)));
                }
            }
            weights[j] = __fmul_rn(weights[j], problem.weights_scale);
            is_zero = is_zero && ((bits & 0x7fffffff) == 0 || weights[j] == 0.0f);
            squares[j] = sums.weighted(problem.norm_weights, kHeadDim - d - kWidth, (kHeadDim - d + 15) / 16);
        }
#pragma unroll
        for (int step = 1; step < kAccesses; step *= 2) {
#pragma unroll
            for (int j = 0; j < kLoads; ++j) squares[j] += __shfl_xor_sync(kFullWarp, squares[j], step);
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const float norm = problem.norm_weights.norm(squares[j]);
            norm_sum += __fmaf_rn(fabsf(weights[j]), problem.error_scale, 0x1p-130f) * norm;
            weight_sum += fabsf(weights[j]);
            max_norm = norm > max_norm || isnan(norm) ? norm : max_norm;
        }
    }
    // Lanes of one head hold the same; the sums go over the heads that a warp has at once.
#pragma unroll
    for (int step = kAccesses; step < 32; step *= 2) {
        norm_sum += __shfl_xor_sync(kFullWarp, norm_sum, step);
        weight_sum += __shfl_xor_sync(kFullWarp, weight_sum, step);
        const float other = __shfl_xor_sync(kFullWarp, max_norm, step);
        max_norm = other > max_norm || isnan(other) ? other : max_norm;
    }
    const bool is_exact = __all_sync(kFullWarp, is_zero);
    const bool fuses = __all_sync(kFullWarp, range.holds());

    constexpr float kUp = 1.0f + 0x1p-10f;
    const float infinity = __int_as_float(0x7f800000);
    const float per_norm = norm_sum * kUp;
    const float most =
        0x1p120f / (fmaxf(max_norm, 1.0f) * fmaxf(problem.scale, 1.0f) * fmaxf(weight_sum, 1.0f));
    // A NaN or an infinity anywhere ends in one of these sums; fmaxf would drop a NaN.
    const bool is_regular = per_norm < infinity && weight_sum < infinity && max_norm < infinity && most > 0.0f;
    if (lane == 0) {
        const float floor = (1.0f + weight_sum) * (1.0f + problem.scale) * (kHeadDim * 0x1p-120f);
        problem.bounds[row] = {is_exact ? 0.0f : per_norm, is_exact ? 0.0f : floor, most,
                               (is_regular ? kRegularRow : 0) | (is_exact ? kExactRow : 0) | (fuses ? kFusingRow : 0)};
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
    float (&dots)[kAccumulator], const Slab (&keys)[kAllSlabs][kBlockKeys / 8], int first_key,
    const Slab (&queries)[kAllSlabs][kColumns / 8]) {
    constexpr int kProducts = kParts == 2 ? 3 : 1;
    const unsigned long long key_matrix = uniform(wgmma_descriptor(&keys[0][first_key / 8], 0));
    const unsigned long long query_matrix = uniform(wgmma_descriptor(&queries[0][0], 0));
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const int key_part = kParts == 2 && product == 0 ? kSlabs : 0;
        const int query_part = product == 1 ? kSlabs : 0;
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16) {
            const unsigned long long a = advance(key_matrix, (key_part + d / 64) * sizeof(keys[0]) + d % 64 * 2);
            const unsigned long long b = advance(query_matrix, (query_part + d / 64) * sizeof(queries[0]) + d % 64 * 2);
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

__device__ __forceinline__ void consume_parts(Smem& smem, const Problem& problem) {
    const int first_key = (threadIdx.x / kWarpgroup - 1) * kAtomKeys;
    Places places;
    Ready ready = places.next(smem);
    while (ready.tile.rows != 0) {
        places.await_keys(smem, ready);
        float dots[kAccumulator];
        float weights[kLaneWeights];
        float bias[kLaneScores];
        start_dots(dots, smem.keys[ready.key_stage], first_key, smem.queries[ready.query_stage]);
        if (ready.has_new_keys) store_norms(smem.keys[ready.key_stage], problem, ready.tile);
        read_weights(weights, smem, ready.query_stage);
        read_bias(bias, problem, ready.tile, first_key);
        const Tile tile = ready.tile;
        wgmma_wait<0>();
        ready = release(smem, ready, places);
        store_scores(dots, weights, bias, problem, tile, first_key);
    }
}

// Two tiles with the same keys a turn: while one accumulator is reduced the tensor cores fill the other, but for the
// last of each turn. (Over the end of a loop ptxas does not follow which product is still running, and would
// serialise all of them.)
__device__ __forceinline__ void consume(Smem& smem, const Problem& problem) {
    const int low_key = (threadIdx.x / kWarpgroup - 1) * 2 * kAtomKeys;
    const int high_key = low_key + kAtomKeys;
    Places places;
    Ready ready = places.next(smem);
    while (ready.tile.rows != 0) {
        places.await_keys(smem, ready);
        float low[kAccumulator];
        float high[kAccumulator];
        float weights[kLaneWeights];
        float low_bias[kLaneScores];
        float high_bias[kLaneScores];
        start_dots(low, smem.keys[ready.key_stage], low_key, smem.queries[ready.query_stage]);
        start_dots(high, smem.keys[ready.key_stage], high_key, smem.queries[ready.query_stage]);
        if (ready.has_new_keys) store_norms(smem.keys[ready.key_stage], problem, ready.tile);
        read_weights(weights, smem, ready.query_stage);
        read_bias(low_bias, problem, ready.tile, low_key);
        read_bias(high_bias, problem, ready.tile, high_key);
        wgmma_wait<1>();
        store_scores(low, weights, low_bias, problem, ready.tile, low_key);

        const Ready second = places.next(smem);
        if (second.tile.rows == 0) {
            wgmma_wait<0>();
            store_scores(high, weights, high_bias, problem, ready.tile, high_key);
            return;
        }
        if (second.has_new_keys) {
            wgmma_wait<0>();
            mbarrier_arrive(smem.empty_key[ready.key_stage]);
            places.await_keys(smem, second);
        }
        start_dots(low, smem.keys[second.key_stage], low_key, smem.queries[second.query_stage]);
        if (second.has_new_keys) store_norms(smem.keys[second.key_stage], problem, second.tile);
        wgmma_wait<1>();
        mbarrier_arrive(smem.empty_query[ready.query_stage]);
        store_scores(high, weights, high_bias, problem, ready.tile, high_key);
        start_dots(high, smem.keys[second.key_stage], high_key, smem.queries[second.query_stage]);
        read_weights(weights, smem, second.query_stage);
        read_bias(low_bias, problem, second.tile, low_key);
        read_bias(high_bias, problem, second.tile, high_key);
        wgmma_wait<1>();
        store_scores(low, weights, low_bias, problem, second.tile, low_key);
        wgmma_wait<0>();
        ready = release(smem, second, places);
        store_scores(high, weights, high_bias, problem, second.tile, high_key);
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
        if constexpr (kParts == 2) {
            consume_parts(smem, problem);
        } else {
            consume(smem, problem);
        }
    }
}
