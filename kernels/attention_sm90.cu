// Attention for f16 and bf16 on Hopper (sm_90a): tensor memory accelerator, warpgroup matrix products, and
// warps with roles.
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B * H, sq, D]            as tensor maps (D, sq, B * H), boxes (64, 64, 1)
//   key, value  [B * H / group, sk, D]    as tensor maps (D, sk, B * H / group), boxes (64, BLOCK_KEYS, 1)
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// One block a multiprocessor runs for the whole launch and takes tiles of 64 * CONSUMERS query rows of one
// plane from a counter, the heaviest first. Its first warpgroup feeds the others: thread 0 issues every
// load, a tile ahead of the computation; three more warps look for values that are not finite where that is
// called for. Each other warpgroup, a consumer, owns 64 rows of the tile and walks their keys from the last block
// to the first.
//
// A consumer keeps two products in flight, the scores of the next block behind the weighted values of this
// one, and computes the softmax under them. Consumers issue in turns, so that one has the tensor cores
// while another has the exponential unit. The first scores of a tile are issued behind the last values of
// the tile before, so the tensor cores do not drain between tiles.
// tests/ops/test_attention_sm90_barriers.py is a model of the barriers. Each warp of a consumer copies its own
// rows of a mask, a block ahead, and waits for nobody else.
//
// A row's weights are measured from a maximum that it has seen, which need not be its latest. Of a tile's first
// block the maxima are found; of every later one the weights are computed at once, in the hope that none is too
// large. Their sums, which are needed anyhow, tell: where one is too large or not a number, the warp computes its
// scores again, finds their maxima, and the origin moves. With a mask, which would have to be read again too,
// scores are looked at first. Softcap is part of the exponent where dot products are small.
//
// The weights enter the second product as 16-bit numbers. In f16 they are scaled by 2^8: a lane's 32 weights of a
// row may all be that, 2^15 is the greatest power of two, and weights down to 2^-32 of the largest survive.
//
// 0 * NaN is NaN on a tensor core too: a value that is not finite spoils rows that may not see it. Where an output
// is not finite, its tile is computed again, with care, as are all that follow: in blocks that some row may not see
// whole, values that are not finite are taken out of shared memory and added afterwards, to the rows that may see
// them.
#include "common/async_copy.cuh"
#include "common/attention.cuh"
#include "common/half_element.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kConsumers = CONSUMERS;  // warpgroups that compute
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kQueryStages = QUERY_STAGES;  // tiles of queries in shared memory
constexpr int kKeyStages = KEY_STAGES;      // blocks of keys there
constexpr int kValueStages = VALUE_STAGES;  // and of values
constexpr int kMaskWidth = MASK_WIDTH;  // mask elements that one copy may move
constexpr int kWarpgroup = 128;
constexpr int kRows = 64;  // query rows of a consumer
constexpr int kTileRows = kRows * kConsumers;
constexpr int kSlabColumns = 64;  // 128 bytes: one swizzled row
constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
constexpr int kPaddedDim = (kHeadDim + 31) / 32 * 32;
constexpr int kCheckers = 3;  // warps that look for values that are not finite
static_assert(sizeof(Element) == 2, "f16 or bf16");
static_assert(kMaskWidth == 2 || kMaskWidth == 4 || kMaskWidth == 8, "a copy of 4, 8 or 16 bytes");
static_assert(kHeadDim % 8 == 0, "rows are a multiple of 16 bytes");
static_assert(kBlockKeys % 32 == 0 && kBlockKeys <= 128, "a block of keys is one box and one product");
static_assert(kConsumers == 2 || kConsumers == 3, "the registers are dealt for two or three consumers");
static_assert(kThreads == kWarpgroup * (1 + kConsumers), "a producer warpgroup and the consumers");

// Whether the softmax of a tile's first block may be one of half its keys: where ranges end there, a warp's rows may
// see no more.
constexpr bool kHasHalves = kCausal && !kHasMask;

// Whether a consumer passes over a block that only other rows of its tile see: the last one of a tile, or with a window
// the first one. Larger heads gain nothing by it, and three consumers with a mask have no registers for it.
constexpr bool kMaySkip = kHeadDim <= 64 && (kHasWindow || (kCausal && kTileRows > kBlockKeys && !kHasMask));

// Registers a thread after they are dealt out; the block has 65536.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
static_assert(kWarpgroup * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "they fit");

// One tile of work, as the producer hands it out. `blocks` blocks of keys end at block `last_block`; a tile
// without keys has one, in which no key is allowed.
struct Tile {
    int plane;  // b * q_heads + h, or one of the following
    int first;  // query row
    int last_block;
    int blocks;
    int full_begin;  // blocks in [full_begin, full_end) lie within every row's range
    int full_end;
    Lengths lengths;
    const Element* mask;  // the plane's row `first`, in the mailbox
    bool is_careful;      // checkers look after the values that some row may not see

    static constexpr int kIdle = -1;  // no tile, but another mailbox follows
    static constexpr int kEnd = -2;   // and here none

    // Whether some row may not see all of a block for its range.
    __device__ __forceinline__ bool is_cut(int block) const {
        return block >= full_end || (kHasWindow && block < full_begin);
    }
    // The same for any reason; a mask may be one in every block.
    __device__ __forceinline__ bool is_partial(int block) const { return kHasMask || is_cut(block); }
    // Whether checkers see to the values of a block.
    __device__ __forceinline__ bool is_checked(int block) const { return is_careful && is_partial(block); }
    // Whether values that some row may not see can have spoilt the tile.
    __device__ __forceinline__ bool may_be_spoilt() const {
        return !is_careful && (is_partial(last_block) || is_partial(last_block - blocks + 1));
    }
};

// What a consumer's rows see of a tile.
struct Share {
    static constexpr unsigned int kLast = 1;
    static constexpr unsigned int kFirst = 2;

    unsigned int skips;  // kLast, kFirst: nothing of the tile's last block, of its first
    int full_begin;      // blocks in [full_begin, full_end) lie within the range of each of these rows
    int full_end;
};

constexpr float kLog2E = 1.4426950408889634f;

// What turns a dot product into a score, and a score into an exponent. Without softcap and mask dot products serve as
// scores, and their scale is left to the exponent.
//
// Where scores are far below the cap, exponents are a polynomial of the dot products: log2(e) softcap tanh(x) =
// dot * (c0 + c1 dot^2 + c2 dot^4), with a relative error of 4e-7 where |x| <= kSmallArgument. The last term is
// positive: of a dot product of -inf the exponent is -inf.
constexpr bool kWeighsDots = kHasSoftcap && !kHasMask;
constexpr float kSmallArgument = 0.25f;
struct ScoreScale {
    float cap;   // scale / softcap: dot products to arguments x of tanh(x) = 1 - 2 / (e^2x + 1)
    float mask;  // units of the mask to one of a dot product, or of its tanh
    float log2;  // units of log2 to one of a score
    float c0, c1, c2;
    float max_square;  // the greatest square of a dot product for which the polynomial holds

