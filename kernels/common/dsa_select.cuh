// What the selections of the certified DsaIndexSelect share: groups of words, bins, and strict scores.
//
// docs/dsa_exactness.md proves that the strict score of a key lies within [f - e, f + e], f being its approximate score
// with the bias, and derives e. They decide of most keys whether they are among the top_k of a row; the others, some
// dozens, are the band, and are scored in strict order. A row with irregular numbers, for which no e can be given, has
// all its keys in the band: the same steps then are the strict algorithm. No position depends on the order in which
// threads arrive.
//
// Each kernel has a Smem and a Row of its own; what is used of them here has the same name in all.
#pragma once

#include "common/block_scan.cuh"
#include "common/cluster.cuh"
#include "common/dsa_layout.cuh"
#include "common/element.cuh"
#include "common/strict_score.cuh"
#include "common/total_order.cuh"

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kHeads % 32 == 0 && kHeadDim % 64 == 0 && kHeadDim <= 256, "what a warp scores at a time");

constexpr int kDigitBits = 12;
constexpr int kBins = 1 << kDigitBits;
constexpr int kGroups = kWarpSize;  // of bins, one a lane
constexpr int kGroupBins = kBins / kGroups;
constexpr int kLaneBins = kGroupBins / kWarpSize;
static_assert(kGroups % kWarps == 0, "each warp sums as many groups");
static_assert(kLaneBins == 4 && kBins % (4 * kThreads) == 0, "bins are read and cleared four at a time");

// Scores may crowd beside a few far ones: a bin with more keys is split again.
constexpr unsigned int kCrowdedBin = 48;

// Band keys scored by a warp at once, at most. With the heads of a lane they are the sums in flight.
constexpr int kKeys = 4;
constexpr int kLaneHeads = kHeads / 32;
constexpr int kStaged = kKeys * (kHeadDim > kHeads ? kHeadDim : kHeads + 4);  // those keys, and then their heads' terms
constexpr int kListed = 1024;

// Up to so many band keys are ranked one against all; a radix select ranks more.
constexpr int kRanked = kThreads;

// Elements of an access. Rows of 16 bytes more than a multiple of 128: eight lanes read eight different groups of
// banks.
constexpr int kAccess = 16 / sizeof(Element);
constexpr int kQueryPitch = kHeadDim + kAccess;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

struct Range {
    float lower, upper;
};

// What the strict score of a key is within. per_score is 2 u where there is a bias to add.
__device__ __forceinline__ Range score_range(float per_score, float error, float score) {
    const float e = __fmaf_ru(per_score, fabsf(score), error);
    return {__fsub_rd(score, e), __fadd_ru(score, e)};
}

// Over the block: the greatest of each of the first kMaxima values, and the sum of each other one. A barrier belongs
// between reduce_warp() and reduce_block(), and the caller's work may share it. Turns alternate between two buffers, so
// that whoever comes next does not overwrite what others still read.
template <int kMaxima, int kCount, typename Smem>
__device__ __forceinline__ void reduce_warp(Smem& smem, unsigned int (&values)[kCount], unsigned int& turn) {
    static_assert(kCount <= sizeof(smem.warp_values[0]) / sizeof(smem.warp_values[0][0]), "what the scratch holds");
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = i < kMaxima ? __reduce_max_sync(kFullWarp, values[i]) : __reduce_add_sync(kFullWarp, values[i]);
        if (threadIdx.x % kWarpSize == 0) smem.warp_values[turn][i][threadIdx.x / kWarpSize] = values[i];
    }
}

// The block's, known to all of its threads.
template <int kMaxima, int kCount, typename Smem>
__device__ __forceinline__ void reduce_block(Smem& smem, unsigned int (&values)[kCount], unsigned int turn) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const unsigned int value = lane < kWarps ? smem.warp_values[turn][i][lane] : 0;
        values[i] = i < kMaxima ? __reduce_max_sync(kFullWarp, value) : __reduce_add_sync(kFullWarp, value);
    }
}

