// Attention for f32 on Hopper (sm_90a): warpgroup matrix products, where every product is six products of bf16 numbers.
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B, H, sq, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// An f32 number is the sum of three bf16 numbers of its sign, its parts: bits 1 to 8 of its significand, 9 to 16, and
// 17 to 24. A product is
//   a b = a0 b0 + (a0 b1 + a1 b0) + (a1 b1 + a0 b2 + a2 b0), to 2^-22 of its size.
// That takes as long as three products of TF32 numbers, which are less exact; parts take less shared memory, and values
// need not be transposed. Tensor cores cut their sums off instead of rounding them, so the small products are summed
// first, a block of keys at a time from zero, and blocks are added in f32.
//
// A block of threads owns BLOCK_QUERIES query rows of one plane. Each of its first warpgroups, a consumer, has 64 of
// them and walks their keys in blocks from the last to the first. The last warpgroup converts: it reads the next keys
// or values from global memory, waits for room and writes their parts, once for all consumers. Consumers issue their
// products in turns, scores and weighted values alternating, so that the tensor cores work for one while the others
// compute their softmax.
//
// Parts of infinities and NaN are not numbers, and 0 * NaN is NaN. A tile is first computed as if all operands were
// finite. Only if a sum is not, it is computed again, guarded: then numbers that are not finite are left out of the
// parts, but for the one product of high parts in which they are met as they are, and values among them are added
// afterwards, to the rows that may see them.
#include "common/attention_fragments.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"

constexpr int kTileRows = BLOCK_QUERIES;
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kStages = STAGES;  // blocks of keys in shared memory, and of values
constexpr int kWarpgroup = 128;
constexpr int kWarps = kWarpgroup / 32;
constexpr int kRows = 64;  // query rows of a consumer
constexpr int kConsumers = kTileRows / kRows;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kParts = 3;
constexpr int kSlabColumns = 64;  // 128 bytes: one swizzled row
constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
constexpr int kPaddedDim = (kHeadDim + 31) / 32 * 32;
constexpr int kDepths = (kHeadDim + 15) / 16;  // of the products of a score
static_assert(sizeof(Element) == 4, "f32");
static_assert(kHeadDim % 8 == 0, "a thread converts eight neighbours");
static_assert(kBlockKeys == kRows, "keys and queries are converted alike");
static_assert(kTileRows % kRows == 0, "whole consumers");
static_assert(kConsumers == 2 || kConsumers == 3, "the registers are dealt for two or three of them");
static_assert(kThreads == kWarpgroup * (kConsumers + 1), "the consumers and a converter");

// Registers a thread after they are dealt out. The block has those that it starts with: as many as 65536 allow a
// thread, in eights.
constexpr int kConsumerRegisters = kConsumers == 3 ? 144 : kPaddedDim > 96 ? 200 : 208;
constexpr int kConverterRegisters = kConsumers == 3 ? 80 : kPaddedDim > 96 ? 104 : 88;
static_assert(kConverterRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1),
              "they fit");

// The parts of 64 rows, swizzled as wgmma_descriptor() has it.
struct Parts {
    unsigned short parts[kParts][kSlabs][kRows][kSlabColumns];
};
constexpr unsigned int kSlabBytes = kRows * kSlabColumns * sizeof(unsigned short);
constexpr unsigned int kPartBytes = kSlabs * kSlabBytes;

enum Operand { kKeys, kValues, kQueries };

