// DsaIndexSelect, certified, for decode steps on Hopper: one query row of each batch, in a single launch.
//
//     query [B H, D], key [B, T, D], weights [B, H], bias [B, T] f32   ->   out [B, top_k] i64
//
// It does what dsa_index_select_score_sm90.cu and dsa_index_select_certify.cu do together, and scores never leave
// shared memory. The blocks of a launch are all resident (it is a cooperative one); a team of them shares a row, each
// with a run of its keys.
//
// Scores: a tile is kTileKeys keys. Four warpgroups take turns, each with kKeyStages buffers of its own that one of its
// threads fills again as soon as all have read them. Half of the warps that have multiplied a tile then finish it: they
// add the bias, take the keys' norms, and keep f, who is allowed, and what bounds the error. While keys stream, any
// other access to global memory takes microseconds: biases have been brought to shared memory before.
//
// The team meets in global memory (common/team_slots.cuh):
//
//   1. How far the scores of the first tiles reach tells the bins of a histogram. It is heard before the last tiles.
//      Nothing else is published, for a fence would wait as long: the launch before has left the histogram zero.
//   2. Every key has been counted. Each block finds the bin with the k-th greatest f, decides of its own keys, and
//      scores those in strict order that the error leaves open.
//   3. Meanwhile all tell how many those are, so that each knows where its own lie in one list. An entry of it is there
//      once it is not zero, and no meeting follows. Each block ranks the list, and emits its own winners behind those
//      of the blocks before.
//
// Where that list might be long (scores that crowd a bin, irregular numbers, an outlier's great error), the steps of
// common/dsa_repair.cuh meet oftener.
//
// Nothing depends on the order in which blocks or threads arrive: the list is ranked by (score, position).
#include "common/async_copy.cuh"
#include "common/block_scan.cuh"
#include "common/dsa_bound.cuh"
#include "common/dsa_repair.cuh"
#include "common/mbarrier.cuh"
#include "common/ptx.cuh"
#include "common/team_slots.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kKeyStages = KEY_STAGES;
constexpr int kWarpgroup = 128;
constexpr int kWarpgroups = kThreads / kWarpgroup;
constexpr int kTileKeys = 64;  // of one accumulator
constexpr int kTileWords = kTileKeys / 32;
constexpr int kSlabs = kHeadDim / 64;
constexpr int kAccumulator = kTileKeys * kHeads / kWarpgroup;
constexpr int kLaneWeights = kHeads / 4;
constexpr int kMaxBlocks = MAX_BLOCKS;  // of a team
constexpr int kMaxWords = kWarpSize;    // of a block: a lane each
constexpr int kMaxKeys = kMaxWords * 32;
static_assert(kParts == 1, "f32 vectors are not split here");

// The list of strict scores, where the histogram promises that it holds them; at most one key a thread.
constexpr unsigned int kShortBand = 256;
static_assert(kShortBand <= kRanked && kHeads <= kThreads, "what a thread each is for");

// Which of the warpgroup's barriers of the hardware; 0 is the block's.
constexpr int kWarpgroupBarrier = 1;

struct alignas(1024) Slab {
    Element values[8][64];  // eight rows of 128 bytes, with the 128-byte swizzle

    // Eight neighbouring elements of a row, from a multiple of eight on.
    __device__ __forceinline__ const Element* at(int row, int d) const { return &values[row][(d / 8 ^ row) * 8]; }
};

// What the blocks of a row have in common in global memory.
struct Shared {
    unsigned int histograms[2][kBins];      // where one is not enough
    unsigned long long listed[kShortBand];  // strict keys of the band, and positions: the better the greater; or zero
};

static_assert(sizeof(Shared) <= TEAM_BYTES, "the host gives a row this much");

// What they find as the launch before has left it; zero before the first one.
struct Meetings {
    unsigned int histogram[kBins];                  // zero
    unsigned long long held;                        // meetings before this launch
    alignas(128) TeamSlot slots[2][2][kMaxBlocks];  // by turns, and for two values each
};

static_assert(sizeof(Meetings) == MEETINGS_BYTES, "the host gives a row this much");

struct Smem {
    union {
        Slab keys[kWarpgroups][kKeyStages][kSlabs][kTileKeys / 8];
        alignas(16) float staged[kWarps][kStaged];
    };
    Slab query[kSlabs][kHeads / 8];
    alignas(16) float values[kMaxKeys];  // biases, then f, then the strict keys of the band
    union {
        struct {
            float half_norms[kWarpgroups][2][2][kTileKeys];  // weighted squares, by turns, of either half of D
            float raw[kWarpgroups][2][kTileKeys];            // scores without bias, by turns
        } tiles;
        struct {
            unsigned long long ranked[kRanked];
            unsigned short listed[kListed];
        };
    };
    alignas(16) unsigned int in[kThreads];    // a word of 32 keys a thread: those surely selected,
    alignas(16) unsigned int band[kThreads];  // and those to be scored
    alignas(16) float errors[kThreads];       // the greatest norm; where it is asked for, the bound of e
    float weights[kHeads];
    unsigned int groups[kGroups];
    HeadSums head_sums[kWarps];
    unsigned int sample[3];  // what the first tiles tell: see sample_word()
    Barrier inputs_loaded;   // all but keys
    Barrier full[kWarpgroups][kKeyStages];
    Barrier sampled, heard;
    unsigned long long held;                // meetings before this launch
    uint2 told[4][kMaxBlocks / kWarpSize];  // by the blocks that a warp has heard, and by those before this one
    BlockScanScratch<kThreads> scan;
    unsigned int warp_values[2][4][kWarps];  // of reductions, by turns
    unsigned int bin[3];
    unsigned int near;  // keys in the bins that the thresholds touch
    unsigned int n_in, n_band, wins_before;
    Counts counts;

