// How several blocks that share a row find its winners: the steps of common/dsa_select.cuh that need what other blocks
// know. Each block keeps its keys' f in shared memory, a thread a word of 32 of them.
//
// The blocks of a row are a Team, whose members all threads of all its blocks call together:
//
//     reduce_max(values)          the greatest of what the threads give, over the team, known to all
//     sum_blocks(values, before)  of sums that all threads of a block know: the team's, and those of the blocks before
//     renew_bins()                begin to count anew
//     count(bin)                  one key more; any thread, at any time in between
//     find_bin(rank)              the bin of the rank-th greatest counted key (rank from 1); there must be as many
#pragma once

#include "common/dsa_select.cuh"

// How often a crowded bin is split at most. So is one of the two that are open, as the sample may have missed the far
// ones.
constexpr int kMaxSplits = 5;

// Where the row's greatest e leaves open more keys, each key's own is looked at.
constexpr unsigned int kWideBand = 96;

// How far from its f the last winner's strict score is expected, as a share of the greatest e. Errors of random vectors
// are far smaller; the closer, the fewer keys are scored.
constexpr float kExpectedError = 0x1p-3f;

struct Counts {
    unsigned int in, band;                // keys of the team
    unsigned int in_before, band_before;  // of the blocks before
};

struct Bins : BinScale {
    // Whatever low and high are, no difference of finite numbers times per_unit is a NaN.
    __device__ __forceinline__ Bins(float low, float high)
        : BinScale{low, fminf(fmaxf(__fdiv_rn(kBins - 3, __fsub_rn(high, low)), 0x1p-118f), 0x1p127f)} {}

    // As far as a sample reaches from low to high, and a quarter more for the few greatest, which are often the ones
    // looked for.
    __device__ static __forceinline__ Bins beyond(float low, float high) {
        return Bins(low, __fmaf_rn(0.25f, __fsub_rn(high, low), high));
    }

    __device__ static __forceinline__ bool is_open(unsigned int bin) { return bin == 0 || bin == kBins - 1; }

    // Whatever falls into the bin is within, for what bin() rounds to its number: 1/2 either way, and x - low as far
    // as the next float. A warp's work: half of its lanes divide for the edge below, and half for the one above.
    __device__ __forceinline__ Range edges(unsigned int bin) const {
        constexpr float kLeast = 0x1p-149f;
        const float quotient = __fdiv_rd(threadIdx.x % 2 == 0 ? bin - 1.5f : 0.5f - bin, per_unit);
        const float above = __fadd_ru(-__shfl_sync(kFullWarp, quotient, 1), kLeast);
        const float below = __fadd_rd(__shfl_sync(kFullWarp, quotient, 0), -kLeast);
        return {bin == 0 ? -infinity() : __fadd_rd(low, below), bin == kBins - 1 ? infinity() : __fadd_ru(low, above)};
    }
};

__device__ __forceinline__ bool needs_split(const Bin& bin) {
    return bin.count > kCrowdedBin || Bins::is_open(bin.index);
}

__device__ __forceinline__ float get(float4 values, int i) {
    return i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
}

// A key with f above the upper end has a strict score above the upper one of `scores`, and a key with f below the lower
// end one below the lower, if no key of the row has a greater error: f - e and f + e grow with f where
// e = error + per_score |f|. What is not a number decides nothing.
__device__ __forceinline__ Range beyond(Range scores, float per_score, float error) {
    const float above = __fadd_ru(scores.upper, error);
    const float below = __fsub_rd(scores.lower, error);
    const float more = __fmul_ru(per_score, 1.0f + 0x1p-20f);  // for per_score of the ends themselves
    return {__fsub_rd(below, __fmul_ru(more, fabsf(below))), __fadd_ru(above, __fmul_ru(more, fabsf(above)))};
}

// Below the lower f a key is out, above the upper one it is in, if the top_k-th greatest f is within the edges.
__device__ __forceinline__ Range thresholds(Range edges, float per_score, float error) {
    const float lower = score_range(per_score, error, edges.lower).lower;
    const float upper = score_range(per_score, error, edges.upper).upper;
    return beyond({lower, upper}, per_score, error);
}