// Neighbouring words that a warp takes at once.
constexpr int kWords = 4;

__device__ __forceinline__ void load_words(unsigned int (&group)[kWords], const unsigned int* words) {
    *reinterpret_cast<uint4*>(group) = *reinterpret_cast<const uint4*>(words);
}

__device__ __forceinline__ void store_words(unsigned int* words, const unsigned int (&group)[kWords]) {
    if (threadIdx.x % kWarpSize == 0) {
        *reinterpret_cast<uint4*>(words) = make_uint4(group[0], group[1], group[2], group[3]);
    }
}

// Calls use(index of the first word, kWords words, kWords values of this lane) for groups with a key; a lane's keys
// are its bits of the words.
template <typename Use>
__device__ __forceinline__ void for_each_key(
    const unsigned int* words, const float* values, unsigned int n_words, Use use) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (unsigned int w = threadIdx.x / kWarpSize * kWords; w < n_words; w += kWords * kWarps) {
        alignas(16) unsigned int group[kWords];
        load_words(group, &words[w]);
        if ((group[0] | group[1] | group[2] | group[3]) == 0) continue;
        float own[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) own[i] = values[(w + i) * 32 + lane];
        use(w, group, own);
    }
}

// Bins of equal width over an interval from `low` on, numbered from 1 to kBins - 2; bin 0 and kBins - 1 are open, and
// take what lies farther out. place() is the number of the bin, unclamped, on top of 2^23: as the floats there are the
// integers, its last operation rounds. It is monotone whatever rounds, so that the keys of a bin are an interval of f.
struct BinScale {
    static constexpr float kZero = 0x1p23f;
    float low, per_unit;

    __device__ __forceinline__ float place(float x) const {
        return __fmaf_rn(__fsub_rn(x, low), per_unit, kZero + 1.0f);
    }

    __device__ __forceinline__ unsigned int bin(float x) const {
        return __float_as_uint(fminf(fmaxf(place(x), kZero), kZero + (kBins - 1))) - __float_as_uint(kZero);
    }
};

struct Bin {
    unsigned int index;
    unsigned int above;  // keys in higher bins
    unsigned int count;
};

template <typename Smem>
__device__ __forceinline__ void clear_histogram(Smem& smem) {
#pragma unroll
    for (int bin = 0; bin < kBins; bin += kThreads * 4) {
        *reinterpret_cast<uint4*>(&smem.histogram[bin + threadIdx.x * 4]) = make_uint4(0, 0, 0, 0);
    }
}

// The same once all kBlocks blocks of a row have read it, for all threads of this one.
template <int kBlocks, typename Smem>
__device__ __forceinline__ void renew_histogram(Smem& smem) {
    cluster_sync<kBlocks>();
    clear_histogram(smem);
    __syncthreads();
}

// The lane whose own value holds the rank-th unit (from 1), counted from the highest lane down.
__device__ __forceinline__ int find_lane(unsigned int own, unsigned int rank, unsigned int& above) {
    unsigned int inclusive = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const unsigned int higher = __shfl_down_sync(kFullWarp, inclusive, step);
        if (threadIdx.x % kWarpSize + step < kWarpSize) inclusive += higher;
    }
    const unsigned int lanes = __ballot_sync(kFullWarp, inclusive - own < rank && rank <= inclusive);
    const int lane = __ffs(lanes) - 1;
    above = __shfl_sync(kFullWarp, inclusive - own, lane);
    return lane;
}

// Find the bin of the rank-th greatest counted key (rank from 1) in the group that has it, a warp's work. `above` keys
// are in higher groups, and counts are of this lane's bins. The members of Bin go to smem.bin.
template <typename Smem>
__device__ __forceinline__ void search_group(
    Smem& smem, int group, const unsigned int (&counts)[kLaneBins], unsigned int rank, unsigned int above) {
    const int lane = threadIdx.x % kWarpSize;
    unsigned int above_lane;
    const int found = find_lane(counts[0] + counts[1] + counts[2] + counts[3], rank - above, above_lane);
    if (lane == found) {
        above += above_lane;
        int j = kLaneBins - 1;
#pragma unroll
        for (int i = kLaneBins - 1; i > 0; --i) {
            if (j == i && above + counts[i] < rank) {
                above += counts[i];
                --j;
            }
        }
        smem.bin[0] = group * kGroupBins + lane * kLaneBins + j;
        smem.bin[1] = above;
        smem.bin[2] = j == 0 ? counts[0] : j == 1 ? counts[1] : j == 2 ? counts[2] : counts[3];
    }
}