    __device__ __forceinline__ const Element* query_at(int head, int d) const {
        return query[d / 64][head / 8].at(head % 8, d % 64);
    }
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much");

struct Row {
    const float* bias;    // of this block's first key on
    const Element* keys;  // from that on
    unsigned int length;  // of this block's part
    unsigned int n_words;
};

// The blocks of a row, as common/dsa_repair.cuh has them.
struct Team {
    Smem& smem;
    Shared& shared;
    Meetings& meetings;
    unsigned int rank, blocks;
    unsigned int met = 0;
    unsigned int histogram = 0;
    unsigned int turn = 0;

    // Of the next meeting, and of nothing that slots have held so far.
    __device__ __forceinline__ unsigned long long meeting() const { return smem.held + met + 1; }

    // One thread tells the team what its block knows. If it is kPublished, so is all that the block's threads have
    // written before their last barrier; while keys stream, that takes microseconds.
    template <bool kPublished, int kCount>
    __device__ __forceinline__ void tell(const unsigned int (&values)[kCount]) {
#pragma unroll
        for (int i = (kCount - 1) / 2 * 2; i >= 0; i -= 2) {
            const unsigned long long second = i + 1 < kCount ? values[(i + 1) % kCount] : 0;
            const unsigned long long pair = second << 32 | values[i];
            TeamSlot& slot = meetings.slots[met % 2][i / 2][rank];
            if (kPublished) {
                store_slot_release(slot, pair, meeting());
            } else {
                store_slot_relaxed(slot, pair, meeting());
            }
        }
    }

    // How many warps hear what the team tells: a thread a block.
    __device__ __forceinline__ unsigned int listeners() const { return (blocks + kWarpSize - 1) / kWarpSize; }

    // Wait for what all blocks tell, a thread a block: `block` is 0 in the first thread of some warp, 1 in the next
    // one, and may go beyond them. All threads of this block may read it after one barrier and before the next.
    template <bool kPublished, int kMaxima, int kCount>
    __device__ __forceinline__ void hear(unsigned int block) {
        unsigned int values[kCount] = {};
        if (block < blocks) {
            bool is_there;
            do {
                is_there = true;
#pragma unroll
                for (int i = 0; i < kCount; i += 2) {
                    const TeamSlot& place = meetings.slots[met % 2][i / 2][block];
                    const TeamSlot slot = kPublished ? load_slot_acquire(place) : load_slot_relaxed(place);
                    values[i] = static_cast<unsigned int>(slot.told);
                    if (i + 1 < kCount) values[(i + 1) % kCount] = static_cast<unsigned int>(slot.told >> 32);
                    is_there = is_there && slot.meeting == meeting();
                }
            } while (!is_there);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const unsigned int all =
                i < kMaxima ? __reduce_max_sync(kFullWarp, values[i]) : __reduce_add_sync(kFullWarp, values[i]);
            const unsigned int before =
                i < kMaxima ? 0 : __reduce_add_sync(kFullWarp, block < rank ? values[i] : 0);
            if (block % kWarpSize == 0) smem.told[i][block / kWarpSize] = {all, before};
        }
    }

    // The team's maxima and sums, and the sums over the blocks before.
    template <int kMaxima, int kCount>
    __device__ __forceinline__ void read_told(unsigned int (&values)[kCount], unsigned int (&before)[kCount]) const {
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint2 told = lane < listeners() ? smem.told[i][lane] : uint2{};
            values[i] = i < kMaxima ? __reduce_max_sync(kFullWarp, told.x) : __reduce_add_sync(kFullWarp, told.x);
            before[i] = i < kMaxima ? 0 : __reduce_add_sync(kFullWarp, told.y);
        }
    }

    // To be called by all threads once per meeting, after hear().
    __device__ __forceinline__ void advance() { ++met; }

    // Tell what all threads of a block know, and hear what the others do.
    template <int kMaxima, int kCount>
    __device__ __forceinline__ void exchange(unsigned int (&values)[kCount], unsigned int (&before)[kCount]) {
        if (threadIdx.x == 0) tell<true>(values);
        listen<kMaxima>(values, before);
    }

    // The second half of it.
    template <int kMaxima, int kCount>
    __device__ __forceinline__ void listen(unsigned int (&values)[kCount], unsigned int (&before)[kCount]) {
        if (threadIdx.x < kMaxBlocks) hear<true, kMaxima, kCount>(threadIdx.x);
        advance();
        __syncthreads();
        read_told<kMaxima>(values, before);
    }

    template <int kCount>
    __device__ __forceinline__ void reduce_max(unsigned int (&values)[kCount]) {
        unsigned int before[kCount];
        reduce_warp<kCount>(smem, values, turn);
        __syncthreads();
        reduce_block<kCount>(smem, values, turn);
        exchange<kCount>(values, before);
    }

    template <int kCount>
    __device__ __forceinline__ void sum_blocks(unsigned int (&values)[kCount], unsigned int (&before)[kCount]) {
        __syncthreads();
        exchange<0>(values, before);
    }

