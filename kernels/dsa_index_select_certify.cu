// DsaIndexSelect, certified: from approximate scores to the exact selection.
//
//     scores [rows, row_stride] f32; bias [rows, T] f32; allowed, accounts, key_words, bounds: see
//     dsa_index_select_prepare.cu and dsa_index_select_score_sm90.cu   ->   out [rows, top_k] i64
//
// allowed and accounts may be null: then every score is there, with the bias, or kMaskedScore.
//
// docs/dsa_exactness.md proves that the strict score of a key lies within [f - e, f + e], f being its
// approximate score with the bias, and derives e. A row with more than top_k allowed keys is decided so:
//
//   1. A histogram finds a bin that holds the k-th greatest f.
//   2. upper = the greatest f + e of the keys in or below that bin, lower = the least f - e of those in or
//      above it: the k-th greatest strict score lies between them. Keys with f - e > upper are in, keys
//      with f + e < lower are out. What is left is the band, some dozens of keys.
//   3. The band is scored in strict order, and the best of it complete the selection: a small band is ranked key
//      by key, a large one goes through a radix select.
//   4. Winners are emitted in ascending order.
//
// A row with irregular numbers, for which no e can be given, has all its keys in the band: the same steps
// then are the strict algorithm. A cluster of kCluster blocks takes a row, each block a part of its keys
// that fits its shared memory. No position depends on the order in which threads arrive.
#include "common/block_scan.cuh"
#include "common/cluster.cuh"
#include "common/dsa_layout.cuh"
#include "common/element.cuh"
#include "common/mbarrier.cuh"
#include "common/strict_score.cuh"
#include "common/tma.cuh"
#include "common/total_order.cuh"

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kCluster = CLUSTER;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / kWarpSize;
// From sm_100 on the compiler needs more registers for what is in flight.
constexpr int kBlocksPerSm = kThreads > 256 ? 1 : sizeof(Element) == 4 || __CUDA_ARCH__ >= 1000 ? 2 : 3;
static_assert(kHeads % 32 == 0 && kHeadDim % 64 == 0 && kHeadDim <= 256, "what a warp scores at a time");
static_assert(kThreads >= 256, "a warp scans the groups of the histogram");

constexpr int kDigitBits = 12;
constexpr int kBins = 1 << kDigitBits;
constexpr int kGroups = kWarpSize;  // of bins, one a lane
constexpr int kGroupBins = kBins / kGroups;
constexpr int kLaneBins = kGroupBins / kWarpSize;
static_assert(kLaneBins == 4 && kBins % (4 * kThreads) == 0, "bins are read and cleared four at a time");

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// A bin with more keys is split again, up to kMaxSplits times: scores may crowd beside a few far ones.
constexpr unsigned int kCrowdedBin = 48;
constexpr int kMaxSplits = 4;

// Band keys scored by a warp at once. With the heads of a lane they are the sums in flight.
constexpr int kKeys = 4;
constexpr int kLaneHeads = kHeads / 32;
constexpr int kListed = 1024;

// Up to so many band keys are ranked one against all; a radix select ranks more.
constexpr int kRanked = kThreads;

// Elements of an access. Rows of 16 bytes more than a multiple of 128: eight lanes read eight different groups of
// banks.
constexpr int kAccess = 16 / sizeof(Element);
constexpr int kQueryPitch = kHeadDim + kAccess;