// Beside the parts lies what does not change while a tile of rows is computed: registers are short.
struct Smem {
    Parts q[kConsumers];
    Parts ring[2][kStages];  // of keys and of values
    Rows rows;
    KeyBlocks blocks;
    const float* planes[3];
    unsigned int found[kStages][kWarps];  // by the converter's warps in a block of values: what is not finite
    Barrier full[2][kStages];
    Barrier empty[2][kStages];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

// Named barriers. 0 is __syncthreads.
enum NamedBarrier { kTurnBarrier = 1, kQueryBarrier = kTurnBarrier + kConsumers };

using Place = RingPlace<kStages>;
using Scores = float[kKeyTiles][4];
using Sums = float[kPaddedDim / 8][1][4];

// ---- parts -----------------------------------------------------------------------------------------------

// What becomes of a number that is not finite: it is split like others, which gives parts that are no numbers; or its
// parts are zeros, but for a high part that is the number itself; or all of them are zeros.
enum class Spoilt { kIgnore, kHigh, kRemove };

// The parts of two neighbours, a pair of bf16 numbers each.
template <Spoilt kSpoilt>
__device__ __forceinline__ void split(unsigned int (&parts)[kParts], float first, float second) {
    float rests[2] = {first, second};
    unsigned int spoilt[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (kSpoilt == Spoilt::kIgnore || is_finite(rests[i])) continue;
        if (kSpoilt == Spoilt::kHigh) spoilt[i] = rests[i] != rests[i] ? 0x7fff0000u : __float_as_uint(rests[i]);
        rests[i] = 0.0f;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        unsigned int bits[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bits[i] = __float_as_uint(rests[i]);
            rests[i] -= __uint_as_float(bits[i] & 0xffff0000u);
            if (part == 0) bits[i] |= spoilt[i];
        }
        parts[part] = __byte_perm(bits[0], bits[1], 0x7632);  // the upper halves of both
    }
}

// Of a pair of high parts, those that are finite, and zeros.
__device__ __forceinline__ unsigned int remove_spoilt(unsigned int pair) {
    const unsigned int low = (pair & 0x7f80u) == 0x7f80u ? 0 : pair & 0xffffu;
    const unsigned int high = (pair & 0x7f800000u) == 0x7f800000u ? 0 : pair & 0xffff0000u;
    return high | low;
}

// What a thread of a warpgroup moves of 64 rows: eight neighbours at a time.
constexpr int kRowChunks = kPaddedDim / 8;
constexpr int kThreadChunks = kRows * kRowChunks / kWarpgroup;
using Chunk = float[8];

// Where this thread's chunk i lies.
struct ChunkPlace {
    int row;
    int column;

    __device__ __forceinline__ explicit ChunkPlace(int i) {
        constexpr bool kEven = kWarpgroup % kRowChunks == 0;  // then a thread stays in its columns
        const int thread = threadIdx.x % kWarpgroup;
        const int chunk = thread + i * kWarpgroup;
        row = kEven ? thread / kRowChunks + i * (kWarpgroup / kRowChunks) : chunk / kRowChunks;
        column = (kEven ? thread : chunk) % kRowChunks * 8;
    }
};

// Load this thread's chunk i of the rows first, first + 1, ... of source: zeros where they are not within `rows`, and
// beyond the head.
__device__ __forceinline__ void load_chunk(
    Chunk& chunk, int i, const float* source, unsigned int first, KeyRange rows) {
    const ChunkPlace place(i);
    const bool is_there = rows.contains(first + place.row) && (kHeadDim == kPaddedDim || place.column < kHeadDim);
    const float* const numbers_there =
        source + static_cast<long long>(first) * kHeadDim + (place.row * kHeadDim + place.column);
#pragma unroll
    for (int j = 0; j < 8; j += kLoadWidth) {
        float numbers[kLoadWidth] = {};
        if (is_there) load_f32(numbers_there + j, numbers);
#pragma unroll
        for (int k = 0; k < kLoadWidth; ++k) chunk[j + k] = numbers[k];
    }
}

// Write its parts.
template <Spoilt kSpoilt>
__device__ __forceinline__ void store_chunk(Parts& target, int i, const Chunk& chunk) {
    const ChunkPlace place(i);
    unsigned int parts[4][kParts];
#pragma unroll
    for (int j = 0; j < 4; ++j) split<kSpoilt>(parts[j], chunk[2 * j], chunk[2 * j + 1]);
    const int swizzled = (place.column / 8 % 8 ^ place.row % 8) * 8;
    unsigned short* const first = &target.parts[0][place.column / kSlabColumns][place.row][swizzled];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        *reinterpret_cast<uint4*>(first + part * (kPartBytes / sizeof(*first))) =
            make_uint4(parts[0][part], parts[1][part], parts[2][part], parts[3][part]);
    }
}

// ---- converter -------------------------------------------------------------------------------------------