    // One is in use, one to be used next, and the one before is cleared meanwhile.
    __device__ __forceinline__ unsigned int (&bins_of(unsigned int index))[kBins] {
        return index == 0 ? meetings.histogram : shared.histograms[index - 1];
    }

    // This block's share of zeroes; where they lie is nobody's before the next meeting.
    template <typename T, int kCount>
    __device__ __forceinline__ void clear(T (&items)[kCount], unsigned int thread, unsigned int threads) {
        const unsigned int end = (rank + 1) * kCount / blocks;
        for (unsigned int i = rank * kCount / blocks + thread; i < end; i += threads) items[i] = 0;
    }

    // All blocks have read the histogram before the present one, for they have met since.
    __device__ __forceinline__ void renew_bins() {
        clear(bins_of((histogram + 2) % 3), threadIdx.x, kThreads);
        histogram = (histogram + 1) % 3;
    }

    __device__ __forceinline__ void count(unsigned int bin) {
        const unsigned int active = __activemask();
        const unsigned int same = __match_any_sync(active, bin);
        if ((same & (1u << threadIdx.x % kWarpSize) - 1) == 0) add(bin, __popc(same));
    }

    // The same of a word of keys, by a warp; but for bin 0, as locate_bin() knows what is missing.
    __device__ __forceinline__ void count_word(unsigned int bin, bool is_there) {
        const unsigned int counted = __ballot_sync(kFullWarp, is_there && bin != 0);
        const unsigned int first = __shfl_sync(kFullWarp, bin, __ffs(counted) - 1);
        if (__all_sync(kFullWarp, (counted >> threadIdx.x % kWarpSize & 1) == 0 || bin == first)) {
            if (threadIdx.x % kWarpSize == 0 && counted != 0) add(first, __popc(counted));
        } else if ((counted >> threadIdx.x % kWarpSize & 1) != 0) {
            add(bin, 1);
        }
    }

    __device__ __forceinline__ void add(unsigned int bin, unsigned int n) {
        atomicAdd(&bins_of(histogram)[bin], n);
    }

    // Bins of a group, as many groups a warp.
    static constexpr int kWarpGroups = kGroups / kWarps;
    using LaneBins = unsigned int[kWarpGroups][kLaneBins];

    // After a meeting of the team: of the bins those of this lane. locate_bin() needs the groups' sums a barrier later.
    __device__ __forceinline__ void read_bins(LaneBins& bins) {
        const int lane = threadIdx.x % kWarpSize;
        const int warp = threadIdx.x / kWarpSize;
#pragma unroll
        for (int i = 0; i < kWarpGroups; ++i) {
            const int first = (warp + i * kWarps) * kGroupBins + lane * kLaneBins;
            const uint4 own = __ldcg(reinterpret_cast<const uint4*>(&bins_of(histogram)[first]));
            bins[i][0] = own.x;
            bins[i][1] = own.y;
            bins[i][2] = own.z;
            bins[i][3] = own.w;
        }
#pragma unroll
        for (int i = 0; i < kWarpGroups; ++i) {
            const unsigned int sum = bins[i][0] + bins[i][1] + bins[i][2] + bins[i][3];
            const unsigned int group = __reduce_add_sync(kFullWarp, sum);
            if (lane == 0) smem.groups[warp + i * kWarps] = group;
        }
    }

    // The bin of the rank-th greatest of n keys; of those that have not been counted bin 0 is told.
    __device__ __forceinline__ Bin locate_bin(unsigned int key_rank, unsigned int n, LaneBins& bins) {
        const int lane = threadIdx.x % kWarpSize;
        const int warp = threadIdx.x / kWarpSize;
        unsigned int group = smem.groups[lane];
        const unsigned int missing = n - __reduce_add_sync(kFullWarp, group);
        if (lane == 0) group += missing;
        if (threadIdx.x == 0) bins[0][0] += missing;
        unsigned int above;
        const int found = find_lane(group, key_rank, above);
#pragma unroll
        for (int i = 0; i < kWarpGroups; ++i) {
            if (found == warp + i * kWarps) search_group(smem, found, bins[i], key_rank, above);
        }
        __syncthreads();
        return {smem.bin[0], smem.bin[1], smem.bin[2]};
    }

    __device__ __forceinline__ Bin find_bin(unsigned int key_rank) {
        unsigned int nothing[1] = {};
        unsigned int before[1];
        sum_blocks(nothing, before);
        LaneBins bins;
        read_bins(bins);
        __syncthreads();
        return locate_bin(key_rank, __reduce_add_sync(kFullWarp, smem.groups[threadIdx.x % kWarpSize]), bins);
    }
};

// Begin to bring one tile of keys to a stage of its warpgroup; one thread's work.
__device__ __forceinline__ void load_keys(
    Smem& smem, const TensorMap& key_map, int warpgroup, int stage, unsigned int key, unsigned int batch) {
    Barrier& full = smem.full[warpgroup][stage];
    mbarrier_arrive_expect_tx(full, sizeof(smem.keys[0][0]));
    for (int slab = 0; slab < kSlabs; ++slab) {
        tma_load_3d(smem.keys[warpgroup][stage][slab], key_map, full, slab * 64, key, batch, CacheHint::kEvictFirst);
    }
}