struct Smem {
    alignas(16) Element query[kHeads][kQueryPitch];
    union {
        alignas(16) unsigned int histogram[kBins];
        unsigned int ranked[kRanked];  // strict keys of the cluster's band, by position
        // Four keys as f32, and then the terms of their head sums.
        alignas(16) float staged[kWarps][kKeys * (kHeadDim > kHeads ? kHeadDim : kHeads + 4)];
    };
    float weights[kHeads];
    unsigned int groups[kGroups];
    alignas(16) unsigned int in[kThreads];    // a word of 32 keys a thread: those surely selected,
    alignas(16) unsigned int band[kThreads];  // and those to be scored
    alignas(16) float errors[kThreads];       // bound of e, but for its share of |f|
    alignas(16) unsigned int positions[kThreads];
    unsigned short listed[kListed];
    Barrier loaded;
    BlockScanScratch<kThreads> scan;
    unsigned int warp_values[2][4][kWarps];  // of reductions, by turns
    unsigned int block_values[2][4];
    unsigned int bin[3];
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much, and room for scores behind it");

struct Row {
    const float* scores;
    const float* bias;     // null where all allowed biases are zero
    const Element* query;
    const Element* weights;
    const Element* keys;   // of the row's batch, from this block's first key on
    unsigned int length;   // of this block's part
    unsigned int n_words;
};

// Over the cluster, known to all threads: the greatest of each of the first kMaxima values and the sum of each other
// one; and in before, the sums over the blocks before this one. Turns alternate between two buffers, so that whoever
// comes next does not overwrite what others still read.
template <int kMaxima, int kCount>
__device__ __forceinline__ void reduce(
    Smem& smem, unsigned int (&values)[kCount], unsigned int (&before)[kCount], unsigned int& turn) {
    static_assert(kCount <= 4, "what the scratch holds");
    const int lane = threadIdx.x % kWarpSize;
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = i < kMaxima ? __reduce_max_sync(kFullWarp, values[i]) : __reduce_add_sync(kFullWarp, values[i]);
        before[i] = 0;
        if (lane == 0) smem.warp_values[turn][i][threadIdx.x / kWarpSize] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const unsigned int value = lane < kWarps ? smem.warp_values[turn][i][lane] : 0;
        values[i] = i < kMaxima ? __reduce_max_sync(kFullWarp, value) : __reduce_add_sync(kFullWarp, value);
        if (kCluster > 1 && threadIdx.x == 0) smem.block_values[turn][i] = values[i];
    }
    if constexpr (kCluster > 1) {
        cluster_sync<kCluster>();
        const unsigned int rank = cluster_rank<kCluster>();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const unsigned int value = lane < kCluster ? cluster_load<kCluster>(smem.block_values[turn][i], lane) : 0;
            if (i < kMaxima) {
                values[i] = __reduce_max_sync(kFullWarp, value);
            } else {
                before[i] = __reduce_add_sync(kFullWarp, lane < rank ? value : 0);
                values[i] = __reduce_add_sync(kFullWarp, value);
            }
        }
    }
}

template <int kCount>
__device__ __forceinline__ void reduce_max(Smem& smem, unsigned int (&values)[kCount], unsigned int& turn) {
    unsigned int before[kCount];
    reduce<kCount>(smem, values, before, turn);
}

// Begin to bring the row's query, and its scores of this block, to shared memory; a warp's work.
__device__ __forceinline__ void load_row(Smem& smem, const Row& row, float* values) {
    constexpr unsigned int kVectorBytes = kHeadDim * sizeof(Element);
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int score_bytes = (row.length + 3) / 4 * 16;
    if (lane == 0) {
        mbarrier_arrive_expect_tx(smem.loaded, kHeads * kVectorBytes + score_bytes);
        if (score_bytes != 0) bulk_load(values, row.scores, score_bytes, smem.loaded);
    }
    __syncwarp();
    for (int h = lane; h < kHeads; h += kWarpSize) {
        bulk_load(smem.query[h], row.query + h * kHeadDim, kVectorBytes, smem.loaded);
    }
}