    __device__ __forceinline__ void set(float scale, float softcap) {
        cap = kHasSoftcap ? scale / softcap : 0.0f;
        mask = kHasSoftcap ? softcap : scale;
        log2 = kHasMask ? kLog2E : mask * kLog2E;
        if (!kWeighsDots) return;
        const float unit = scale * kLog2E;
        c0 = 9.9999960e-1f * unit;
        c1 = -3.3321908e-1f * unit * (cap * cap);
        c2 = 1.2841613e-1f * unit * (cap * cap) * (cap * cap);
        // Nothing over- or underflows in there.
        const bool is_common = fabsf(log2f(cap)) < 20.0f && fabsf(log2f(unit)) < 20.0f;
        const float max_dot = kSmallArgument * softcap / scale;
        max_square = is_common ? max_dot * max_dot : -1.0f;
    }
};

struct OperandBuffers {
    Element q[kQueryStages][kConsumers][kSlabs][kRows][kSlabColumns];  // and outputs, once consumers are done with q
    Element k[kKeyStages][kSlabs][kBlockKeys][kSlabColumns];
    Element v[kValueStages][kSlabs][kBlockKeys][kSlabColumns];
};

struct Smem : OperandBuffers {
    // Of a block, as a consumer's warps copy it, each its own rows. They are 16 bytes longer than they need be, so that
    // the same chunk of eight of them lies in different banks.
    Element mask[kHasMask ? kTileRows : 1][kBlockKeys + 8];
    uint4 spoilt[kQueryStages][kConsumers];  // a word a warp: some of its output may be spoilt
    Tile tiles[kQueryStages];  // with the q buffer of the same index
    Share shares[kQueryStages][kConsumers];
    ScoreScale scale;  // with softcap, for registers are short
    bool is_careful;   // whether all tiles are from now on: the producer's, for the same reason
    unsigned int found[kValueStages][kCheckers];  // by the checkers in a block of values
    Barrier q_full[kQueryStages][kConsumers];
    Barrier q_empty[kQueryStages];
    Barrier k_full[kKeyStages];
    Barrier k_empty[kKeyStages];
    Barrier v_full[kValueStages];
    Barrier v_empty[kValueStages];
    Barrier checked[kValueStages];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

constexpr unsigned int kQueryBytes = sizeof(Element) * kSlabs * kRows * kSlabColumns;  // of one consumer
constexpr unsigned int kKeyBytes = sizeof(Element) * kSlabs * kBlockKeys * kSlabColumns;

// Named barriers. 0 is __syncthreads.
enum NamedBarrier { kTurnBarrier = 1, kOutputBarrier = kTurnBarrier + kConsumers };

struct Params {
    const Element* value;  // what the value map describes
    const Element* mask;
    const int* total_lengths;
    const int* past_lengths;
    unsigned int* capture_error;
    unsigned int* tile_counter;
    int q_heads;
    int group;
    int sq;
    int sk;
    int kv_capacity;
    int tiles;
    int planes_per_section;
    long long mask_batch_stride;
    long long mask_head_stride;
    int local_window;
    float scale;
    float softcap;
};

// ---- producer --------------------------------------------------------------------------------------------

// Tile `index` of the launch. Planes go in sections whose keys and values fit in the level-2 cache together;
// within a section the heaviest tiles come first. What is left over goes with the last section: a small one of
// its own would end the launch with heavy tiles.
__device__ __forceinline__ void make_tile(
    Tile& tile, Share (&shares)[kConsumers], const Params& params, unsigned int index) {
    const unsigned int row_tiles = (params.sq + kTileRows - 1) / kTileRows;
    const unsigned int planes = params.tiles / row_tiles;
    const unsigned int last_section = planes / params.planes_per_section - 1;
    const unsigned int section = min(index / (row_tiles * params.planes_per_section), last_section);
    const unsigned int first_plane = section * params.planes_per_section;
    const unsigned int section_planes = section < last_section ? params.planes_per_section : planes - first_plane;
    const unsigned int in_section = index - first_plane * row_tiles;
    const unsigned int row_tile = in_section / section_planes;
    const unsigned int plane = first_plane + in_section % section_planes;
    const int first = (kCausal ? row_tiles - 1 - row_tile : row_tile) * kTileRows;
    if (kHasMask) {
        tile.mask = params.mask + plane / params.q_heads * params.mask_batch_stride +
                    plane % params.q_heads * params.mask_head_stride + static_cast<long long>(first) * params.sk;
    }
    const Lengths lengths(params.total_lengths, params.past_lengths, plane / params.q_heads, params.sq, params.sk,
                          params.capture_error);
    tile.plane = plane;
    tile.first = first;
    tile.lengths = lengths;
    // Ranges move right with the row.
    const KeyRange first_range = lengths.range(first, params.local_window);
    const int first_block = first_range.begin / kBlockKeys;
    tile.full_end = first_range.end / kBlockKeys;
    const KeyRange last_range = lengths.range(min(first + kTileRows, params.sq) - 1, params.local_window);
    const int last_block = max(static_cast<int>((last_range.end + kBlockKeys - 1) / kBlockKeys) - 1, first_block);
    tile.full_begin = (last_range.begin + kBlockKeys - 1) / kBlockKeys;
    tile.last_block = last_block;
    tile.blocks = last_block - first_block + 1;
#pragma unroll
    for (int consumer = 0; consumer < kConsumers && kMaySkip; ++consumer) {
        const int row = min(first + consumer * kRows, params.sq - 1);
        const KeyRange begins = lengths.range(row, params.local_window);
        const KeyRange ends = lengths.range(min(row + kRows, params.sq) - 1, params.local_window);
        const bool skips_first = kHasWindow && static_cast<int>(begins.begin / kBlockKeys) > first_block;
        const bool skips_last = last_block > first_block + skips_first &&
                                static_cast<int>(ends.end) <= last_block * kBlockKeys;
        shares[consumer] = {(skips_last ? Share::kLast : 0) | (skips_first ? Share::kFirst : 0),
                            static_cast<int>((ends.begin + kBlockKeys - 1) / kBlockKeys),
                            static_cast<int>(begins.end / kBlockKeys)};
    }
}

// Thread 0: load every tile's queries, and its blocks of keys and values in the order of their use. Values
// follow one block behind the keys, across the end of a tile too.
__device__ __forceinline__ void produce(Smem& smem, const Params& params, const TensorMap& q_map,
                                        const TensorMap& key_map, const TensorMap& value_map) {
    RingPlace<kQueryStages> q_place;
    RingPlace<kKeyStages> k_place;
    RingPlace<kValueStages> v_place;

    int value_plane = 0;
    int value_block = -1;
    const auto load_values = [&] {
        if (value_block < 0) return;
        mbarrier_wait(smem.v_empty[v_place.stage], v_place.parity ^ 1);
        mbarrier_arrive_expect_tx(smem.v_full[v_place.stage], kKeyBytes);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            tma_load_3d(smem.v[v_place.stage][slab], value_map, smem.v_full[v_place.stage], slab * kSlabColumns,
                        value_block * kBlockKeys, value_plane, CacheHint::kEvictLast);
        }
        v_place.advance();
        value_block = -1;
    };