// What this warp's heads add to the bound of the row's errors; the query has arrived.
__device__ __forceinline__ void sum_heads(Smem& smem, float error_scale, const NormWeights& norm_weights) {
    constexpr int kAccesses = kHeadDim / 8;  // lanes that share a head
    constexpr int kWarpHeads = kWarpSize / kAccesses;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int d = lane % kAccesses * 8;
    HeadSums sums;
#pragma unroll 1
    for (int first = 0; first < kHeads; first += kWarps * kWarpHeads) {
        const int head = first + warp * kWarpHeads + lane / kAccesses;
        const bool is_there = head < kHeads;
        const int own = is_there ? head : 0;  // once more makes no difference to what is true of all heads
        const float weight = smem.weights[own];
        float squares = sums.squares<kHeadDim>(load_pack<8>(smem.query_at(own, d)), weight, d, norm_weights);
#pragma unroll
        for (int step = 1; step < kAccesses; step *= 2) squares += __shfl_xor_sync(kFullWarp, squares, step);
        if (is_there) sums.add_head(squares, weight, error_scale, norm_weights);
    }
#pragma unroll
    for (int step = kAccesses; step < kWarpSize; step *= 2) sums.join(step);
    sums.is_zero = __all_sync(kFullWarp, sums.is_zero);
    sums.fuses = __all_sync(kFullWarp, sums.fuses);
    if (lane == 0) smem.head_sums[warp] = sums;
}

// What bounds the error of the row, known to all threads; all warps have summed their heads.
__device__ __forceinline__ RowBound bound_row(const Smem& smem, float scale) {
    HeadSums sums = smem.head_sums[threadIdx.x % kWarps];
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) sums.join(step);
    sums.is_zero = __all_sync(kFullWarp, sums.is_zero);
    sums.fuses = __all_sync(kFullWarp, sums.fuses);
    return sums.bound<kHeadDim>(scale);
}

// Start the dots of a tile with all heads; a warpgroup's work.
__device__ __forceinline__ void start_dots(
    float (&dots)[kAccumulator], const Slab (&keys)[kSlabs][kTileKeys / 8], const Slab (&query)[kSlabs][kHeads / 8]) {
    const unsigned long long key_matrix = wgmma_descriptor(&keys[0][0], 0);
    const unsigned long long query_matrix = wgmma_descriptor(&query[0][0], 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
        const unsigned long long a = advance(key_matrix, d / 64 * sizeof(keys[0]) + d % 64 * 2);
        const unsigned long long b = advance(query_matrix, d / 64 * sizeof(query[0]) + d % 64 * 2);
        Wgmma<Element, kHeads>::ss(dots, a, b, d != 0);
    }
    wgmma_commit();
}

// Whether an element is the upper half of an f32. What follows it in memory then continues its mantissa, and makes its
// magnitude greater by at most 2^-7 of it.
template <typename T>
constexpr bool kIsUpperHalf = false;
template <>
constexpr bool kIsUpperHalf<__nv_bfloat16> = true;

// The squares of eight elements, or a little more.
__device__ __forceinline__ float sum_squares(const Element* source) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(source);
    const unsigned int pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low, high;
        if constexpr (kIsUpperHalf<Element>) {
            low = __uint_as_float(pairs[i] << 16);
            high = __uint_as_float(pairs[i]);
        } else {
            const auto pair = reinterpret_cast<const Pack<Element, 2>&>(pairs[i]);
            low = to_f32(pair.values[0]);
            high = to_f32(pair.values[1]);
        }
        sums[0] = __fmaf_rn(low, low, sums[0]);
        sums[1] = __fmaf_rn(high, high, sums[1]);
    }
    return sums[0] + sums[1];
}

// The weighted squares of one half of a key, or a little more, by each thread of the warpgroup: eight elements take the
// weight of the first of them, which is the greatest.
__device__ __forceinline__ void take_half_norm(
    float (&half_norms)[2][kTileKeys], const Slab (&keys)[kSlabs][kTileKeys / 8], const NormWeights& norm_weights) {
    constexpr int kHalf = kHeadDim / 2;
    const int key = threadIdx.x % kTileKeys;
    const int half = threadIdx.x % kWarpgroup / kTileKeys;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kHalf; i += 8) {
        const int d = half * kHalf + i;
        squares = __fmaf_rn(sum_squares(keys[d / 64][key / 8].at(key % 8, d % 64)),
                            norm_weights.of(kHeadDim - d, kHeadDim / 16 - d / 16), squares);
    }
    half_norms[half][key] = squares;
}

// Sum the heads for the two keys of this lane, over the lanes of its quad too: the scores without bias.
__device__ __forceinline__ void store_scores(
    float* scores, const float (&dots)[kAccumulator], const float (&weights)[kLaneWeights]) {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kLaneWeights; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float dot = dots[i / 2 * 4 + half * 2 + i % 2];
            sums[half] = __fmaf_rn(fmaxf(dot, 0.0f), weights[i], sums[half]);
        }
    }
    const int lane = threadIdx.x % kWarpSize;
    const bool upper = lane & 2;
    float sum = (upper ? sums[1] : sums[0]) + __shfl_xor_sync(kFullWarp, upper ? sums[0] : sums[1], 2);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    if (lane % 2 == 0) scores[threadIdx.x % kWarpgroup / 32 * 16 + lane / 4 + (upper ? 8 : 0)] = sum;
}

// What a warp knows of the keys that it has finished.
struct Summary {
    float norm = 0.0f;  // the greatest
    bool is_irregular = false;
    unsigned int allowed = 0;
};