template <bool kExactProduct>
__device__ __forceinline__ void dot_keys(
    float (&dots)[kLaneHeads][kKeys], const Smem& smem, const float* staged) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll(sizeof(Element) / 2)
    for (int d = 0; d < kHeadDim; d += kAccess) {
        float q[kLaneHeads][kAccess];
#pragma unroll
        for (int h = 0; h < kLaneHeads; ++h) load_f32(&smem.query[h * 32 + lane][d], q[h]);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
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

// The strict scores of up to kKeys keys of this block, by one warp; as total order keys into values.
__device__ __forceinline__ void score_keys(
    Smem& smem, const Row& row, bool fuses, float scale, const unsigned short* listed, int n, unsigned int* values) {
    constexpr int kWidth = kHeadDim / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    float* staged = smem.staged[threadIdx.x / kWarpSize];
    ExactRange range;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
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
    float dots[kLaneHeads][kKeys] = {};
    if (__all_sync(kFullWarp, exact)) {
        dot_keys<true>(dots, smem, staged);
    } else {
        dot_keys<false>(dots, smem, staged);
    }
    __syncwarp();
    // One key's terms lie kHeads + 1 apart from the next one's: four lanes read four banks.
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
        const float weight = smem.weights[h * 32 + lane];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) staged[j * (kHeads + 1) + h * 32 + lane] = head_term(dots[h][j], weight, scale);
    }
    __syncwarp();
    if (lane < n) {
        const unsigned int t = listed[lane];
        const float bias = row.bias == nullptr ? 0.0f : row.bias[t];
        float sum = 0.0f;
#pragma unroll 16
        for (int h = 0; h < kHeads; ++h) sum = __fadd_rn(sum, staged[lane * (kHeads + 1) + h]);
        values[t] = total_order_key(finish_score(sum, bias));
    }
    __syncwarp();
}

// Neighbouring words that a warp takes at once.
constexpr int kWords = 4;

// Calls use(index of the first word, kWords words, kWords values of this lane) for groups with a key; a lane's keys
// are its bits of the words.
template <typename Use>
__device__ __forceinline__ void for_each_group(
    const unsigned int* words, const float* values, unsigned int n_words, Use use) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (unsigned int w = threadIdx.x / kWarpSize * kWords; w < n_words; w += kWords * kWarps) {
        alignas(16) unsigned int group[kWords];
        *reinterpret_cast<uint4*>(group) = *reinterpret_cast<const uint4*>(&words[w]);
        if ((group[0] | group[1] | group[2] | group[3]) == 0) continue;
        float own[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) own[i] = values[(w + i) * 32 + lane];
        use(w, group, own);
    }
}

__device__ __forceinline__ void store_words(unsigned int* words, const unsigned int (&group)[kWords]) {
    if (threadIdx.x % kWarpSize == 0) {
        *reinterpret_cast<uint4*>(words) = make_uint4(group[0], group[1], group[2], group[3]);
    }
}

// Turn scores without bias into f.
__device__ __forceinline__ void add_bias(const Row& row, float* values) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (unsigned int w = threadIdx.x / kWarpSize * kWords; w < row.n_words; w += kWords * kWarps) {
        float bias[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const unsigned int t = (w + i) * 32 + lane;
            bias[i] = t < row.length ? row.bias[t] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            values[(w + i) * 32 + lane] = __fadd_rn(values[(w + i) * 32 + lane], bias[i]);
        }
    }
}

struct Bin {
    unsigned int index;
    unsigned int above;  // keys in higher bins
    unsigned int count;
};

__device__ __forceinline__ void clear_histogram(Smem& smem) {
#pragma unroll
    for (int bin = 0; bin < kBins; bin += kThreads * 4) {
        *reinterpret_cast<uint4*>(&smem.histogram[bin + threadIdx.x * 4]) = make_uint4(0, 0, 0, 0);
    }
}