// What the converter writes to shared memory is there for the consumers' products.
__device__ __forceinline__ void publish(Smem& smem, Operand operand, Place& place) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem.full[operand][place.stage]);
    place.advance();
}

__device__ __forceinline__ void wait_for_room(const Smem& smem, Operand operand, const Place& place) {
    mbarrier_wait(smem.empty[operand][place.stage], place.parity ^ 1);
}

// Write the parts of every block of keys and values in the order of their use. A block is loaded before there is room
// for its parts.
__device__ __forceinline__ void convert(Smem& smem, Place& k_place, Place& v_place) {
    const KeyBlocks blocks = smem.blocks;
    Chunk chunks[kThreadChunks];
    const auto load = [&](Operand operand, int block) {
#pragma unroll
        for (int i = 0; i < kThreadChunks; ++i) {
            load_chunk(chunks[i], i, smem.planes[operand], block * kBlockKeys, blocks.seen);
        }
    };
    const auto store = [&](Operand operand, Place& place) {
        wait_for_room(smem, operand, place);
#pragma unroll
        for (int i = 0; i < kThreadChunks; ++i) {
            store_chunk<Spoilt::kIgnore>(smem.ring[operand][place.stage], i, chunks[i]);
        }
        publish(smem, operand, place);
    };
    if (blocks.first < blocks.end) load(kKeys, blocks.end - 1);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block) {
        store(kKeys, k_place);
        load(kValues, block);
        store(kValues, v_place);
        if (block > blocks.first) load(kKeys, block - 1);
    }
}

// The same, guarded, for one block of keys or values. It is rare, so it need not be fast.
template <Spoilt kSpoilt>
__device__ __forceinline__ void convert_block(Smem& smem, Operand operand, Place& place, int block) {
    wait_for_room(smem, operand, place);
    bool is_spoilt = false;
#pragma unroll 1
    for (int i = 0; i < kThreadChunks; ++i) {
        Chunk chunk;
        load_chunk(chunk, i, smem.planes[operand], block * kBlockKeys, smem.blocks.seen);
        store_chunk<kSpoilt>(smem.ring[operand][place.stage], i, chunk);
#pragma unroll
        for (int j = 0; j < 8; ++j) is_spoilt |= !is_finite(chunk[j]);
    }
    const bool found = __any_sync(kFullWarp, is_spoilt);
    if (operand == kValues && threadIdx.x % 32 == 0) {
        smem.found[place.stage][threadIdx.x % kWarpgroup / 32] = found;
    }
    publish(smem, operand, place);
}

// A block of keys comes twice: for the products that numbers which are not finite are left out of, and for the one in
// which they are met.
__device__ __forceinline__ void convert_guarded(Smem& smem, Place& k_place, Place& v_place) {
#pragma unroll 1
    for (int block = smem.blocks.end - 1; block >= smem.blocks.first; --block) {
        convert_block<Spoilt::kRemove>(smem, kKeys, k_place, block);
        convert_block<Spoilt::kHigh>(smem, kKeys, k_place, block);
        convert_block<Spoilt::kRemove>(smem, kValues, v_place, block);
    }
}

// ---- consumers -------------------------------------------------------------------------------------------

// The products of parts that make a product, the smallest first: part a of one operand with part b of the other.
struct Term {
    int a;
    int b;
};
constexpr int kTerms = 6;
__device__ __forceinline__ constexpr Term term_at(int i) {
    constexpr Term kTable[kTerms] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
    return kTable[i];
}

// The first two parts of a warp's queries as operands; the third, which one product needs, is read from shared memory.
using QueryParts = unsigned int[2][kDepths][4];
using PackedWeights = unsigned int[kParts][kBlockKeys / 4];

// `q` is where the lane's matrices begin.
__device__ __forceinline__ void load_queries(QueryParts& parts, unsigned int q) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int d = 0; d < kDepths; ++d) {
            // Rows are aligned, so that the swizzle is an exclusive or with the address.
            ldmatrix_x4(parts[part][d], (q ^ d % 4 * 32) + part * kPartBytes + d / 4 * kSlabBytes);
        }
    }
}