    // A tile that turns out to be spoilt is handed out again where it lies, to be computed with care, and so are all
    // that follow. At the end idle mailboxes go round until nothing is left that may be spoilt.
    smem.is_careful = false;
    int idle = 0;  // mailboxes in a row
    unsigned int index = blockIdx.x;
    while (true) {
        mbarrier_wait(smem.q_empty[q_place.stage], q_place.parity ^ 1);
        Tile& tile = smem.tiles[q_place.stage];
        unsigned int spoilt = 0;
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            const uint4 warps = smem.spoilt[q_place.stage][consumer];
            spoilt |= warps.x | warps.y | warps.z | warps.w;
        }
        if (spoilt != 0) {
            smem.is_careful = true;
        } else if (index < params.tiles) {
            make_tile(tile, smem.shares[q_place.stage], params, index);
            // The count wraps to 0 with the last request of the launch: the next launch finds it as this one did.
            index = gridDim.x + atomicInc(params.tile_counter, params.tiles - 1);
        } else {
            load_values();
            tile.plane = idle < kQueryStages - 1 ? Tile::kIdle : Tile::kEnd;
#pragma unroll
            for (int consumer = 0; consumer < kConsumers; ++consumer) {
                smem.spoilt[q_place.stage][consumer] = make_uint4(0, 0, 0, 0);
                mbarrier_arrive(smem.q_full[q_place.stage][consumer]);
            }
            if (tile.plane == Tile::kEnd) return;
            ++idle;
            q_place.advance();
            continue;
        }
        idle = 0;
        tile.is_careful = smem.is_careful;
        const int kv_plane = tile.plane / params.group;
        const int last_block = tile.last_block;
        const int first_block = last_block - tile.blocks + 1;
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            Barrier& full = smem.q_full[q_place.stage][consumer];
            mbarrier_arrive_expect_tx(full, kQueryBytes);
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                tma_load_3d(smem.q[q_place.stage][consumer][slab], q_map, full, slab * kSlabColumns,
                            tile.first + consumer * kRows, tile.plane, CacheHint::kEvictFirst);
            }
        }
        q_place.advance();
        for (int block = last_block; block >= first_block; --block) {
            mbarrier_wait(smem.k_empty[k_place.stage], k_place.parity ^ 1);
            mbarrier_arrive_expect_tx(smem.k_full[k_place.stage], kKeyBytes);
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                tma_load_3d(smem.k[k_place.stage][slab], key_map, smem.k_full[k_place.stage], slab * kSlabColumns,
                            block * kBlockKeys, kv_plane, CacheHint::kEvictLast);
            }
            k_place.advance();
            load_values();
            value_plane = kv_plane;
            value_block = block;
        }
    }
}

// The tile in a mailbox. Lane 0 reads it for its warp: what one lane has read it may give back without waiting for the
// others, and what it hands around is the same in every lane for the compiler too.
__device__ __forceinline__ Tile read_tile(const Tile& mailbox) {
    constexpr int kWords = sizeof(Tile) / sizeof(unsigned int);
    const auto* const from = reinterpret_cast<const unsigned int*>(&mailbox);
    alignas(Tile) unsigned int words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(kFullWarp, threadIdx.x % 32 == 0 ? from[i] : 0, 0);
    return reinterpret_cast<const Tile&>(words);
}

// ---- checkers --------------------------------------------------------------------------------------------

// threadIdx.x, read anew: what depends on it is not kept in registers, which are short.
__device__ __forceinline__ int read_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// A word of two elements: the signs of those that are not finite.
__device__ __forceinline__ unsigned int spoilt_signs(unsigned int word) {
    constexpr unsigned int kExponent = Traits::kInfinity * 0x00010001u;
    constexpr unsigned int kCarry = (0x8000 - Traits::kInfinity) * 0x00010001u;
    return ((word & kExponent) + kCarry) & 0x80008000u;  // an exponent of ones carries into the sign
}

// What a checker found in a block of values.
constexpr unsigned int kRemoved = 1;    // something that is not finite
constexpr unsigned int kMayBeSeen = 2;  // and at a key that some row may see

// Replace values that are not finite by zeros in a block of values, of which no row sees keys from `end_key` on.
__device__ __forceinline__ unsigned int scrub(
    Element (&values)[kSlabs][kBlockKeys][kSlabColumns], int end_key) {
    constexpr int kRowChunks = kSlabColumns * sizeof(Element) / sizeof(uint4);
    constexpr int kChunks = kSlabs * kBlockKeys * kRowChunks;
    uint4* const chunks = reinterpret_cast<uint4*>(&values[0][0][0]);
    unsigned int found = 0;
#pragma unroll 1
    for (int i = read_thread() - 32; i < kChunks; i += 32 * kCheckers) {
        const uint4 chunk = chunks[i];
        const unsigned int words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const unsigned int signs = spoilt_signs(words[w]);
            if (signs == 0) continue;
            reinterpret_cast<unsigned int*>(&chunks[i])[w] = words[w] & ~(signs | (signs - (signs >> 15)));
            found |= i / kRowChunks % kBlockKeys < end_key ? kRemoved | kMayBeSeen : kRemoved;
        }
    }
    return found;
}

// Three warps of the producer's warpgroup: before consumers read a block of values that some row may not see
// whole, take out of it what is not finite, if the tile is to be computed with care. They follow the values block
// by block, and release each as the consumers do: a parity says only whether the phase is this one or the one
// before.
__device__ __forceinline__ void check(Smem& smem, const Params& params) {
    const bool is_elected = threadIdx.x % 32 == 0;
    RingPlace<kQueryStages> q_place;
    RingPlace<kValueStages> v_place;
    RingPlace<kValueStages> check_place;
    while (true) {
        mbarrier_wait(smem.q_full[q_place.stage][0], q_place.parity);
        const Tile& tile = smem.tiles[q_place.stage];
        const int plane = tile.plane;
        const int blocks = plane < 0 ? 0 : tile.blocks;
        for (int i = 0; i < blocks; ++i, v_place.advance()) {
            const int block = tile.last_block - i;
            const int warp = read_thread() / 32 - 1;
            mbarrier_wait(smem.v_full[v_place.stage], v_place.parity);
            __syncwarp();
            if (tile.is_checked(block)) {
                const int last_row = min(tile.first + kTileRows, params.sq) - 1;
                const int end_key = tile.lengths.range(last_row, params.local_window).end;
                const unsigned int found = scrub(smem.v[v_place.stage], end_key - block * kBlockKeys);
                const unsigned int found_by_warp = __reduce_or_sync(kFullWarp, found);
                if (found_by_warp != 0) fence_proxy_async();
                __syncwarp();
                if (is_elected) {
                    smem.found[check_place.stage][warp] = found_by_warp;
                    mbarrier_arrive(smem.checked[check_place.stage]);
                }
                check_place.advance();
            }
            if (is_elected) mbarrier_arrive(smem.v_empty[v_place.stage]);
        }
        mbarrier_arrive(smem.q_empty[q_place.stage]);
        if (plane == Tile::kEnd) return;
        q_place.advance();
    }
}

// ---- consumers -------------------------------------------------------------------------------------------

// The scores of a block as one lane holds them, later its weights: element i is of its row fragment_row(i),
// where the second is 8 below the first, and of column fragment_column(i) from its first on.
using Scores = float[kBlockKeys / 2];
using Sums = float[kPaddedDim / 2];
using PackedWeights = unsigned int[kBlockKeys / 4];

// The first keys of a block, as many as kCount; their scores are a lane's first.
template <int kCount>
struct FirstKeys {
    static constexpr int kScores = kCount / 2;
};
using AllKeys = FirstKeys<kBlockKeys>;
using LowerKeys = FirstKeys<kBlockKeys / 2>;

__device__ __forceinline__ constexpr int fragment_row(int i) { return i / 2 % 2; }
__device__ __forceinline__ constexpr int fragment_column(int i) { return i / 4 * 8 + i % 2; }