// The same once all blocks have read it, for all of this one.
__device__ __forceinline__ void renew_histogram(Smem& smem) {
    cluster_sync<kCluster>();
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

// The bin of the rank-th greatest counted key (rank from 1) of the cluster; there must be as many.
__device__ __forceinline__ Bin find_bin(Smem& smem, unsigned int rank) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    __syncthreads();
    for (int group = warp; group < kGroups; group += kWarps) {
        const uint4 bins = *reinterpret_cast<const uint4*>(&smem.histogram[group * kGroupBins + lane * kLaneBins]);
        const unsigned int sum = __reduce_add_sync(kFullWarp, bins.x + bins.y + bins.z + bins.w);
        if (lane == 0) smem.groups[group] = sum;
    }
    cluster_sync<kCluster>();
    if (warp == 0) {
        unsigned int own = 0;
#pragma unroll
        for (int i = 0; i < kCluster; ++i) own += cluster_load<kCluster>(smem.groups[lane], i);
        unsigned int above;
        const int group = find_lane(own, rank, above);
        unsigned int counts[kLaneBins] = {};
#pragma unroll
        for (int i = 0; i < kCluster; ++i) {
#pragma unroll
            for (int j = 0; j < kLaneBins; ++j) {
                counts[j] += cluster_load<kCluster>(smem.histogram[group * kGroupBins + lane * kLaneBins + j], i);
            }
        }
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
    __syncthreads();
    return {smem.bin[0], smem.bin[1], smem.bin[2]};
}

// Bins of equal width over [low, high], numbered from 1 to kBins - 2; bin 0 and kBins - 1 take what lies
// farther out. place() is the number of the bin, unclamped, on top of 2^23: as the floats there are the
// integers, its last operation rounds. It is monotone whatever rounds, which is all that it has to be.
struct Bins {
    static constexpr float kZero = 0x1p23f;
    float low, per_unit;

    __device__ __forceinline__ Bins(float low, float high)
        : low(low), per_unit(fminf(__fdiv_rn(kBins - 3, __fsub_rn(high, low)), 0x1p127f)) {}

    __device__ __forceinline__ float place(float x) const {
        return __fmaf_rn(__fsub_rn(x, low), per_unit, kZero + 1.0f);
    }

    __device__ __forceinline__ unsigned int bin(float x) const {
        return __float_as_uint(fminf(fmaxf(place(x), kZero), kZero + (kBins - 1))) - __float_as_uint(kZero);
    }
};

__device__ __forceinline__ float get(float4 values, int i) {
    return i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
}

struct Range {
    float lower, upper;  // e is within them
};

// per_score is 2 u where there is a bias to add.
__device__ __forceinline__ Range score_range(float per_score, float word_error, float score) {
    const float error = __fmaf_ru(per_score, fabsf(score), word_error);
    return {__fsub_rd(score, error), __fadd_ru(score, error)};
}

// Between which strict scores the top_k-th greatest of the row lies, given the least and the greatest f. The histogram
// is clear at first.
__device__ __forceinline__ Range bracket_last_winner(
    Smem& smem, float per_score, const float* values, unsigned int n_words, float low, float high,
    unsigned int top_k, unsigned int& turn) {
    for (int split = 0;; ++split) {
        const Bins bins(low, high);
        if (split > 0) renew_histogram(smem);
        for_each_group(smem.in, values, n_words, [&](unsigned int, const auto&, const auto& f) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) atomicAdd(&smem.histogram[bins.bin(f[i])], 1);
        });
        const Bin bin = find_bin(smem, top_k);
        const float found = Bins::kZero + bin.index;
        if (bin.count > kCrowdedBin && split < kMaxSplits && low < high) {
            // Split the bin again: between its own extremes.
            low = infinity();
            high = -infinity();
            for_each_group(smem.in, values, n_words, [&](unsigned int, const auto&, const auto& f) {
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    if (bins.place(f[i]) == found) {
                        low = fminf(low, f[i]);
                        high = fmaxf(high, f[i]);
                    }
                }
            });
            unsigned int extremes[2] = {~total_order_key(low), total_order_key(high)};
            reduce_max(smem, extremes, turn);
            low = from_total_order_key(~extremes[0]);
            high = from_total_order_key(extremes[1]);
            continue;
        }
        float upper = -infinity();
        float lower = infinity();
        for_each_group(smem.in, values, n_words, [&](unsigned int w, const auto&, const auto& f) {
            const float4 errors = *reinterpret_cast<const float4*>(&smem.errors[w]);
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const Range range = score_range(per_score, get(errors, i), f[i]);
                const float place = bins.place(f[i]);
                if (place <= found) upper = fmaxf(upper, range.upper);
                if (place >= found) lower = fminf(lower, range.lower);
            }
        });
        unsigned int edges[2] = {total_order_key(upper), ~total_order_key(lower)};
        reduce_max(smem, edges, turn);
        return {from_total_order_key(~edges[1]), from_total_order_key(edges[0])};
    }
}