// Add a word of scores to what the block tells of its first tiles: the least of the words' quota-th greatest f (none,
// if a word has fewer), the greatest f, and the least. All f of a row's quotas together are top_k or more, so that its
// k-th greatest is none below the first.
__device__ __forceinline__ void sample_word(Smem& smem, float f, bool is_there, unsigned int quota) {
    unsigned int key = is_there ? total_order_key(f) : 0;
    const unsigned int least = __reduce_max_sync(kFullWarp, is_there ? ~key : 0);
    const unsigned int greatest = __reduce_max_sync(kFullWarp, key);
    unsigned int last = quota <= kWarpSize ? greatest : 0;
    for (unsigned int i = 1; i < quota && last != 0; ++i) {
        const unsigned int lanes = __ballot_sync(kFullWarp, key == last);
        if (threadIdx.x % kWarpSize == __ffs(lanes) - 1) key = 0;
        last = __reduce_max_sync(kFullWarp, key);
    }
    if (threadIdx.x % kWarpSize == 0) {
        atomicMax(&smem.sample[0], ~last);
        atomicMax(&smem.sample[1], greatest);
        atomicMax(&smem.sample[2], least);
        mbarrier_arrive(smem.sampled);
    }
}

// Score the block's keys, and count them in the team's bins; a warpgroup's share. Returns what this warp has finished.
__device__ __forceinline__ Summary score_block(
    Smem& smem, Team& team, Bins& bins, const Row& row, const TensorMap& key_map, unsigned int first_key,
    unsigned int batch, unsigned int quota, float scale, const NormWeights& norm_weights) {
    const int lane = threadIdx.x % kWarpSize;
    const int warpgroup = threadIdx.x / kWarpgroup;
    const int warp = threadIdx.x % kWarpgroup / kWarpSize;
    const int n_tiles = (row.length + kTileKeys - 1) / kTileKeys;
    const int own_tiles = (n_tiles - warpgroup + kWarpgroups - 1) / kWarpgroups;
    // The first warp tells how far scores reach once all have finished a tile. What the team has told is heard as late
    // as possible: before the last tile.
    const bool speaks = threadIdx.x / kWarpSize == 0;
    const bool listens = threadIdx.x / kWarpSize < team.listeners();
    const int last = own_tiles - 1;
    Summary summary;
    float weights[kLaneWeights];
    // Column 8 g + 2 c + p of the product belongs to lane c of a quad, as its weight 2 g + p.
#pragma unroll
    for (int i = 0; i < kLaneWeights; ++i) {
        weights[i] = __fmul_rn(scale, smem.weights[i / 2 * 8 + lane % 4 * 2 + i % 2]);
    }
    // A warp finishes one word of every other tile of its warpgroup.
    const auto own_word = [&](int i) { return (i * kWarpgroups + warpgroup) * kTileWords + warp % kTileWords; };
    const auto count_until = [&](int end) {
        __syncwarp();  // all lanes know the words
#pragma unroll 1
        for (int i = warp / kTileWords; i < end; i += kWarpgroup / kTileKeys) {
            const unsigned int w = own_word(i);
            team.count_word(bins.bin(smem.values[w * 32 + lane]), smem.in[w] >> lane & 1);
        }
    };
    const auto hear_bins = [&]() {
        if (listens) {
            team.hear<false, 3, 3>(threadIdx.x);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem.heard);
        }
        mbarrier_wait(smem.heard, 0);
        unsigned int told[3], before[3];
        team.read_told<3>(told, before);
        const unsigned int low = ~told[0];
        bins = Bins::beyond(from_total_order_key(low != 0 ? low : ~told[2]), from_total_order_key(told[1]));
    };

    RingPlace<kKeyStages> place;
#pragma unroll 1
    for (int i = 0; i < own_tiles; ++i) {
        if (i == last && i > 0) {
            hear_bins();
            count_until(i);
        }
        const auto& keys = smem.keys[warpgroup][place.stage];
        float dots[kAccumulator];
        mbarrier_wait(smem.full[warpgroup][place.stage], place.parity);
        start_dots(dots, keys, smem.query);
        take_half_norm(smem.tiles.half_norms[warpgroup][i % 2], keys, norm_weights);
        wgmma_wait<0>();
        pin(dots);
        store_scores(smem.tiles.raw[warpgroup][i % 2], dots, weights);
        // Scores and norms are there, and the stage has been read.
        named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroup);
        if (threadIdx.x % kWarpgroup == 0 && i + kKeyStages < own_tiles) {
            const unsigned int next = ((i + kKeyStages) * kWarpgroups + warpgroup) * kTileKeys;
            load_keys(smem, key_map, warpgroup, place.stage, first_key + next, batch);
        }
        place.advance();
        if (i % 2 == warp / kTileWords) {
            const unsigned int w = own_word(i);
            const unsigned int t = w * 32 + lane;
            const int key = t % kTileKeys;
            const auto& halves = smem.tiles.half_norms[warpgroup][i % 2];
            const float norm = norm_weights.norm(halves[0][key] + halves[1][key]);
            const float bias = smem.values[t];
            const bool is_there = t < row.length && is_allowed(bias);
            const bool is_regular = norm < infinity();
            const float greatest =
                __uint_as_float(__reduce_max_sync(kFullWarp, is_regular ? __float_as_uint(norm) : 0));
            const float f = __fadd_rn(smem.tiles.raw[warpgroup][i % 2][key], bias);
            const unsigned int word = __ballot_sync(kFullWarp, is_there);
            smem.values[t] = f;
            if (lane == 0) {
                smem.in[w] = word;
                smem.errors[w] = greatest;
            }
            // A NaN is neither.
            summary.is_irregular = summary.is_irregular || (is_there && !(is_regular && fabsf(f) < infinity()));
            summary.allowed += __popc(word);
            if (word != 0) summary.norm = fmaxf(summary.norm, greatest);
            if (i == 0) sample_word(smem, f, is_there, quota);
            if (i == last && i > 0) team.count_word(bins.bin(f), is_there);
        }
        if (i == 0 && speaks) {
            mbarrier_wait(smem.sampled, 0);
            if (lane == 0) team.tell<false>(smem.sample);
        }
    }
    // racecheck counts the barriers of a warp, whichever they are: all warpgroups have as many.
    if (own_tiles * kWarpgroups < n_tiles) named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroup);
    if (last <= 0) {
        hear_bins();
        count_until(own_tiles);
    }
    team.advance();
    return summary;
}