__device__ __forceinline__ void issue_scores(Scores& scores, unsigned long long q, unsigned long long k) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
        const unsigned int in_slab = d % kSlabColumns * sizeof(Element);
        const unsigned int slab = d / kSlabColumns * kSlabColumns * sizeof(Element);
        Wgmma<Element, kBlockKeys>::ss(
            scores, advance(q, slab * kRows + in_slab), advance(k, slab * kBlockKeys + in_slab), d > 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void issue_values(
    Sums& sums, const PackedWeights& weights, unsigned long long v, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 16) {
        Wgmma<Element, kPaddedDim>::rs(sums, &weights[key / 4],
                                       advance(v, key * kSlabColumns * sizeof(Element)), accumulate || key > 0);
    }
    wgmma_commit();
}

// The scores of a warp's 16 rows again. `q` and `k` are their shared addresses; a row's chunks of eight elements are
// swizzled.
__device__ __forceinline__ void recompute_scores(Scores& scores, unsigned int q, unsigned int k) {
    const int lane = threadIdx.x % 32;
    constexpr unsigned int kRowBytes = kSlabColumns * sizeof(Element);
    const unsigned int q_row = q + lane % 16 * kRowBytes;
    const unsigned int k_row = k + (lane % 8 + lane / 16 * 8) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) scores[i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < kHeadDim; d += 16) {
        const int slab = d / kSlabColumns;
        const int chunk = d % kSlabColumns / 8;
        unsigned int a[4];
        ldmatrix_x4(a, q_row + slab * kRows * kRowBytes + ((chunk + lane / 16) ^ lane % 8) * 16);
        const unsigned int k_chunk = k_row + slab * kBlockKeys * kRowBytes + ((chunk + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int key = 0; key < kBlockKeys; key += 16) {
            unsigned int b[4];
            ldmatrix_x4(b, k_chunk + key * kRowBytes);
            auto& c = reinterpret_cast<float(&)[2][4]>(scores[key / 2]);
            mma_m16n8k16<Element>(c[0], a, b[0], b[1]);
            mma_m16n8k16<Element>(c[1], a, b[2], b[3]);
        }
    }
}

// The exponential magnifies the rounding of an offset. Where it is larger than this, the origin is taken off the
// scores before they are scaled, and the offset is that of an origin of 0.
constexpr float kMaxOffset = 4096.0f;

// The softmax of a lane's two rows so far. A weight is 2^(log2_scale * (score - origin)), where the origin is
// a maximum of the row: not always the latest, but at most kHeadroom below it.
struct RowState {
    float max[2];               // the origin; -inf: no score yet, and the origin is 0
    float offset[2];            // what the origin amounts to as an addend to log2_scale * score
    float sum[2];               // of the weights of this lane's keys
    unsigned int sees_key = 0;  // bit r: row r sees a key under the mask, though its score be -inf
};

// The weight of a score at the origin, and the greatest that needs no new one, as exponents; and the most that a lane's
// weights in a row of a block may sum up to: none of them is then greater.
constexpr float kWeightExponent = Traits::kMayOverflow ? 8.0f : 0.0f;
constexpr float kMaxExponent = Traits::kMayOverflow ? 15.0f : 8.0f;
constexpr float kMaxSum = Traits::kMayOverflow ? 32768.0f : 256.0f;

// Whether in all rows of the warp there has been a score, and the offset is not too large; with a mask, whether a score
// of 0 needs no new origin either.
__device__ __forceinline__ bool are_ordinary(const RowState& state, float log2_scale) {
    bool is_ordinary = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        is_ordinary &= fabsf(state.max[r] * log2_scale) < kMaxOffset;
        if (kHasMask) is_ordinary &= state.offset[r] <= kMaxExponent;
    }
    return __all_sync(kFullWarp, is_ordinary);
}

// tanh(x) / x as a polynomial in x^2, fitted for the least relative error where |x| <= kMaxArgument: 6e-07.
constexpr float kMaxArgument = 0.5f;
__device__ __forceinline__ float tanh_over_x(float square) {
    float sum = -4.44022231e-2f;
    sum = fmaf(sum, square, 1.31902963e-1f);
    sum = fmaf(sum, square, -3.33263189e-1f);
    return fmaf(sum, square, 9.99999464e-1f);
}

// The greatest magnitudes of a lane's two rows in a block.
template <typename Keys = AllKeys>
__device__ __forceinline__ void find_greatest(float (&greatest)[2], const Scores& scores) {
    float chains[2][2] = {};
#pragma unroll
    for (int i = 0; i < Keys::kScores; ++i) {
        float& chain = chains[fragment_row(i)][i % 2];
        chain = fmaxf(chain, fabsf(scores[i]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) greatest[r] = fmaxf(chains[r][0], chains[r][1]);
}

// Scores are mostly far below the cap. A polynomial then leaves the exponential unit, which the softmax keeps
// busy, alone.
template <typename Keys = AllKeys>
__device__ __forceinline__ void cap(Scores& scores, const ScoreScale& scale) {
    float greatest[2];
    find_greatest<Keys>(greatest, scores);
    if (__any_sync(kFullWarp, fmaxf(greatest[0], greatest[1]) * scale.cap > kMaxArgument)) {
#pragma unroll
        for (int i = 0; i < Keys::kScores; ++i) {
            scores[i] = fmaf(-2.0f, rcp(ex2(scores[i] * scale.cap * (2.0f * kLog2E)) + 1.0f), 1.0f);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Keys::kScores; ++i) {
            const float x = scores[i] * scale.cap;
            scores[i] = x * tanh_over_x(x * x);
            if (i % 16 == 15) __syncwarp();  // ptxas would otherwise have more of them in flight than it has registers
        }
    }
}

// A lane's two rows: what they may see.
struct LaneRows {
    KeyRange ranges[2];
};

// The keys that a row may see, counted from `first_key`.
struct RelativeRange {
    int begin;
    int end;

    __device__ __forceinline__ RelativeRange(const KeyRange& range, int first_key)
        : begin(static_cast<int>(range.begin) - first_key), end(static_cast<int>(range.end) - first_key) {}
    __device__ __forceinline__ bool contains(int key) const { return key < end && (!kHasWindow || key >= begin); }
};

// Exclude the keys that lie beyond the ranges of the lane's rows.
template <typename Keys = AllKeys>
__device__ __forceinline__ void exclude(Scores& scores, const LaneRows& rows, int first_key) {
    const RelativeRange ranges[2] = {{rows.ranges[0], first_key}, {rows.ranges[1], first_key}};
#pragma unroll
    for (int i = 0; i < Keys::kScores; ++i) {
        if (!ranges[fragment_row(i)].contains(fragment_column(i))) scores[i] = negative_infinity();
    }
}

// A warp's part of the mask of a block, 16 rows, in shared memory.
struct MaskRows {
    static constexpr int kRowBytes = sizeof(Smem::mask[0]);
    static constexpr int kLanesARow = kBlockKeys / kMaskWidth < 32 ? kBlockKeys / kMaskWidth : 32;
    static constexpr int kRowsAtOnce = 32 / kLanesARow;

    unsigned int buffer;

    // Copy it, once all lanes have read the block before, from rows of `keys` elements, `rows` of which are there, at
    // `source`, where they have `columns` left.
    __device__ __forceinline__ void copy(const Element* source, int rows, int columns, int keys) const {
        const int lane_row = threadIdx.x % 32 / kLanesARow;
        const int lane_column = threadIdx.x % 32 % kLanesARow * kMaskWidth;
        const unsigned int target = buffer + lane_row * kRowBytes + lane_column * sizeof(Element);
        source += static_cast<long long>(lane_row) * keys + lane_column;
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 16; row += kRowsAtOnce) {
#pragma unroll
            for (int column = 0; column < kBlockKeys; column += kLanesARow * kMaskWidth) {
                copy_async<kMaskWidth * sizeof(Element)>(target + row * kRowBytes + column * sizeof(Element),
                                                         source + static_cast<long long>(row) * keys + column,
                                                         lane_row + row < rows && lane_column + column < columns);
            }
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void wait() const {
        copy_async_wait<0>();
        __syncwarp();
    }
    // The words of 16 keys from `key` on, as the lane's scores lie.
    __device__ __forceinline__ void read(unsigned int (&words)[4], int key) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(words, buffer + lane % 16 * kRowBytes + lane / 16 * 16 + key * sizeof(Element));
    }
};

// Add the mask to the scores.
__device__ __forceinline__ void add_mask(Scores& scores, const MaskRows& mask, float scale) {
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 16) {
        unsigned int words[4];
        mask.read(words, key);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& score = scores[key / 2 + i];
            score = fmaf(score, scale, Traits::unpack(words[i / 2], i % 2));
        }
    }
}