// Replace f of the block's n_band band keys by their strict scores, as total order keys. `f_is_strict` says that
// f is the strict score already.
__device__ __forceinline__ void score_band(
    Smem& smem, const Row& row, bool fuses, bool f_is_strict, float scale, float* values,
    unsigned int band_before, unsigned int n_band) {
    unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
    for (unsigned int chunk = 0; chunk < n_band; chunk += kListed) {
        unsigned int place = band_before - chunk;
        for (unsigned int rest = smem.band[threadIdx.x]; rest != 0; rest &= rest - 1, ++place) {
            if (place < kListed) smem.listed[place] = threadIdx.x * 32 + __ffs(rest) - 1;
        }
        // Nobody reads the histogram, which shares its memory with the staged keys, any longer.
        __syncthreads();
        const unsigned int listed = min(n_band - chunk, kListed);
        if (f_is_strict) {
            for (unsigned int i = threadIdx.x; i < listed; i += kThreads) {
                const unsigned int t = smem.listed[i];
                strict_keys[t] = total_order_key(values[t]);
            }
        } else {
            for (unsigned int i = threadIdx.x / kWarpSize * kKeys; i < listed; i += kWarps * kKeys) {
                score_keys(smem, row, fuses, scale, &smem.listed[i], min(listed - i, kKeys), strict_keys);
            }
        }
        __syncthreads();
    }
}

struct Winners {
    unsigned int key;   // band keys above it win,
    unsigned int ties;  // and the first of those equal to it
};

// The exact rank-th greatest key of the band.
__device__ __forceinline__ Winners select_band(Smem& smem, const unsigned int* values, unsigned int rank) {
    unsigned int prefix = 0;
    for (int shift = 32; shift > 0;) {
        const int bits = min(kDigitBits, shift);
        shift -= bits;
        renew_histogram(smem);
        for (unsigned int band = smem.band[threadIdx.x]; band != 0; band &= band - 1) {
            const unsigned int key = values[threadIdx.x * 32 + __ffs(band) - 1];
            // Shifted twice, because shift + bits may be 32.
            if (((key ^ prefix) >> shift >> bits) == 0) {
                atomicAdd(&smem.histogram[key >> shift & ((1u << bits) - 1)], 1);
            }
        }
        const Bin bin = find_bin(smem, rank);
        rank -= bin.above;
        prefix |= bin.index << shift;
    }
    return {prefix, rank};
}

// Add the `wanted` best of the cluster's n_total band keys to smem.in: each key counts those better than it.
// The block's n_band keys are still listed; `before` lie in the blocks before it.
__device__ __forceinline__ void rank_band(
    Smem& smem, const unsigned int* strict_keys, unsigned int n_band, unsigned int before, unsigned int n_total,
    unsigned int wanted) {
    const unsigned int own = threadIdx.x;
    const unsigned int t = own < n_band ? smem.listed[own] : 0;
    const unsigned int key = own < n_band ? strict_keys[t] : 0;
    if (own < n_band) {
#pragma unroll
        for (int i = 0; i < kCluster; ++i) cluster_store<kCluster>(smem.ranked[before + own], i, key);
    }
    cluster_sync<kCluster>();
    if (own < n_band) {
        unsigned int better = 0;
#pragma unroll 4
        for (unsigned int i = 0; i < n_total; ++i) {
            const unsigned int other = smem.ranked[i];
            better += other > key || (other == key && i < before + own);
        }
        if (better < wanted) atomicOr(&smem.in[t / 32], 1u << t % 32);
    }
    __syncthreads();
}