// Divide the block's keys into those surely selected, those that are not, and the band, which is listed.
__device__ __forceinline__ void classify_and_list(Smem& smem, Range decided) {
    constexpr int kWarpWords = kMaxWords / kWarps;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    unsigned int in[kWarpWords], band[kWarpWords];
#pragma unroll
    for (int i = 0; i < kWarpWords; ++i) {
        const int w = warp + i * kWarps;
        const float f = smem.values[w * 32 + lane];
        const bool is_out = (smem.in[w] >> lane & 1) == 0 || f < decided.lower;
        const bool is_in = !is_out && f > decided.upper;
        in[i] = __ballot_sync(kFullWarp, is_in);
        band[i] = __ballot_sync(kFullWarp, !is_out && !is_in);
    }
    unsigned int n_in = 0;
    unsigned int n_band = 0;
    __syncwarp();  // all lanes have read the words that are replaced
#pragma unroll
    for (int i = 0; i < kWarpWords; ++i) {
        n_in += __popc(in[i]);
        n_band += __popc(band[i]);
        if (lane == 0) {
            smem.in[warp + i * kWarps] = in[i];
            smem.band[warp + i * kWarps] = band[i];
        }
    }
    if (lane == 0 && n_in != 0) atomicAdd(&smem.n_in, n_in);
    if (n_band != 0) {
        unsigned int first = 0;
        if (lane == 0) first = atomicAdd(&smem.n_band, n_band);
        first = __shfl_sync(kFullWarp, first, 0);
#pragma unroll
        for (int i = 0; i < kWarpWords; ++i) {
            const unsigned int place = first + __popc(band[i] & (1u << lane) - 1);
            if (band[i] >> lane & 1) smem.listed[place] = (warp + i * kWarps) * 32 + lane;
            first += __popc(band[i]);
        }
    }
    __syncthreads();
}

// What the ranks of the listed keys say: how many of them win that lie in blocks before this one; those of this block
// are added to smem.in. Neighbouring threads share a key. Behind the listed keys are zeroes.
__device__ __forceinline__ unsigned int rank_list(
    Smem& smem, unsigned int n_listed, unsigned int wanted, unsigned int first_key, unsigned int length) {
    constexpr int kShare = 8;
    constexpr int kAtOnce = 4;
    static_assert(kShortBand % (kShare * kAtOnce) == 0 && kShortBand % (kThreads / kShare) == 0, "the zeroes suffice");
    unsigned int wins_before = 0;
    const unsigned int part = threadIdx.x % kShare;
#pragma unroll 1
    for (unsigned int first = 0; first < n_listed; first += kThreads / kShare) {
        const unsigned long long own = smem.ranked[first + threadIdx.x / kShare];
        unsigned int better = 0;
#pragma unroll 1
        for (unsigned int j = part; j < n_listed; j += kShare * kAtOnce) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) better += smem.ranked[j + i * kShare] > own;
        }