// Exclude the keys at which the mask is -inf, whatever their dot products are: added to it, some are not -inf but
// NaN. And note which rows may see a key at all, though its score be -inf.
__device__ __forceinline__ void exclude_masked(
    Scores& scores, RowState& state, const LaneRows& rows, const MaskRows& mask, int first_key) {
    const RelativeRange ranges[2] = {{rows.ranges[0], first_key}, {rows.ranges[1], first_key}};
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 16) {
        unsigned int words[4];
        mask.read(words, key);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = fragment_row(i);
            if (i == 0) __syncwarp();  // as in cap()
            const bool may_see = ranges[r].contains(key + fragment_column(i)) &&
                                 Traits::unpack(words[i / 2], i % 2) != negative_infinity();
            float& score = scores[key / 2 + i];
            score = may_see ? score : negative_infinity();  // branches would take more registers
            state.sees_key |= may_see ? 1 << r : 0;
        }
    }
}

// The maxima of a lane's two rows over its keys of a block. kOfNaN: NaN is the greatest, else it is passed over.
template <bool kOfNaN, typename Keys = AllKeys>
__device__ __forceinline__ void find_max(float (&max)[2], const Scores& scores) {
    const auto greater = [](float a, float b) { return kOfNaN ? max_nan(a, b) : fmaxf(a, b); };
    float chains[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) chains[r][0] = chains[r][1] = negative_infinity();
#pragma unroll
    for (int i = 0; i < Keys::kScores; ++i) {
        float& chain = chains[fragment_row(i)][i % 2];
        chain = greater(chain, scores[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = greater(chains[r][0], chains[r][1]);
}

// Whether a score needs a new origin, or what is no number must be seen to.
__device__ __forceinline__ bool needs_origin(
    const Scores& scores, const RowState& state, float log2_scale, bool is_ordinary) {
    if (is_ordinary) {
        // The greatest score or 0. Numbers from 0 on compare as the integers of the same bits, of which Hopper finds
        // the greatest of three at once; numbers below are negative as integers too, and NaN is greater than any
        // number.
        int max[2][2] = {};
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; i += 2) {
            int& chain = max[fragment_row(i)][i / 4 % 2];
            chain = __vimax3_s32(chain, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
        }
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float row_max = __int_as_float(::max(max[r][0], max[r][1]));
            exceeds |= !(fmaf(row_max, log2_scale, state.offset[r]) <= kMaxExponent);
        }
        return exceeds;
    }
    float max[2];
    find_max<kHasMask>(max, scores);
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        exceeds |= !(fmaf(max[r], log2_scale, state.offset[r]) <= kMaxExponent) ||
                   !(fabsf(state.max[r] * log2_scale) < kMaxOffset);
    }
    return exceeds;
}

// Make the maxima over the quads of lanes that share the rows the rows' origins.
template <typename Keys = AllKeys>
__device__ __forceinline__ void set_origins(
    Scores& scores, RowState& state, const float (&max)[2], float log2_scale) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float row_max = fmaxf(max[r], __shfl_xor_sync(kFullWarp, max[r], 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
        const float origin = softmax_origin(row_max);
        const float offset = origin * log2_scale;
        const bool is_large = !(fabsf(offset) < kMaxOffset);
        shift[r] = is_large ? origin : 0.0f;
        state.max[r] = row_max;
        state.offset[r] = kWeightExponent - (is_large ? 0.0f : offset);
    }
    if (__any_sync(kFullWarp, shift[0] != 0.0f || shift[1] != 0.0f)) {
#pragma unroll
        for (int i = 0; i < Keys::kScores; ++i) scores[i] -= shift[fragment_row(i)];
    }
}

// Turn exponents into weights, and sum them up by rows.
template <typename Keys = AllKeys, typename Exponent>
__device__ __forceinline__ void weigh(Scores& scores, float (&sums)[2], const Exponent& exponent) {
    float chains[2][2] = {};
#pragma unroll
    for (int i = 0; i < Keys::kScores; ++i) {
        const int r = fragment_row(i);
        scores[i] = ex2(exponent(i));
        chains[r][i % 2] += scores[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] = chains[r][0] + chains[r][1];
}

// The same for scores of which none is beyond its row's origin.
template <typename Keys = AllKeys>
__device__ __forceinline__ void weigh_settled(Scores& scores, RowState& state, float log2_scale) {
    float sums[2];
    weigh<Keys>(scores, sums, [&](int i) { return fmaf(scores[i], log2_scale, state.offset[fragment_row(i)]); });
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[r] += sums[r];
}

// The same for dot products from which keys beyond the rows' ranges are excluded, in the hope that no score needs a new
// origin and none is not a number. Returns whether that is so for the whole warp: if not, they are lost.
__device__ __forceinline__ bool weigh_hopefully(
    Scores& dots, RowState& state, const ScoreScale& scale) {
    float sums[2];
    bool is_well = true;
    if (kWeighsDots) {
        // Squares are no less than 0, and numbers from 0 on compare as the integers of the same bits, of which Hopper
        // finds the greatest of three at once.
        int greatest[2] = {};
        float last_square;
        weigh(dots, sums, [&](int i) {
            const float square = dots[i] * dots[i];
            if (i % 2 == 0) {
                last_square = square;
            } else {
                int& chain = greatest[i / 2 % 2];
                chain = __vimax3_s32(chain, __float_as_int(square), __float_as_int(last_square));
            }
            const float factor = fmaf(fmaf(scale.c2, square, scale.c1), square, scale.c0);
            return fmaf(dots[i], factor, state.offset[fragment_row(i)]);
        });
        is_well = __int_as_float(max(greatest[0], greatest[1])) <= scale.max_square;
    } else {
        weigh(dots, sums, [&](int i) { return fmaf(dots[i], scale.log2, state.offset[fragment_row(i)]); });
    }
    is_well &= sums[0] <= kMaxSum && sums[1] <= kMaxSum;
    if (!__all_sync(kFullWarp, is_well)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[r] += sums[r];
    return true;
}

// Whether dot products are far below the cap.
__device__ __forceinline__ bool are_small(const Scores& dots, const ScoreScale& scale) {
    float greatest[2];
    find_greatest(greatest, dots);
    const float dot = fmaxf(greatest[0], greatest[1]);
    return __all_sync(kFullWarp, dot * dot <= scale.max_square);
}

// The maxima of a lane's two rows. `settle` sees to scores that are not a number, and to rows without any.
template <typename Keys = AllKeys, typename Settle>
__device__ __forceinline__ void find_settled_max(float (&max)[2], const Scores& scores, const Settle& settle) {
    find_max<kHasMask, Keys>(max, scores);
    if (kHasMask && __any_sync(kFullWarp, !(max[0] > negative_infinity() && max[1] > negative_infinity()))) {
        settle();
        find_max<false, Keys>(max, scores);
    }
}

// Set out from the maxima of a tile's first block.
template <typename Keys, typename Settle>
__device__ __forceinline__ void begin_rows(Scores& scores, RowState& state, float log2_scale, const Settle& settle) {
    float max[2];
    find_settled_max<Keys>(max, scores, settle);
    set_origins<Keys>(scores, state, max, log2_scale);
    state.sum[0] = state.sum[1] = 0.0f;
}

// Move the warp's origins to the maxima so far, which the scores of a later block may have raised. Earlier sums of
// values must be multiplied by `rescale`.
template <typename Settle>
__device__ __forceinline__ void move_origins(
    Scores& scores, RowState& state, float (&rescale)[2], float log2_scale, const Settle& settle) {
    float max[2];
    find_settled_max(max, scores, settle);
    const float old_max[2] = {state.max[0], state.max[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = fmaxf(max[r], old_max[r]);
    set_origins(scores, state, max, log2_scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rescale[r] = ex2((old_max[r] - softmax_origin(state.max[r])) * log2_scale);
        state.sum[r] *= rescale[r];
    }
}

// The weights of other keys are 0.
template <typename Keys = AllKeys>
__device__ __forceinline__ void pack_weights(PackedWeights& packed, const Scores& weights) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 4; ++i) {
        packed[i] = 2 * i < Keys::kScores ? Traits::pack(weights[2 * i], weights[2 * i + 1]) : 0;
    }
}

// Add the values that the checkers took out of a block to the rows that may see them. A finite positive
// weight does not change an infinity or a NaN, and a NaN weight has spoilt the row already.
__device__ __forceinline__ void add_spoilt_values(
    Sums& sums, const Element* values, const LaneRows& rows, const Element* const (&mask)[2], int first_key,
    int lane_column) {
    const int last_key = min(first_key + kBlockKeys, static_cast<int>(rows.ranges[1].end));
#pragma unroll 1
    for (int key = first_key; key < last_key; ++key) {
        bool allowed[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            allowed[r] = rows.ranges[r].contains(key);
            if (kHasMask && allowed[r]) allowed[r] = to_f32(mask[r][key]) != negative_infinity();
        }
        const Element* const row = values + static_cast<long long>(key) * kHeadDim;
#pragma unroll
        for (int i = 0; i < kPaddedDim / 2; ++i) {
            const int column = lane_column + fragment_column(i);
            const float value = column < kHeadDim ? to_f32(row[column]) : 0.0f;
            if (allowed[fragment_row(i)] && !is_finite(value)) sums[i] += value;
        }
    }
}

// Whether one of the four lanes that share a row has a key.
__device__ __forceinline__ bool has_key_in_quad(bool has_key) {
    const unsigned int lanes = __ballot_sync(kFullWarp, has_key);
    return (lanes >> (threadIdx.x % 32 / 4 * 4) & 0xf) != 0;
}

// Divide by the denominator, round, and put the consumer's 64 rows into shared memory as the output map's
// boxes lie. Returns whether some of the warp's output is not finite, where that is asked for.
__device__ __forceinline__ bool write_output(Element (&output)[kSlabs][kRows][kSlabColumns], Sums& sums,
                                             const RowState& state, const bool (&has_key)[2], bool asks_for_spoilt) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.sum[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        // Over no key at all the result is 0; over keys whose scores are all -inf it is 0 * inf.
        factor[r] = has_key[r] ? rcp(sum) : 0.0f;
    }
    bool is_large = false;
#pragma unroll
    for (int i = 0; i < kPaddedDim / 2; ++i) {
        sums[i] *= factor[fragment_row(i)];
        if (Traits::kMayOverflow) is_large |= fabsf(sums[i]) > Traits::kMax;
    }
    // The denominator sums weights that are not rounded: for that an average of finite values must not become
    // infinite.
    if (Traits::kMayOverflow && __any_sync(kFullWarp, is_large)) {
#pragma unroll
        for (int i = 0; i < kPaddedDim / 2; ++i) {
            if (is_finite(sums[i])) sums[i] = fminf(fmaxf(sums[i], -Traits::kMax), Traits::kMax);
        }
    }
    unsigned int words[kPaddedDim / 4];
#pragma unroll
    for (int i = 0; i < kPaddedDim / 4; ++i) words[i] = Traits::pack(sums[2 * i], sums[2 * i + 1]);
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
#pragma unroll
    for (int group = 0; group < kPaddedDim / 8; group += 2) {
        const unsigned int* const o = &words[group * 2];
        const int chunk = (group + lane / 16) % 8;
        Element* const slab = &output[group / 8][row][0];
        stmatrix_x4(shared_address(slab + (chunk ^ row % 8) * 8), o[0], o[1], o[2], o[3]);
    }
    if (!asks_for_spoilt) return false;
    unsigned int zeros[2] = {};
#pragma unroll
    for (int i = 0; i < kPaddedDim / 4; ++i) zeros[i % 2] = Traits::add_zero_times(zeros[i % 2], words[i]);
    return __any_sync(kFullWarp, ((zeros[0] | zeros[1]) & 0x7fff7fff) != 0);
}

__device__ __forceinline__ void consume(Smem& smem, const Params& params, const TensorMap& output_map, int consumer) {
    const bool is_elected = threadIdx.x % kWarpgroup == 0;
    const int lane = threadIdx.x % 32;
    const int lane_row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
    const int lane_column = lane % 4 * 2;
    ScoreScale own_scale;
    own_scale.set(params.scale, params.softcap);
    const ScoreScale& scale = kHasSoftcap ? smem.scale : own_scale;

    constexpr unsigned int kQueryBuffer = sizeof(smem.q[0]);
    const unsigned long long q_descriptor = wgmma_descriptor(smem.q[0][consumer], 0);
    const unsigned long long k_descriptor = wgmma_descriptor(smem.k[0], 0);
    const unsigned long long v_descriptor = wgmma_descriptor(smem.v[0], kBlockKeys * kSlabColumns * sizeof(Element));

    const auto take_turn = [&] { named_barrier_sync(kTurnBarrier + consumer, 2 * kWarpgroup); };
    const auto pass_turn = [&] {
        named_barrier_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 2 * kWarpgroup);
    };

    RingPlace<kQueryStages> q_place;
    RingPlace<kKeyStages> k_place;
    RingPlace<kValueStages> v_place;
    RingPlace<kValueStages> check_place;
    Scores scores;
    Sums sums;
    PackedWeights weights;
    const int warp_row = consumer * kRows + threadIdx.x % kWarpgroup / 32 * 16;
    const MaskRows mask = {shared_address(smem.mask[kHasMask ? warp_row : 0])};
    const auto copy_mask = [&](const Tile& mailbox, int block) {
        const int first_key = block * kBlockKeys;
        mask.copy(mailbox.mask + static_cast<long long>(warp_row) * params.sk + first_key,
                  params.sq - mailbox.first - warp_row, params.sk - first_key, params.sk);
    };

    // A tile as far as the consumer's rows see it.
    unsigned int skips = 0;
    const auto read_own_tile = [&](unsigned int stage) {
        Tile own = read_tile(smem.tiles[stage]);
        if (kMaySkip && own.plane >= 0) {
            const Share& share = smem.shares[stage][consumer];
            skips = __shfl_sync(kFullWarp, lane == 0 ? share.skips : 0, 0);
            own.full_begin = __shfl_sync(kFullWarp, lane == 0 ? share.full_begin : 0, 0);
            own.full_end = __shfl_sync(kFullWarp, lane == 0 ? share.full_end : 0, 0);
            own.last_block -= (skips & Share::kLast) != 0;
            own.blocks -= __popc(skips);
        }
        return own;
    };
    // Of a block that only other rows see stages are released at once, and turns passed on.
    const auto skip_key = [&] {
        mbarrier_wait(smem.k_full[k_place.stage], k_place.parity);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem.k_empty[k_place.stage]);
        k_place.advance();
    };
    int idle_turns = 0;
    const auto skip_turns = [&] {
        for (; kMaySkip && idle_turns > 0; --idle_turns) {
            take_turn();
            pass_turn();
        }
    };

    if (consumer == kConsumers - 1) pass_turn();  // the first turn is the first consumer's
    mbarrier_wait(smem.q_full[0][consumer], 0);
    Tile tile = read_own_tile(0);
    bool is_under_way = false;  // the tile's first scores
    while (true) {
        if (!is_under_way) {
            while (tile.plane == Tile::kIdle) {
                mbarrier_arrive(smem.q_empty[q_place.stage]);
                q_place.advance();
                mbarrier_wait(smem.q_full[q_place.stage][consumer], q_place.parity);
                tile = read_own_tile(q_place.stage);
            }
            skip_turns();
            if (tile.plane == Tile::kEnd) return;
            if (kHasMask) copy_mask(smem.tiles[q_place.stage], tile.last_block);
            if (kMaySkip && (skips & Share::kLast)) skip_key();
            mbarrier_wait(smem.k_full[k_place.stage], k_place.parity);
            issue_scores(scores, advance(q_descriptor, q_place.stage * kQueryBuffer),
                         advance(k_descriptor, k_place.stage * kKeyBytes));
            wgmma_wait<0>();
            pin(scores);
            if (lane == 0) mbarrier_arrive(smem.k_empty[k_place.stage]);
            k_place.advance();
        }
        const unsigned int own_skips = skips;
        // Where registers are short, what is not needed in every block is read from the mailbox again.
        const Tile& mailbox = kHasMask || kHasSoftcap || kHasWindow ? smem.tiles[q_place.stage] : tile;
        // Checkers look at the tile as a whole.
        const Tile& whole = kMaySkip || kHasMask ? smem.tiles[q_place.stage] : tile;
        LaneRows rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = mailbox.first + consumer * kRows + lane_row + 8 * r;
            rows.ranges[r] = mailbox.lengths.range(row, params.local_window);
        }
        int block = tile.last_block;
        const int first_block = tile.last_block - tile.blocks + 1;
        RowState state;

        const auto exclude_cut = [&](int b) {
            if (tile.is_cut(b)) exclude(scores, rows, b * kBlockKeys + lane_column);
        };
        // From dot products to scores of the keys that the rows may see, and -inf for the others.
        const auto finish_scores = [&](int b) {
            if (kHasSoftcap) cap(scores, scale);
            if (kHasMask) {
                mask.wait();
                add_mask(scores, mask, scale.mask);
            }
            exclude_cut(b);
        };
        const auto settle = [&](int b) { exclude_masked(scores, state, rows, mask, b * kBlockKeys + lane_column); };
        const auto copy_next_mask = [&](int b) {
            if (kHasMask && b > first_block) copy_mask(mailbox, b - 1);
        };
        bool is_hopeful = !kHasMask;  // that the next block's scores need no new origin
        // From the dot products of a block to weights; returns whether the origins moved.
        const auto weigh_next = [&](int b, bool is_ordinary, float (&rescale)[2]) {
            if (is_ordinary && is_hopeful) {
                exclude_cut(b);
                if (weigh_hopefully(scores, state, scale)) return false;
                const Element* const q = smem.q[q_place.stage][consumer][0][warp_row - consumer * kRows];
                recompute_scores(scores, shared_address(q), shared_address(smem.k[k_place.stage]));
            }
            if (kWeighsDots) is_hopeful = are_small(scores, scale);
            finish_scores(b);
            const bool must_move =
                !kHasMask || __any_sync(kFullWarp, needs_origin(scores, state, scale.log2, is_ordinary));
            if (must_move) move_origins(scores, state, rescale, scale.log2, [&] { settle(b); });
            copy_next_mask(b);
            weigh_settled(scores, state, scale.log2);
            return must_move;
        };

        const unsigned int warp_end = __shfl_sync(kFullWarp, rows.ranges[1].end, 31);
        if (kHasHalves && warp_end <= block * kBlockKeys + kBlockKeys / 2) {
            if (kHasSoftcap) cap<LowerKeys>(scores, scale);
            exclude<LowerKeys>(scores, rows, block * kBlockKeys + lane_column);
            begin_rows<LowerKeys>(scores, state, scale.log2, [] {});
            weigh_settled<LowerKeys>(scores, state, scale.log2);
            pack_weights<LowerKeys>(weights, scores);
        } else {
            finish_scores(block);
            begin_rows<AllKeys>(scores, state, scale.log2, [&] { settle(block); });
            copy_next_mask(block);
            weigh_settled(scores, state, scale.log2);
            pack_weights(weights, scores);
        }

        // The store of the tile before, which one thread issued, has long read its buffer. Each thread gives back what
        // it has read of the mailbox.
        if (is_under_way) {
            tma_store_wait_read();
            mbarrier_arrive(smem.q_empty[(q_place.stage + kQueryStages - 1) % kQueryStages]);
        }

        // Wait for what the checkers found in the values of a block.
        const auto wait_for_checkers = [&] {
            mbarrier_wait(smem.checked[check_place.stage], check_place.parity);
            const unsigned int* const found = smem.found[check_place.stage];
            check_place.advance();
            // Lane 0 reads for its warp what it then gives back.
            return __shfl_sync(kFullWarp, lane == 0 ? found[0] | found[1] | found[2] : 0, 0);
        };
        // The product with the values of `block` is done: release their stage, and add what the checkers removed. Each
        // warp releases for itself: one that has yet to wait for the checkers must not find them two phases on.
        const auto finish_values = [&](unsigned int found) {
            if (lane == 0) mbarrier_arrive(smem.v_empty[v_place.stage]);
            v_place.advance();
            if ((found & kMayBeSeen) == 0) return;
            const long long plane = mailbox.plane / params.group;
            const Element* mask_rows[2];
#pragma unroll
            for (int r = 0; r < 2 && kHasMask; ++r) {
                const int row = min(consumer * kRows + lane_row + 8 * r, params.sq - 1 - mailbox.first);
                mask_rows[r] = mailbox.mask + static_cast<long long>(row) * params.sk;
            }
            add_spoilt_values(sums, params.value + plane * params.kv_capacity * kHeadDim, rows, mask_rows,
                              block * kBlockKeys, lane_column);
        };
        const auto skip_value = [&](int b) {
            mbarrier_wait(smem.v_full[v_place.stage], v_place.parity);
            if (whole.is_checked(b)) wait_for_checkers();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem.v_empty[v_place.stage]);
            v_place.advance();
        };
        if (kMaySkip && (own_skips & Share::kLast)) {
            skip_value(tile.last_block + 1);
            ++idle_turns;
        }
        skip_turns();
        mbarrier_wait(smem.v_full[v_place.stage], v_place.parity);