// The lowest n bits set in word.
__device__ __forceinline__ unsigned int lowest_bits(unsigned int word, unsigned int n) {
    unsigned int rest = word;
    for (; n > 0 && rest != 0; --n) rest &= rest - 1;
    return word ^ rest;
}

// Write the positions of one word's winners; a warp's work.
__device__ __forceinline__ void emit_word(
    long long* out, unsigned int word, unsigned int position, unsigned int first) {
    const int lane = threadIdx.x % kWarpSize;
    if (word >> lane & 1) out[position + __popc(word & ((1u << lane) - 1))] = first + lane;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) __cluster_dims__(kCluster, 1, 1)
    dsa_index_select_certify(
        const Element* __restrict__ query, const Element* __restrict__ key, const Element* __restrict__ weights,
        const float* __restrict__ bias, const float* __restrict__ scores, const unsigned int* __restrict__ allowed,
        const unsigned int* __restrict__ accounts, const KeyWord* __restrict__ key_words,
        const RowBound* __restrict__ bounds, long long* __restrict__ out, unsigned long long* __restrict__ counters,
        unsigned int total_rows, unsigned int q_seq, unsigned int key_seq, unsigned int row_stride,
        unsigned int block_keys, unsigned int top_k, float scale, float weights_scale, float bias_error) {
    extern __shared__ __align__(16) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    float* values = reinterpret_cast<float*>(shared_memory + sizeof(Smem));  // f, and the strict keys of the band
    unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int rank = cluster_rank<kCluster>();
    const unsigned int key_blocks = (key_seq + kBlockKeys - 1) / kBlockKeys;
    const unsigned int first_key = min(rank * block_keys, key_seq);
    unsigned int turn = 0;
    unsigned int loads = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(smem.loaded, 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    for (unsigned int r = blockIdx.x / kCluster; r < total_rows; r += gridDim.x / kCluster) {
        const unsigned int b = r / q_seq;
        const unsigned int account = accounts == nullptr ? kBiased | key_seq : accounts[r];
        const unsigned int length = min(key_seq - first_key, block_keys);
        const Row row = {
            scores + 1ull * r * row_stride + first_key,
            account & kBiased ? bias + 1ull * r * key_seq + first_key : nullptr,
            query + 1ull * r * kHeads * kHeadDim,
            weights + 1ull * r * kHeads,
            key + (1ull * b * key_seq + first_key) * kHeadDim,
            length,
            (length + 31) / 32,
        };
        unsigned int in_word = 0;  // this thread's
        unsigned int equal_word = 0;
        unsigned int ties = 0;
        bool has_scores = (account & ~kBiased) > top_k;
        smem.in[threadIdx.x] = 0;
        smem.band[threadIdx.x] = 0;
        if (allowed != nullptr && threadIdx.x < row.n_words) {
            in_word = allowed[(1ull * r * key_blocks) * kBlockWords + first_key / 32 + threadIdx.x];
            smem.in[threadIdx.x] = in_word;
        }

        if (has_scores) {
            if (threadIdx.x < kWarpSize) load_row(smem, row, values);
            const RowBound bound = bounds[r];
            const bool is_exact = bound.flags & kExactRow;
            const float per_score = row.bias == nullptr || is_exact ? 0.0f : bias_error;
            KeyWord key_word = {0, 0.0f};
            if (threadIdx.x < row.n_words) {
                key_word = key_words[1ull * b * key_blocks * kBlockWords + first_key / 32 + threadIdx.x];
            }
            if (threadIdx.x < kHeads) {
                smem.weights[threadIdx.x] = __fmul_rn(to_f32(row.weights[threadIdx.x]), weights_scale);
            }
            clear_histogram(smem);
            __syncthreads();
            mbarrier_wait(smem.loaded, loads & 1);
            ++loads;

            // f of every allowed key, and the least and the greatest.
            if (allowed != nullptr && row.bias != nullptr) add_bias(row, values);
            float greatest = -infinity();
            float least = infinity();
            float not_finite = 0.0f;  // a NaN once an infinity or a NaN was multiplied by zero
#pragma unroll 1
            for (unsigned int w = threadIdx.x / kWarpSize * kWords; w < row.n_words; w += kWords * kWarps) {
                alignas(16) unsigned int group[kWords];
                float f[kWords];
#pragma unroll
                for (int i = 0; i < kWords; ++i) f[i] = values[(w + i) * 32 + lane];
                if (allowed == nullptr) {
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        const bool is_there = (w + i) * 32 + lane < row.length;
                        group[i] = __ballot_sync(kFullWarp, is_there && __float_as_uint(f[i]) != kMaskedScore);
                    }
                    store_words(&smem.in[w], group);
                } else {
                    *reinterpret_cast<uint4*>(group) = *reinterpret_cast<const uint4*>(&smem.in[w]);
                }
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    if (group[i] == kFullWarp) {
                        greatest = fmaxf(greatest, f[i]);
                        least = fminf(least, f[i]);
                        not_finite = __fmaf_rn(f[i], 0.0f, not_finite);
                    } else {
                        // What is masked becomes -inf, which is below every bin.
                        const bool is_allowed = group[i] >> lane & 1;
                        const float known = is_allowed ? f[i] : -infinity();
                        values[(w + i) * 32 + lane] = known;
                        greatest = fmaxf(greatest, known);
                        least = fminf(least, is_allowed ? known : infinity());
                        not_finite = __fmaf_rn(is_allowed ? known : 0.0f, 0.0f, not_finite);
                    }
                }
            }
            __syncthreads();
            in_word = smem.in[threadIdx.x];
            smem.errors[threadIdx.x] = __fmaf_ru(bound.per_norm, key_word.norm, bound.floor);
            const bool is_irregular = isnan(not_finite) || (key_word.irregular & in_word) != 0 ||
                                      (in_word != 0 && !(key_word.norm < bound.max_norm));
            unsigned int extremes[4] = {
                total_order_key(greatest), ~total_order_key(least), is_irregular, unsigned(__popc(in_word))};
            unsigned int before[4];
            reduce<3>(smem, extremes, before, turn);
            if (allowed == nullptr) has_scores = extremes[3] > top_k;
            if (has_scores) {
                const float greatest_of_row = from_total_order_key(extremes[0]);
                const float least_of_row = from_total_order_key(~extremes[1]);
                const bool is_regular = (bound.flags & kRegularRow) && extremes[2] == 0 &&
                                        __fsub_rn(greatest_of_row, least_of_row) < infinity();
                Range between = {-infinity(), infinity()};
                if (is_regular) {
                    between = bracket_last_winner(
                        smem, per_score, values, row.n_words, least_of_row, greatest_of_row, top_k, turn);
                }
                for_each_group(smem.in, values, row.n_words, [&](unsigned int w, const auto& group, const auto& f) {
                    const float4 errors = *reinterpret_cast<const float4*>(&smem.errors[w]);
                    unsigned int in[kWords];
                    unsigned int band[kWords];
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        const Range range = score_range(per_score, get(errors, i), f[i]);
                        const bool is_out = is_regular && range.upper < between.lower;
                        in[i] = group[i] & __ballot_sync(kFullWarp, is_regular && range.lower > between.upper);
                        band[i] = group[i] & ~in[i] & ~__ballot_sync(kFullWarp, is_out);
                    }
                    __syncwarp();  // all lanes have read the words that are replaced
                    store_words(&smem.in[w], in);
                    store_words(&smem.band[w], band);
                });
                __syncthreads();
                unsigned int n_band;
                const unsigned int band_before =
                    block_exclusive_scan<kThreads>(__popc(smem.band[threadIdx.x]), n_band, smem.scan);

                const bool fuses = bound.flags & kFusingRow;
                score_band(smem, row, fuses, is_exact && is_regular, scale, values, band_before, n_band);
                in_word = smem.in[threadIdx.x];
                const unsigned int band_word = smem.band[threadIdx.x];
                unsigned int totals[2] = {unsigned(__popc(in_word)), unsigned(__popc(band_word))};
                unsigned int before[2];
                reduce<0>(smem, totals, before, turn);
                const unsigned int wanted = top_k - totals[0];
                if (totals[1] <= kRanked) {
                    rank_band(smem, strict_keys, n_band, before[1], totals[1], wanted);
                    in_word = smem.in[threadIdx.x];
                } else {
                    const Winners winners = select_band(smem, strict_keys, wanted);
                    ties = winners.ties;
                    for (unsigned int rest = band_word; rest != 0; rest &= rest - 1) {
                        const unsigned int strict_key = strict_keys[threadIdx.x * 32 + __ffs(rest) - 1];
                        if (strict_key > winners.key) in_word |= rest & -rest;
                        if (strict_key == winners.key) equal_word |= rest & -rest;
                    }
                }
                if (threadIdx.x == 0 && rank == 0 && !is_exact) {
                    if (!is_regular) atomicAdd(&counters[0], 1ull);
                    atomicAdd(&counters[1], static_cast<unsigned long long>(totals[1]));
                }
            } else {
                in_word = smem.in[threadIdx.x];
            }
        } else if (allowed == nullptr) {
            // Too few keys to choose from: whatever is allowed.
            __syncthreads();  // the words are cleared
            for (unsigned int w = threadIdx.x / kWarpSize; w < row.n_words; w += kWarps) {
                const unsigned int t = w * 32 + lane;
                const unsigned int word = __ballot_sync(kFullWarp, t < row.length && is_allowed(row.bias[t]));
                if (lane == 0) smem.in[w] = word;
            }
            __syncthreads();
            in_word = smem.in[threadIdx.x];
        }

        // Positions, from counts of winners and of ties before each word.
        unsigned int block_counts;
        const unsigned int counts_before = block_exclusive_scan<kThreads>(
            __popc(in_word) | __popc(equal_word) << 16, block_counts, smem.scan);
        unsigned int totals[2] = {0, 0};
        unsigned int before[2];
        if (threadIdx.x == 0) {
            totals[0] = block_counts & 0xffff;
            totals[1] = block_counts >> 16;
        }
        reduce<0>(smem, totals, before, turn);
        const unsigned int equal_before = before[1] + (counts_before >> 16);
        smem.positions[threadIdx.x] = before[0] + (counts_before & 0xffff) + min(equal_before, ties);
        smem.in[threadIdx.x] = in_word | lowest_bits(equal_word, ties - min(equal_before, ties));
        __syncthreads();
        long long* row_out = out + 1ull * r * top_k;
#pragma unroll 1
        for (unsigned int w = threadIdx.x / kWarpSize * kWords; w < row.n_words; w += kWords * kWarps) {
            const uint4 group = *reinterpret_cast<const uint4*>(&smem.in[w]);
            const uint4 positions = *reinterpret_cast<const uint4*>(&smem.positions[w]);
            emit_word(row_out, group.x, positions.x, first_key + w * 32);
            emit_word(row_out, group.y, positions.y, first_key + w * 32 + 32);
            emit_word(row_out, group.z, positions.z, first_key + w * 32 + 64);
            emit_word(row_out, group.w, positions.w, first_key + w * 32 + 96);
        }
        const unsigned int kept = totals[0] + min(totals[1], ties);
        for (unsigned int slot = kept + rank * kThreads + threadIdx.x; slot < top_k; slot += kCluster * kThreads) {
            row_out[slot] = -1;
        }
        fence_proxy_async();       // the next load overwrites what this thread has written,
        cluster_sync<kCluster>();  // once all are done; and no block leaves before
    }
}