#pragma unroll
        for (int step = 1; step < kShare; step *= 2) better += __shfl_xor_sync(kFullWarp, better, step);
        if (own != 0 && part == 0 && better < wanted) {
            const unsigned int t = ~static_cast<unsigned int>(own);
            if (t < first_key) {
                ++wins_before;
            } else if (t - first_key < length) {
                atomicOr(&smem.in[(t - first_key) / 32], 1u << (t - first_key) % 32);
            }
        }
    }
    wins_before = __reduce_add_sync(kFullWarp, wins_before);
    if (threadIdx.x % kWarpSize == 0 && wins_before != 0) atomicAdd(&smem.wins_before, wins_before);
    __syncthreads();
    return smem.wins_before;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) dsa_index_select_decode_sm90(
    const Element* __restrict__ key, const Element* __restrict__ weights, const float* __restrict__ bias,
    unsigned char* __restrict__ teams, unsigned char* __restrict__ meetings, long long* __restrict__ out,
    unsigned long long* __restrict__ counters, const __grid_constant__ TensorMap query_map,
    const __grid_constant__ TensorMap key_map, unsigned int key_seq, unsigned int blocks, unsigned int block_keys,
    unsigned int top_k, float scale, float weights_scale, float error_scale, float bias_error, float first_weight,
    float element_weight, float step_weight, float low_weight, float norm_floor) {
    extern __shared__ __align__(1024) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    float* values = smem.values;
    unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
    const NormWeights norm_weights = {first_weight, element_weight, step_weight, low_weight, norm_floor};
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int r = blockIdx.x / blocks;
    const unsigned int rank = blockIdx.x % blocks;
    const unsigned int first_key = rank * block_keys;
    const unsigned int length = min(key_seq - first_key, block_keys);
    const float* row_bias = bias + 1ull * r * key_seq + first_key;
    const Row row = {row_bias, key + (1ull * r * key_seq + first_key) * kHeadDim, length,
                     (length + 31) / 32};
    Shared& shared = *reinterpret_cast<Shared*>(teams + 1ull * r * TEAM_BYTES);
    Meetings& row_meetings = *reinterpret_cast<Meetings*>(meetings + 1ull * r * MEETINGS_BYTES);
    if (threadIdx.x == 0) {
        prefetch_tensormap(query_map);
        mbarrier_init(smem.inputs_loaded, 1 + kThreads + kHeads);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(smem.inputs_loaded, sizeof(smem.query));
        for (int slab = 0; slab < kSlabs; ++slab) {
            tma_load_3d(smem.query[slab], query_map, smem.inputs_loaded, slab * 64, r * kHeads, 0,
                        CacheHint::kEvictLast);
        }
        prefetch_tensormap(key_map);
        for (int g = 0; g < kWarpgroups; ++g) {
            for (int i = 0; i < kKeyStages; ++i) mbarrier_init(smem.full[g][i], 1);
        }
        mbarrier_init(smem.sampled, min((length + kTileKeys - 1) / kTileKeys, kWarpgroups) * kTileWords);
        mbarrier_init(smem.heard, (blocks + kWarpSize - 1) / kWarpSize);
        fence_mbarrier_init();
    }
    const auto fill_stages = [&](int begin, int end) {
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int i = begin * kWarpgroups; i < end * kWarpgroups && i * kTileKeys < length; ++i) {
                load_keys(smem, key_map, i % kWarpgroups, i / kWarpgroups, first_key + i * kTileKeys, r);
            }
        }
    };
    for (unsigned int t = threadIdx.x; t < length; t += kThreads) {
        copy_async<4>(shared_address(&values[t]), row_bias + t, true);
    }
    // Nobody waits for these before the query is there as well.
    const bool has_head = threadIdx.x >= kThreads - kHeads;
    const unsigned int head = threadIdx.x - (kThreads - kHeads);
    float weight = 0.0f;
    unsigned long long held = 0;
    if (has_head) weight = to_f32(weights[1ull * r * kHeads + head]);
    if (threadIdx.x == kThreads - 1) held = load_relaxed(row_meetings.held);
    smem.in[threadIdx.x] = 0;
    smem.band[threadIdx.x] = 0;
    if (threadIdx.x == kWarpSize) {
        smem.near = smem.n_in = smem.n_band = smem.wins_before = 0;
        smem.sample[0] = smem.sample[1] = smem.sample[2] = 0;
    }
    __syncthreads();
    // All keys at once would keep the biases and the query from arriving.
    fill_stages(0, 1);
    copy_async_arrive(shared_address(&smem.inputs_loaded));
    if (has_head) {
        smem.weights[head] = __fmul_rn(weight, weights_scale);
        if (threadIdx.x == kThreads - 1) smem.held = held;
        mbarrier_arrive(smem.inputs_loaded);
    }
    Team team = {smem, shared, row_meetings, rank, blocks};
    // To be used after the second meeting.
    team.clear(shared.histograms[0], threadIdx.x, kThreads);
    team.clear(shared.listed, threadIdx.x, kThreads);
    // Words in the first tiles of all blocks, of which the last one may have fewer.
    const unsigned int last_words =
        min((key_seq - (blocks - 1) * block_keys + kTileKeys - 1) / kTileKeys, kWarpgroups) * kTileWords;
    const unsigned int sampled_words = (blocks - 1) * (kWarpgroups * kTileWords) + last_words;
    const unsigned int quota = (top_k + sampled_words - 1) / sampled_words;
    mbarrier_wait(smem.inputs_loaded, 0);
    fill_stages(1, kKeyStages);
    sum_heads(smem, error_scale, norm_weights);  // while the first keys are on their way

    Bins bins(0.0f, 1.0f);
    const Summary own =
        score_block(smem, team, bins, row, key_map, first_key, r, quota, scale, norm_weights);
    const float norm_told = __any_sync(kFullWarp, own.is_irregular) ? infinity() : own.norm;
    unsigned int summary[2] = {__float_as_uint(norm_told), lane == 0 ? own.allowed : 0};
    unsigned int before[2];
    reduce_warp<1>(smem, summary, team.turn);
    __syncthreads();
    reduce_block<1>(smem, summary, team.turn);
    if (threadIdx.x == 0) team.tell<true>(summary);
    const RowBound bound = bound_row(smem, scale);
    const bool is_exact = bound.flags & kExactRow;
    const float per_score = is_exact ? 0.0f : bias_error;
    team.listen<1>(summary, before);
    Team::LaneBins lane_bins;
    team.read_bins(lane_bins);
    __syncthreads();

    unsigned int in_word = 0;
    unsigned int equal_word = 0;
    unsigned int ties = 0;
    unsigned int kept = summary[1];        // of the row
    unsigned int kept_before = before[1];  // in the blocks before
    if (kept > top_k) {
        const unsigned int allowed = kept;
        kept = top_k;
        const float norm = __uint_as_float(summary[0]);
        const bool is_regular = (bound.flags & kRegularRow) && norm < bound.max_norm;
        Range edges = {-infinity(), infinity()};
        Range decided = edges;
        bool is_short = false;
        if (is_regular) {
            const Bin bin = team.locate_bin(top_k, allowed, lane_bins);
            is_short = !needs_split(bin);
            edges = bracket_last_winner(team, smem, bins, bin, values, row.n_words, top_k);
            decided = thresholds(edges, per_score, __fmaf_ru(bound.per_norm, norm, bound.floor));
            if (is_short) {
                const unsigned int low = bins.bin(decided.lower);
                const unsigned int high = decided.upper < infinity() ? bins.bin(decided.upper) : kBins - 1;
                unsigned int near = 0;
#pragma unroll
                for (int i = 0; i < Team::kWarpGroups; ++i) {
                    const unsigned int first =
                        (threadIdx.x / kWarpSize + i * kWarps) * kGroupBins + lane * kLaneBins;
#pragma unroll
                    for (int j = 0; j < kLaneBins; ++j) {
                        near += low <= first + j && first + j <= high ? lane_bins[i][j] : 0;
                    }
                }
                near = __reduce_add_sync(kFullWarp, near);
                if (lane == 0 && near != 0) atomicAdd(&smem.near, near);
            }
        }
        classify_and_list(smem, decided);
        is_short = is_short && smem.near <= kShortBand;
        const bool fuses = bound.flags & kFusingRow;
        const bool f_is_strict = is_exact && is_regular;
        unsigned int n_band;  // of the row
        if (is_short) {
            const unsigned int n_own = smem.n_band;
            // By the last warps, which have least often a key to score.
            if (threadIdx.x >= kThreads - kMaxBlocks) {
                const unsigned int listener = threadIdx.x - (kThreads - kMaxBlocks);
                if (listener == 0) team.tell<false, 2>({smem.n_in, n_own});
                team.hear<false, 0, 2>(listener);
            }
            team.advance();
            score_list(smem, row, fuses, f_is_strict, scale, values, n_own);
            __syncthreads();
            unsigned int counts[2], counts_before[2];
            team.read_told<0>(counts, counts_before);
            n_band = counts[1];
            if (threadIdx.x < n_own) {
                const unsigned int t = smem.listed[threadIdx.x];
                store_relaxed(shared.listed[counts_before[1] + threadIdx.x],
                              static_cast<unsigned long long>(strict_keys[t]) << 32 | ~(first_key + t));
            }
            if (threadIdx.x < kShortBand) {
                unsigned long long listed = 0;
                while (listed == 0 && threadIdx.x < n_band) listed = load_relaxed(shared.listed[threadIdx.x]);
                smem.ranked[threadIdx.x] = listed;
            }
            __syncthreads();
            kept_before = counts_before[0] + rank_list(smem, n_band, top_k - counts[0], first_key, length);
            in_word = smem.in[threadIdx.x];
        } else {
            smem.errors[threadIdx.x] = __fmaf_ru(bound.per_norm, smem.errors[threadIdx.x], bound.floor);
            BlockCounts block = count_keys(team, smem);
            if (is_regular && smem.counts.band > kWideBand) {
                narrow_band(team, smem, edges, per_score, values, row.n_words);
                block = count_keys(team, smem);
            }
            score_band(smem, row, fuses, f_is_strict, scale, values, block.band_before, block.band);
            n_band = smem.counts.band;
            const Winners winners = select_band(team, smem, strict_keys, top_k - smem.counts.in);
            ties = winners.ties;
            in_word = smem.in[threadIdx.x];
            equal_word = add_winners(in_word, smem, strict_keys, winners);
            unsigned int totals[2] = {unsigned(__popc(in_word)), unsigned(__popc(equal_word))};
            unsigned int sums_before[2];
            reduce_warp<0>(smem, totals, team.turn);
            __syncthreads();
            reduce_block<0>(smem, totals, team.turn);
            team.exchange<0>(totals, sums_before);
            ties -= min(sums_before[1], ties);  // that are left to this block
            kept_before = sums_before[0] + min(sums_before[1], winners.ties);
        }
        if (threadIdx.x == 0 && rank == 0 && !is_exact) {
            if (!is_regular) atomicAdd(&counters[0], 1ull);
            atomicAdd(&counters[1], static_cast<unsigned long long>(n_band));
        }
    } else {
        in_word = smem.in[threadIdx.x];
    }

    // All have met since they read the bins, or need none of them.
    if (threadIdx.x >= kMaxWords) team.clear(row_meetings.histogram, threadIdx.x - kMaxWords, kThreads - kMaxWords);
    if (threadIdx.x == kThreads - 1 && rank == 0) row_meetings.held = smem.held + team.met;

    // Positions, from counts of winners and of ties before each word.
    long long* row_out = out + 1ull * r * top_k;
    if (threadIdx.x < kMaxWords) {
        const unsigned int counts = __popc(in_word) | __popc(equal_word) << 16;
        unsigned int counts_before = counts;
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) {
            const unsigned int below = __shfl_up_sync(kFullWarp, counts_before, step);
            if (lane >= step) counts_before += below;
        }
        counts_before -= counts;
        const unsigned int ties_before = min(counts_before >> 16, ties);
        in_word |= lowest_bits(equal_word, ties - ties_before);
        long long* place = row_out + kept_before + (counts_before & 0xffff) + ties_before;
        for (unsigned int rest = in_word; rest != 0; rest &= rest - 1) {
            *place++ = first_key + threadIdx.x * 32 + __ffs(rest) - 1;
        }
    }
    for (unsigned int i = kept + rank * kThreads + threadIdx.x; i < top_k; i += blocks * kThreads) row_out[i] = -1;
}