// An interval of f that holds the top_k-th greatest of the row, which is in `bin` of `bins`.
template <typename Team, typename Smem>
__device__ __forceinline__ Range bracket_last_winner(
    Team& team, const Smem& smem, Bins bins, Bin bin, const float* values, unsigned int n_words, unsigned int top_k) {
    const int lane = threadIdx.x % kWarpSize;
    for (int split = 0; split < kMaxSplits && needs_split(bin); ++split) {
        float low = infinity();
        float high = -infinity();
        for_each_key(smem.in, values, n_words, [&](unsigned int, const auto& group, const auto& f) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                if ((group[i] >> lane & 1) != 0 && bins.bin(f[i]) == bin.index) {
                    low = fminf(low, f[i]);
                    high = fmaxf(high, f[i]);
                }
            }
        });
        unsigned int extremes[2] = {~total_order_key(low), total_order_key(high)};
        team.reduce_max(extremes);
        low = from_total_order_key(~extremes[0]);
        high = from_total_order_key(extremes[1]);
        if (low == high) return {low, high};
        bins = Bins(low, high);
        team.renew_bins();
        for_each_key(smem.in, values, n_words, [&](unsigned int, const auto& group, const auto& f) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                if ((group[i] >> lane & 1) != 0) team.count(bins.bin(f[i]));
            }
        });
        bin = team.find_bin(top_k);
    }
    return bins.edges(bin.index);
}

// Divide the keys of smem.in into those surely selected, those that are not, and the band, which goes to smem.band.
template <typename Smem>
__device__ __forceinline__ void classify(Smem& smem, Range decided, const float* values, unsigned int n_words) {
    for_each_key(smem.in, values, n_words, [&](unsigned int w, const auto& group, const auto& f) {
        unsigned int in[kWords];
        bool is_open[kWords];
        bool is_any_open = false;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const bool is_out = f[i] < decided.lower;
            is_open[i] = !is_out && !(f[i] > decided.upper);
            is_any_open = is_any_open || is_open[i];
            in[i] = group[i] & ~__ballot_sync(kFullWarp, is_out);
        }
        if (__any_sync(kFullWarp, is_any_open)) {
            unsigned int band[kWords];
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                band[i] = in[i] & __ballot_sync(kFullWarp, is_open[i]);
                in[i] &= ~band[i];
            }
            store_words(&smem.band[w], band);
        }
        __syncwarp();  // all lanes have read the words that are replaced
        store_words(&smem.in[w], in);
    });
    __syncthreads();
}

// Decide what each key's own error decides of the band, which holds all keys within the edges.
template <typename Team, typename Smem>
__device__ __forceinline__ void narrow_band(
    Team& team, Smem& smem, Range edges, float per_score, const float* values, unsigned int n_words) {
    const int lane = threadIdx.x % kWarpSize;
    float upper = -infinity();
    float lower = infinity();
    for_each_key(smem.band, values, n_words, [&](unsigned int w, const auto& group, const auto& f) {
        const float4 errors = *reinterpret_cast<const float4*>(&smem.errors[w]);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const Range range = score_range(per_score, get(errors, i), f[i]);
            const bool is_open = group[i] >> lane & 1;
            if (is_open && f[i] <= edges.upper) upper = fmaxf(upper, range.upper);
            if (is_open && f[i] >= edges.lower) lower = fminf(lower, range.lower);
        }
    });
    unsigned int extremes[2] = {total_order_key(upper), ~total_order_key(lower)};
    team.reduce_max(extremes);
    upper = from_total_order_key(extremes[0]);
    lower = from_total_order_key(~extremes[1]);
    for_each_key(smem.band, values, n_words, [&](unsigned int w, const auto& group, const auto& f) {
        const float4 errors = *reinterpret_cast<const float4*>(&smem.errors[w]);
        alignas(16) unsigned int in[kWords];
        unsigned int band[kWords];
        load_words(in, &smem.in[w]);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const Range range = score_range(per_score, get(errors, i), f[i]);
            const unsigned int decided_in = group[i] & __ballot_sync(kFullWarp, range.lower > upper);
            in[i] |= decided_in;
            band[i] = group[i] & ~decided_in & ~__ballot_sync(kFullWarp, range.upper < lower);
        }
        __syncwarp();  // all lanes have read the words that are replaced
        store_words(&smem.in[w], in);
        store_words(&smem.band[w], band);
    });
    __syncthreads();
}

// The strict scores of n listed keys, kCount to a warp at a time.
template <int kCount, typename Smem, typename Row>
__device__ __forceinline__ void score_listed(
    Smem& smem, const Row& row, bool fuses, float scale, unsigned int n, unsigned int* values) {
    for (unsigned int i = threadIdx.x / kWarpSize * kCount; i < n; i += kWarps * kCount) {
        score_keys<kCount>(smem, row, fuses, scale, &smem.listed[i], min(n - i, kCount), values);
    }
}