template <bool kExactProduct, int kCount, typename Smem>
__device__ __forceinline__ void dot_keys(float (&dots)[kLaneHeads][kCount], const Smem& smem, const float* staged) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll(kCount == 1 ? 16 / sizeof(Element) : sizeof(Element) / 2)
    for (int d = 0; d < kHeadDim; d += kAccess) {
        float q[kLaneHeads][kAccess];
#pragma unroll
        for (int h = 0; h < kLaneHeads; ++h) load_f32(smem.query_at(h * 32 + lane, d), q[h]);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            alignas(16) float k[kAccess];
#pragma unroll
            for (int i = 0; i < kAccess; i += 4) {
                *reinterpret_cast<float4*>(&k[i]) = *reinterpret_cast<const float4*>(&staged[j * kHeadDim + d + i]);
            }
#pragma unroll
            for (int i = 0; i < kAccess; ++i) {
#pragma unroll
                for (int h = 0; h < kLaneHeads; ++h) dots[h][j] = add_product<kExactProduct>(dots[h][j], q[h][i], k[i]);
            }
        }
    }
}

// The strict scores of up to kCount keys of this block, by one warp; as total order keys into values.
template <int kCount, typename Smem, typename Row, typename Listed>
__device__ __forceinline__ void score_keys(
    Smem& smem, const Row& row, bool fuses, float scale, const Listed* listed, int n, unsigned int* values) {
    constexpr int kWidth = kHeadDim / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    float* staged = smem.staged[threadIdx.x / kWarpSize];
    ExactRange range;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        const unsigned int t = listed[min(j, n - 1)];
        float k[kWidth];
        load_f32(row.keys + 1ull * t * kHeadDim + lane * kWidth, k);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            range.add(k[i]);
            staged[j * kHeadDim + lane * kWidth + i] = k[i];
        }
    }
    __syncwarp();
    const bool exact = kExactProducts<Element> == ExactProducts::kAlways ||
                       (kExactProducts<Element> == ExactProducts::kInRange && fuses && range.holds());
    float dots[kLaneHeads][kCount] = {};
    if (__all_sync(kFullWarp, exact)) {
        dot_keys<true>(dots, smem, staged);
    } else {
        dot_keys<false>(dots, smem, staged);
    }
    // Asked for now, and added last; any sooner, some kernels run out of registers.
    const float bias = lane < n && row.bias != nullptr ? row.bias[listed[lane]] : 0.0f;
    __syncwarp();
    // One key's terms lie kHeads + 1 apart from the next one's: four lanes read four banks.
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
        const float weight = smem.weights[h * 32 + lane];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            staged[j * (kHeads + 1) + h * 32 + lane] = head_term(dots[h][j], weight, scale);
        }
    }
    __syncwarp();
    if (lane < n) {
        float sum = 0.0f;
#pragma unroll 16
        for (int h = 0; h < kHeads; ++h) sum = __fadd_rn(sum, staged[lane * (kHeads + 1) + h]);
        values[listed[lane]] = total_order_key(finish_score(sum, bias));
    }
    __syncwarp();
}

struct Winners {
    unsigned int key;   // band keys above it win,
    unsigned int ties;  // and the first of those equal to it
};

// The lowest n bits set in word.
__device__ __forceinline__ unsigned int lowest_bits(unsigned int word, unsigned int n) {
    unsigned int rest = word;
    for (; n > 0 && rest != 0; --n) rest &= rest - 1;
    return word ^ rest;
}