#pragma unroll 1
        while (block > first_block) {
            mbarrier_wait(smem.k_full[k_place.stage], k_place.parity);
            const unsigned int found = whole.is_checked(block) ? wait_for_checkers() : 0;
            take_turn();
            issue_scores(scores, advance(q_descriptor, q_place.stage * kQueryBuffer),
                         advance(k_descriptor, k_place.stage * kKeyBytes));
            issue_values(sums, weights, advance(v_descriptor, v_place.stage * kKeyBytes), block < tile.last_block);
            pass_turn();
            const bool is_ordinary = are_ordinary(state, scale.log2);
            wgmma_wait<1>();
            pin(scores);

            float rescale[2] = {1.0f, 1.0f};
            const bool has_moved = weigh_next(block - 1, is_ordinary, rescale);
            // The compiler moves a wait for products up as far as the last branch, which is that on the weights' sums.
            pin(scores);
            if (lane == 0) mbarrier_arrive(smem.k_empty[k_place.stage]);
            k_place.advance();
            RingPlace<kValueStages> next_v_place = v_place;
            next_v_place.advance();
            mbarrier_wait(smem.v_full[next_v_place.stage], next_v_place.parity);
            wgmma_wait<0>();
            pin(sums);
            finish_values(found);
            --block;
            if (has_moved) {
#pragma unroll
                for (int i = 0; i < kPaddedDim / 2; ++i) sums[i] *= rescale[fragment_row(i)];
            }
            pack_weights(weights, scores);
        }

        if (kMaySkip && (own_skips & Share::kFirst)) skip_key();
        // The last values of this tile, and behind them the first scores of the next. Where there is no next
        // tile the scores are of stale queries, and nobody reads them.
        RingPlace<kQueryStages> next_place = q_place;
        next_place.advance();
        mbarrier_wait(smem.q_full[next_place.stage][consumer], next_place.parity);
        const Tile next = read_own_tile(next_place.stage);
        if (kHasMask && next.plane >= 0) copy_mask(smem.tiles[next_place.stage], next.last_block);
        if (kMaySkip && next.plane >= 0 && (skips & Share::kLast)) skip_key();
        if (next.plane >= 0) mbarrier_wait(smem.k_full[k_place.stage], k_place.parity);
        const unsigned int found = whole.is_checked(block) ? wait_for_checkers() : 0;
        take_turn();
        issue_values(sums, weights, advance(v_descriptor, v_place.stage * kKeyBytes), tile.blocks > 1);
        issue_scores(scores, advance(q_descriptor, next_place.stage * kQueryBuffer),
                     advance(k_descriptor, k_place.stage * kKeyBytes));
        pass_turn();
        wgmma_wait<1>();
        pin(sums);
        finish_values(found);

        bool has_key[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool sees_key = (state.sees_key >> r & 1) != 0 || state.max[r] > negative_infinity();
            has_key[r] = kHasMask ? has_key_in_quad(sees_key) : rows.ranges[r].begin < rows.ranges[r].end;
        }
        const bool is_spoilt =
            write_output(smem.q[q_place.stage][consumer], sums, state, has_key, mailbox.may_be_spoilt());
        uint4& spoilt = smem.spoilt[q_place.stage][consumer];
        if (lane == 0) reinterpret_cast<unsigned int*>(&spoilt)[threadIdx.x % kWarpgroup / 32] = is_spoilt;
        fence_proxy_async();
        named_barrier_sync(kOutputBarrier + consumer, kWarpgroup);
        if (is_elected && (spoilt.x | spoilt.y | spoilt.z | spoilt.w) == 0) {
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                tma_store_3d(output_map, smem.q[q_place.stage][consumer][slab], slab * kSlabColumns,
                             mailbox.first + consumer * kRows, mailbox.plane);
            }
            tma_store_commit();
        }
        if (kMaySkip && (own_skips & Share::kFirst)) {
            skip_value(first_block - 1);
            ++idle_turns;
        }
        wgmma_wait<0>();
        pin(scores);
        is_under_way = next.plane >= 0;
        if (!is_under_way) {
            tma_store_wait_read();
            mbarrier_arrive(smem.q_empty[q_place.stage]);
        }
        q_place = next_place;
        tile = next;
        if (!is_under_way) continue;
        if (lane == 0) mbarrier_arrive(smem.k_empty[k_place.stage]);
        k_place.advance();
    }
}