// products += (or =, from the first term on) the terms kFirst to kEnd - 1 of q . keys.
template <int kFirst, int kEnd>
__device__ __forceinline__ void issue_scores(float (&products)[kBlockKeys / 2], const QueryParts& q,
                                             unsigned long long last_q, unsigned long long keys) {
    wgmma_fence();
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
        const Term term = term_at(i);
#pragma unroll
        for (int d = 0; d < kDepths; ++d) {
            const unsigned int depth = d / 4 * kSlabBytes + d % 4 * 32;
            const unsigned long long b = advance(keys, term.b * kPartBytes + depth);
            const bool accumulate = i > 0 || d > 0;
            if (term.a == 2) {
                Wgmma<__nv_bfloat16, kBlockKeys>::ss(products, advance(last_q, depth), b, accumulate);
            } else {
                Wgmma<__nv_bfloat16, kBlockKeys>::rs_k_major(products, q[term.a][d], b, accumulate);
            }
        }
    }
    wgmma_commit();
}

// products = weights . values
__device__ __forceinline__ void issue_values(
    float (&products)[kPaddedDim / 2], const PackedWeights& weights, unsigned long long values) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
        const Term term = term_at(i);
#pragma unroll
        for (int key = 0; key < kBlockKeys; key += 16) {
            const unsigned int row = key * kSlabColumns * sizeof(unsigned short);
            Wgmma<__nv_bfloat16, kPaddedDim>::rs(products, &weights[term.a][key / 4],
                                                 advance(values, term.b * kPartBytes + row), i > 0 || key > 0);
        }
    }
    wgmma_commit();
}

// Walk the tile's keys.
template <bool kGuarded>
__device__ __forceinline__ void attend(Smem& smem, Sums& sums, RowState& state, unsigned int& has_key, Place& k_place,
                                       Place& v_place, int consumer, float scale, float softcap) {
    const int lane = threadIdx.x % 32;
    Parts& q = smem.q[consumer];
    const unsigned int q_row = threadIdx.x % kWarpgroup / 32 * kWarpRows + lane % 16;
    const unsigned int q_lane =
        shared_address(&q.parts[0][0][q_row][0]) + (lane / 16 ^ lane % 8) * 8 * sizeof(unsigned short);
    const unsigned long long last_q = wgmma_descriptor(q.parts[2], 0);
    const unsigned long long k_descriptor = wgmma_descriptor(smem.ring[kKeys], 0);
    const unsigned long long v_descriptor = wgmma_descriptor(smem.ring[kValues], kSlabBytes);

    const auto take_turn = [&] { named_barrier_sync(kTurnBarrier + consumer, 2 * kWarpgroup); };
    const auto pass_turn = [&] {
        named_barrier_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 2 * kWarpgroup);
    };
    // The products are done, for this thread: each gives back what it may have read itself.
    const auto release = [&](Operand operand, Place& place) {
        mbarrier_arrive(smem.empty[operand][place.stage]);
        place.advance();
    };

#pragma unroll kGuarded ? 1 : kThreadChunks
    for (int i = 0; i < kThreadChunks; ++i) {
        Chunk chunk;
        load_chunk(chunk, i, smem.planes[kQueries], smem.rows.first + consumer * kRows,
                   KeyRange{0, static_cast<unsigned int>(smem.rows.sq)});
        store_chunk<kGuarded ? Spoilt::kHigh : Spoilt::kIgnore>(q, i, chunk);
    }
    fence_proxy_async();
    named_barrier_sync(kQueryBarrier + consumer, kWarpgroup);
    state.reset();
    clear(sums);