// Replace f of n listed keys by their strict scores, as total order keys. `f_is_strict` says that f is the strict score
// already.
template <typename Smem, typename Row>
__device__ __forceinline__ void score_list(
    Smem& smem, const Row& row, bool fuses, bool f_is_strict, float scale, float* values, unsigned int n) {
    unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
    if (f_is_strict) {
        for (unsigned int i = threadIdx.x; i < n; i += kThreads) {
            const unsigned int t = smem.listed[i];
            strict_keys[t] = total_order_key(values[t]);
        }
    } else if (n <= kWarps) {
        score_listed<1>(smem, row, fuses, scale, n, strict_keys);
    } else if (n <= kWarps * 2) {
        score_listed<2>(smem, row, fuses, scale, n, strict_keys);
    } else if (n <= kWarps * 3) {
        score_listed<3>(smem, row, fuses, scale, n, strict_keys);
    } else {
        score_listed<kKeys>(smem, row, fuses, scale, n, strict_keys);
    }
}

// The same of the block's n_band band keys; of up to kListed the list stays.
template <typename Smem, typename Row>
__device__ __forceinline__ void score_band(
    Smem& smem, const Row& row, bool fuses, bool f_is_strict, float scale, float* values,
    unsigned int band_before, unsigned int n_band) {
    for (unsigned int chunk = 0; chunk < n_band; chunk += kListed) {
        unsigned int place = band_before - chunk;
        for (unsigned int rest = smem.band[threadIdx.x]; rest != 0; rest &= rest - 1, ++place) {
            if (place < kListed) smem.listed[place] = threadIdx.x * 32 + __ffs(rest) - 1;
        }
        // Nobody reads what shares its memory with the staged keys any longer.
        __syncthreads();
        score_list(smem, row, fuses, f_is_strict, scale, values, min(n_band - chunk, kListed));
        __syncthreads();
    }
}

// How many bits are set in the block's smem.in and smem.band, and in smem.band of the threads before this one.
struct BlockCounts {
    unsigned int in, band, band_before;
};

template <typename Smem>
__device__ __forceinline__ BlockCounts count_block(Smem& smem) {
    unsigned int block;
    const unsigned int before = block_exclusive_scan<kThreads>(
        __popc(smem.in[threadIdx.x]) << 16 | __popc(smem.band[threadIdx.x]), block, smem.scan);
    return {block >> 16, block & 0xffff, before & 0xffff};
}

// The same, and what is known of the team, which goes to smem.counts.
template <typename Team, typename Smem>
__device__ __forceinline__ BlockCounts count_keys(Team& team, Smem& smem) {
    const BlockCounts block = count_block(smem);
    unsigned int totals[2] = {block.in, block.band};
    unsigned int before[2];
    team.sum_blocks(totals, before);
    if (threadIdx.x == 0) smem.counts = {totals[0], totals[1], before[0], before[1]};
    __syncthreads();
    return block;
}

// The exact rank-th greatest key of the band.
template <typename Team, typename Smem>
__device__ __forceinline__ Winners select_band(
    Team& team, const Smem& smem, const unsigned int* values, unsigned int rank) {
    unsigned int prefix = 0;
    for (int shift = 32; shift > 0;) {
        const int bits = min(kDigitBits, shift);
        shift -= bits;
        team.renew_bins();
        for (unsigned int band = smem.band[threadIdx.x]; band != 0; band &= band - 1) {
            const unsigned int key = values[threadIdx.x * 32 + __ffs(band) - 1];
            // Shifted twice, because shift + bits may be 32.
            if (((key ^ prefix) >> shift >> bits) == 0) team.count(key >> shift & ((1u << bits) - 1));
        }
        const Bin bin = team.find_bin(rank);
        rank -= bin.above;
        prefix |= bin.index << shift;
    }
    return {prefix, rank};
}

// Add to the thread's word what select_band() has decided of its band keys. Returns those that tie.
template <typename Smem>
__device__ __forceinline__ unsigned int add_winners(
    unsigned int& in_word, const Smem& smem, const unsigned int* values, const Winners& winners) {
    unsigned int equal_word = 0;
    for (unsigned int rest = smem.band[threadIdx.x]; rest != 0; rest &= rest - 1) {
        const unsigned int key = values[threadIdx.x * 32 + __ffs(rest) - 1];
        if (key > winners.key) in_word |= rest & -rest;
        if (key == winners.key) equal_word |= rest & -rest;
    }
    return equal_word;
}