// The maps say where q, key and output are; their addresses are there for the host, which keeps them alive.
extern "C" __global__ void __launch_bounds__(kThreads, 1) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, unsigned int* tile_counter,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap output_map, int q_heads, int group,
    int sq, int sk, int kv_capacity, int tiles, int planes_per_section, long long mask_batch_stride,
    long long mask_head_stride, int local_window, float scale, float softcap) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const Params params = {value,
                           mask,
                           total_lengths,
                           past_lengths,
                           capture_error,
                           tile_counter,
                           q_heads,
                           group,
                           sq,
                           sk,
                           kv_capacity,
                           tiles,
                           planes_per_section,
                           mask_batch_stride,
                           mask_head_stride,
                           local_window,
                           scale,
                           softcap};
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);

    if (threadIdx.x == 0) {
        smem.scale.set(scale, softcap);
        prefetch_tensormap(q_map);
        prefetch_tensormap(key_map);
        prefetch_tensormap(value_map);
        prefetch_tensormap(output_map);
        for (int i = 0; i < kQueryStages; ++i) {
            for (int consumer = 0; consumer < kConsumers; ++consumer) mbarrier_init(smem.q_full[i][consumer], 1);
            mbarrier_init(smem.q_empty[i], kConsumers * kWarpgroup + kCheckers * 32);
            for (int consumer = 0; consumer < kConsumers; ++consumer) smem.spoilt[i][consumer] = make_uint4(0, 0, 0, 0);
        }
        for (int i = 0; i < kKeyStages; ++i) {
            mbarrier_init(smem.k_full[i], 1);
            mbarrier_init(smem.k_empty[i], kConsumers * kWarpgroup / 32);
        }
        for (int i = 0; i < kValueStages; ++i) {
            mbarrier_init(smem.v_full[i], 1);
            mbarrier_init(smem.v_empty[i], kConsumers * kWarpgroup / 32 + kCheckers);
            mbarrier_init(smem.checked[i], kCheckers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) {
            produce(smem, params, q_map, key_map, value_map);
        } else if (threadIdx.x >= 32) {
            check(smem, params);
        }
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(smem, params, output_map, warpgroup - 1);
    }
}