#pragma unroll 1
    for (int block = smem.blocks.end - 1; block >= smem.blocks.first; --block) {
        float products[kBlockKeys / 2];
        QueryParts queries;
        const auto begin_scores = [&] {
            mbarrier_wait(smem.full[kKeys][k_place.stage], k_place.parity);
            take_turn();
            return advance(k_descriptor, k_place.stage * sizeof(Parts));
        };
        const auto end_scores = [&] {
            pass_turn();
            wgmma_wait<0>();
            pin(products);
            release(kKeys, k_place);
        };
        load_queries(queries, q_lane);
        if (kGuarded) {
#pragma unroll
            for (int d = 0; d < kDepths; ++d) {
#pragma unroll
                for (int i = 0; i < 4; ++i) queries[0][d][i] = remove_spoilt(queries[0][d][i]);
            }
            issue_scores<0, kTerms - 1>(products, queries, last_q, begin_scores());
            end_scores();
            load_queries(queries, q_lane);
        }
        issue_scores<kGuarded ? kTerms - 1 : 0, kTerms>(products, queries, last_q, begin_scores());
        end_scores();

        Scores scores;
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; ++i) scores[i / 4][i % 4] = products[i];
        finish_scores(scores, smem.rows, scale, softcap, block * kBlockKeys + lane % 4 * 2,
                      smem.blocks.is_partial(block), has_key);
        float rescale[2];
        weigh(scores, state, rescale);
        PackedWeights weights;
#pragma unroll
        for (int i = 0; i < kBlockKeys / 4; ++i) {
            unsigned int pair[kParts];
            split<Spoilt::kIgnore>(pair, scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int part = 0; part < kParts; ++part) weights[part][i] = pair[part];
        }

        mbarrier_wait(smem.full[kValues][v_place.stage], v_place.parity);
        bool is_spoilt = false;
        if (kGuarded) {
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) is_spoilt |= smem.found[v_place.stage][warp] != 0;
        }
        float block_sums[kPaddedDim / 2];
        take_turn();
        issue_values(block_sums, weights, advance(v_descriptor, v_place.stage * sizeof(Parts)));
        pass_turn();
        wgmma_wait<0>();
        pin(block_sums);
        release(kValues, v_place);
#pragma unroll
        for (int i = 0; i < kPaddedDim / 2; ++i) {
            float& sum = sums[i / 4][0][i % 4];
            sum = fmaf(sum, rescale[i / 2 % 2], block_sums[i]);
        }
        if (is_spoilt) add_spoilt_values(sums, smem.planes[kValues], smem.rows, block * kBlockKeys, kBlockKeys);
    }
}

__device__ __forceinline__ void consume(Smem& smem, int consumer, float* output, float scale, float softcap) {
    Place k_place;
    Place v_place;
    Sums sums;
    RowState state;
    unsigned int has_key = 0;
    // The first turn is the first consumer's.
    if (consumer == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroup);
    attend<false>(smem, sums, state, has_key, k_place, v_place, consumer, scale, softcap);
    if (__syncthreads_or(!are_finite(sums))) {
        attend<true>(smem, sums, state, has_key, k_place, v_place, consumer, scale, softcap);
    }
    store_output(output + static_cast<long long>(smem.rows.plane) * smem.rows.sq * kHeadDim, sums, state, smem.rows,
                 has_key);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);

    const QueryTile<kTileRows> tile(q_heads, sq, tile_index<kTileRows>(sq, sk, group));
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    if (threadIdx.x == 0) {
        const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
        smem.rows = {lengths,      mask + tile.b * mask_batch_stride + tile.h * mask_head_stride,
                     tile.plane,   tile.first,
                     local_window, sq,
                     sk};
        smem.blocks = KeyBlocks(
            lengths.range(tile.first, local_window), lengths.range(tile.last, local_window), kBlockKeys);
        smem.planes[kKeys] = key + kv_plane;
        smem.planes[kValues] = value + kv_plane;
        smem.planes[kQueries] = q + static_cast<long long>(tile.plane) * sq * kHeadDim;
        for (int operand = kKeys; operand <= kValues; ++operand) {
            for (int i = 0; i < kStages; ++i) {
                mbarrier_init(smem.full[operand][i], kWarps);
                mbarrier_init(smem.empty[operand][i], kConsumers * kWarpgroup);
            }
        }
    }
    __syncthreads();

    if (warpgroup == kConsumers) {
        setmaxnreg_dec<kConverterRegisters>();
        Place k_place;
        Place v_place;
        convert(smem, k_place, v_place);
        if (__syncthreads_or(false)) convert_guarded(smem, k_place, v_place);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(smem, warpgroup, output, scale, softcap);
    }
}
