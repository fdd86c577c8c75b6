// DsaIndexSelect, certified: from approximate scores to the exact selection, a row by one block alone. It is what
// dsa_index_select_certify.cu does with clusters and bulk copies, for devices that have none (before sm_90), and for
// rows that no cluster of a device holds.
//
//     scores [rows, row_stride] f32; bias [rows, T] f32; allowed, accounts, key_words, bounds: see
//     dsa_index_select_prepare.cu and dsa_score.cuh   ->   out [rows, top_k] i64
//
// allowed and accounts may be null: then every score is there, with the bias, or kMaskedScore.
//
// A row with more than top_k allowed keys is decided so, f, e and the band being what common/dsa_select.cuh says:
//
//   1. A histogram finds a bin that holds the k-th greatest f.
//   2. upper = the greatest f + e of the keys in or below that bin, lower = the least f - e of those in or
//      above it: the k-th greatest strict score lies between them. Keys with f - e > upper are in, keys
//      with f + e < lower are out. What is left is the band, some dozens of keys.
//   3. The band is scored in strict order, and the best of it complete the selection: a small band is ranked key
//      by key, a large one goes through a radix select.
//   4. Winners are emitted in ascending order.
//
// A thread keeps account of kThreadWords words of 32 keys. With one, the scores of a row are brought to shared memory;
// with more they stay in the workspace, where the strict keys of the band replace them.
#include "common/async_copy.cuh"
#include "common/block_scan.cuh"
#include "common/dsa_select.cuh"
#include "common/ptx.cuh"

constexpr int kThreadWords = THREAD_WORDS;
constexpr int kMaxWords = kThreads * kThreadWords;
constexpr bool kRowInShared = kThreadWords == 1;
constexpr int kBlocksPerSm = kRowInShared ? 2 : 1;
static_assert(kThreads >= 256, "a warp scans the groups of the histogram");

constexpr int kMaxSplits = 4;  // of a crowded bin

// A position in a row.
template <bool kIsShort>
struct PositionOf {
    using Type = unsigned short;
};
template <>
struct PositionOf<false> {
    using Type = unsigned int;
};
using Listed = PositionOf<kRowInShared>::Type;

constexpr int kScoringWarps = kRowInShared ? kWarps : 8;  // have shared memory to do it in

struct Smem {
    alignas(16) Element query[kHeads][kQueryPitch];
    union {
        alignas(16) unsigned int histogram[kBins];
        unsigned int ranked[kRanked];  // strict keys of the band, by position
        alignas(16) float staged[kScoringWarps][kStaged];
    };
    float weights[kHeads];
    unsigned int groups[kGroups];
    alignas(16) unsigned int in[kMaxWords];  // words of 32 keys: those surely selected,
    union {
        alignas(16) unsigned int band[kMaxWords];  // those to be scored, and then those that tie with the worst winner,
        alignas(16) unsigned int positions[kMaxWords];  // in whose place goes where the words' winners are emitted
    };
    alignas(16) float errors[kRowInShared ? kMaxWords : 4];  // bound of e, but for its share of |f|
    Listed listed[kListed];
    BlockScanScratch<kThreads> scan;
    unsigned int warp_values[2][3][kWarps];  // of reductions, by turns
    unsigned int bin[3];

    __device__ __forceinline__ const Element* query_at(int head, int d) const { return &query[head][d]; }
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much, and room for scores behind it");

struct Row {
    float* scores;
    const float* bias;  // null where all allowed biases are zero
    const Element* query;
    const Element* weights;
    const Element* keys;  // of the row's batch
    const KeyWord* key_words;
    RowBound bound;
    unsigned int length;
    unsigned int n_words;
};

// Write score t. Shared memory has room for whole groups of words, whatever lies beyond the row.
__device__ __forceinline__ void store_value(const Row& row, float* values, unsigned int t, float value) {
    if (kRowInShared || t < row.length) values[t] = value;
}

// Calls use(w) for the words that this thread keeps account of, in ascending order.
template <typename Use>
__device__ __forceinline__ void for_each_own_word(Use use) {
#pragma unroll 1
    for (int i = 0; i < kThreadWords; ++i) use(threadIdx.x * kThreadWords + i);
}

// How many bits are set in this thread's words.
__device__ __forceinline__ unsigned int count_own(const unsigned int* words) {
    unsigned int count = 0;
    for_each_own_word([&](unsigned int w) { count += __popc(words[w]); });
    return count;
}

// Over the block, known to all threads: the greatest of each value.
template <int kCount>
__device__ __forceinline__ void reduce_max(Smem& smem, unsigned int (&values)[kCount], unsigned int& turn) {
    reduce_warp<kCount>(smem, values, turn);
    __syncthreads();
    reduce_block<kCount>(smem, values, turn);
}

// Begin to bring the row's query to shared memory, and its scores if they go there.
__device__ __forceinline__ void copy_row(Smem& smem, const Row& row, float* values) {
    constexpr int kAccesses = kHeadDim / kAccess;
    for (int i = threadIdx.x; i < kHeads * kAccesses; i += kThreads) {
        const unsigned int target = shared_address(&smem.query[i / kAccesses][i % kAccesses * kAccess]);
        copy_async<16>(target, row.query + i * kAccess, true);
    }
    if (kRowInShared) {
        for (unsigned int t = threadIdx.x * 4; t < row.length; t += kThreads * 4) {
            copy_async<16>(shared_address(&values[t]), row.scores + t, true);
        }
    }
    copy_async_commit();
}

// How many groups of words have their scores on their way at once.
constexpr int kAhead = kRowInShared ? 1 : 4;

// Calls use(index of the first word, kWords values of this lane) for all groups.
template <typename Use>
__device__ __forceinline__ void for_each_group(const Row& row, const float* values, Use use) {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int first = threadIdx.x / kWarpSize * (kWords * kAhead);
#pragma unroll 1
    for (unsigned int w = first; w < row.n_words; w += kWords * kAhead * kWarps) {
        const float* const first_value = values + w * 32 + lane;
        const int left = static_cast<int>(row.length - w * 32) - lane;
        float own[kAhead][kWords];
#pragma unroll
        for (int i = 0; i < kAhead * kWords; ++i) {
            own[i / kWords][i % kWords] = kRowInShared || i * 32 < left ? first_value[i * 32] : -infinity();
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) use(w + i * kWords, own[i]);
    }
}

// The same for groups with a key, wherever the values are: use() is given the group's words as well.
template <typename Use>
__device__ __forceinline__ void for_each_key(
    const unsigned int* words, const Row& row, const float* values, Use use) {
    if constexpr (kAhead > 1) {
        for_each_group(row, values, [&](unsigned int w, const auto& own) {
            alignas(16) unsigned int group[kWords];
            load_words(group, &words[w]);
            if ((group[0] | group[1] | group[2] | group[3]) != 0) use(w, group, own);
        });
    } else {
        for_each_key(words, values, row.n_words, use);
    }
}

// The bounds of e of a group's words, but for the share of |f|.
__device__ __forceinline__ void load_errors(float (&errors)[kWords], const Smem& smem, const Row& row, unsigned int w) {
    if constexpr (kRowInShared) {
        *reinterpret_cast<float4*>(errors) = *reinterpret_cast<const float4*>(&smem.errors[w]);
    } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const float norm = w + i < row.n_words ? row.key_words[w + i].norm : 0.0f;
            errors[i] = __fmaf_ru(row.bound.per_norm, norm, row.bound.floor);
        }
    }
}

// Turn scores without bias into f.
__device__ __forceinline__ void add_bias(const Row& row, float* values) {
    const int lane = threadIdx.x % kWarpSize;
    for_each_group(row, values, [&](unsigned int w, const auto& own) {
        float bias[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const unsigned int t = (w + i) * 32 + lane;
            bias[i] = t < row.length ? row.bias[t] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) store_value(row, values, (w + i) * 32 + lane, __fadd_rn(own[i], bias[i]));
    });
}

// The bin of the rank-th greatest counted key (rank from 1); there must be as many.
__device__ __forceinline__ Bin find_bin(Smem& smem, unsigned int rank) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    __syncthreads();
    for (int group = warp; group < kGroups; group += kWarps) {
        const uint4 bins = *reinterpret_cast<const uint4*>(&smem.histogram[group * kGroupBins + lane * kLaneBins]);
        const unsigned int sum = __reduce_add_sync(kFullWarp, bins.x + bins.y + bins.z + bins.w);
        if (lane == 0) smem.groups[group] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        unsigned int above;
        const int group = find_lane(smem.groups[lane], rank, above);
        alignas(16) unsigned int counts[kLaneBins];
        *reinterpret_cast<uint4*>(counts) =
            *reinterpret_cast<const uint4*>(&smem.histogram[group * kGroupBins + lane * kLaneBins]);
        search_group(smem, group, counts, rank, above);
    }
    __syncthreads();
    return {smem.bin[0], smem.bin[1], smem.bin[2]};
}

struct Bins : BinScale {
    __device__ __forceinline__ Bins(float low, float high)
        : BinScale{low, fminf(__fdiv_rn(kBins - 3, __fsub_rn(high, low)), 0x1p127f)} {}
};

// Between which strict scores the top_k-th greatest of the row lies, given the least and the greatest f. The histogram
// is clear at first.
__device__ __forceinline__ Range bracket_last_winner(
    Smem& smem, const Row& row, float per_score, const float* values, float low, float high, unsigned int top_k,
    unsigned int& turn) {
    for (int split = 0;; ++split) {
        const Bins bins(low, high);
        if (split > 0) renew_histogram<1>(smem);
        for_each_key(smem.in, row, values, [&](unsigned int, const auto&, const auto& f) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) atomicAdd(&smem.histogram[bins.bin(f[i])], 1);
        });
        const Bin bin = find_bin(smem, top_k);
        const float found = Bins::kZero + bin.index;
        if (bin.count > kCrowdedBin && split < kMaxSplits && low < high) {
            // Split the bin again: between its own extremes.
            low = infinity();
            high = -infinity();
            for_each_key(smem.in, row, values, [&](unsigned int, const auto&, const auto& f) {
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
        for_each_key(smem.in, row, values, [&](unsigned int w, const auto&, const auto& f) {
            alignas(16) float errors[kWords];
            load_errors(errors, smem, row, w);
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const Range range = score_range(per_score, errors[i], f[i]);
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

// Replace f of the n_band band keys by their strict scores, as total order keys. `f_is_strict` says that
// f is the strict score already.
__device__ __forceinline__ void score_band(
    Smem& smem, const Row& row, bool fuses, bool f_is_strict, float scale, float* values,
    unsigned int band_before, unsigned int n_band) {
    unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
    for (unsigned int chunk = 0; chunk < n_band; chunk += kListed) {
        unsigned int place = band_before - chunk;
        for_each_own_word([&](unsigned int w) {
            for (unsigned int rest = smem.band[w]; rest != 0; rest &= rest - 1, ++place) {
                if (place < kListed) smem.listed[place] = w * 32 + __ffs(rest) - 1;
            }
        });
        // Nobody reads the histogram, which shares its memory with the staged keys, any longer.
        __syncthreads();
        const unsigned int listed = min(n_band - chunk, kListed);
        if (f_is_strict) {
            for (unsigned int i = threadIdx.x; i < listed; i += kThreads) {
                const unsigned int t = smem.listed[i];
                strict_keys[t] = total_order_key(values[t]);
            }
        } else {
            const unsigned int warp = threadIdx.x / kWarpSize;
            const unsigned int end = warp < kScoringWarps ? listed : 0;
            for (unsigned int i = warp * kKeys; i < end; i += kScoringWarps * kKeys) {
                score_keys<kKeys>(smem, row, fuses, scale, &smem.listed[i], min(listed - i, kKeys), strict_keys);
            }
        }
        __syncthreads();
    }
}

// The exact rank-th greatest key of the band.
__device__ __forceinline__ Winners select_band(Smem& smem, const unsigned int* values, unsigned int rank) {
    unsigned int prefix = 0;
    for (int shift = 32; shift > 0;) {
        const int bits = min(kDigitBits, shift);
        shift -= bits;
        renew_histogram<1>(smem);
        for_each_own_word([&](unsigned int w) {
            for (unsigned int band = smem.band[w]; band != 0; band &= band - 1) {
                const unsigned int key = values[w * 32 + __ffs(band) - 1];
                // Shifted twice, because shift + bits may be 32.
                if (((key ^ prefix) >> shift >> bits) == 0) {
                    atomicAdd(&smem.histogram[key >> shift & ((1u << bits) - 1)], 1);
                }
            }
        });
        const Bin bin = find_bin(smem, rank);
        rank -= bin.above;
        prefix |= bin.index << shift;
    }
    return {prefix, rank};
}

// Add the `wanted` best of the n_band band keys, which are still listed, to smem.in: each counts those better than it.
__device__ __forceinline__ void rank_band(
    Smem& smem, const unsigned int* strict_keys, unsigned int n_band, unsigned int wanted) {
    const unsigned int own = threadIdx.x;
    const unsigned int t = own < n_band ? smem.listed[own] : 0;
    const unsigned int key = own < n_band ? strict_keys[t] : 0;
    if (own < n_band) smem.ranked[own] = key;
    __syncthreads();
    if (own < n_band) {
        unsigned int better = 0;
#pragma unroll 4
        for (unsigned int i = 0; i < n_band; ++i) {
            const unsigned int other = smem.ranked[i];
            better += other > key || (other == key && i < own);
        }
        if (better < wanted) atomicOr(&smem.in[t / 32], 1u << t % 32);
    }
    __syncthreads();
}

// Write the positions of one word's winners; a warp's work.
__device__ __forceinline__ void emit_word(
    long long* out, unsigned int word, unsigned int position, unsigned int first) {
    const int lane = threadIdx.x % kWarpSize;
    if (word >> lane & 1) out[position + __popc(word & ((1u << lane) - 1))] = first + lane;
}

// How many keys are in, and how many tie: of this thread, to the sums over the threads before it, and over all.
struct Counts {
    unsigned int in, ties;
};

__device__ __forceinline__ Counts scan_counts(Smem& smem, const Counts& own, Counts& all) {
    Counts before;
    if constexpr (kRowInShared) {
        static_assert(!kRowInShared || kMaxWords * 32 < 1 << 16, "two counts of a block share one word");
        unsigned int total;
        const unsigned int packed = block_exclusive_scan<kThreads>(own.in | own.ties << 16, total, smem.scan);
        before = {packed & 0xffff, packed >> 16};
        all = {total & 0xffff, total >> 16};
    } else {
        before.in = block_exclusive_scan<kThreads>(own.in, all.in, smem.scan);
        before.ties = block_exclusive_scan<kThreads>(own.ties, all.ties, smem.scan);
    }
    return before;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dsa_index_select_certify_block(
        const Element* __restrict__ query, const Element* __restrict__ key, const Element* __restrict__ weights,
        const float* __restrict__ bias, float* scores, const unsigned int* __restrict__ allowed,
        const unsigned int* __restrict__ accounts, const KeyWord* __restrict__ key_words,
        const RowBound* __restrict__ bounds, long long* __restrict__ out, unsigned long long* __restrict__ counters,
        unsigned int total_rows, unsigned int q_seq, unsigned int key_seq, unsigned int row_stride,
        unsigned int top_k, float scale, float weights_scale, float bias_error) {
    extern __shared__ __align__(16) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int all_words = (key_seq + kBlockKeys - 1) / kBlockKeys * kBlockWords;
    unsigned int turn = 0;
    for (unsigned int r = blockIdx.x; r < total_rows; r += gridDim.x) {
        const unsigned int b = r / q_seq;
        const unsigned int account = accounts == nullptr ? kBiased | key_seq : accounts[r];
        const Row row = {
            scores + 1ull * r * row_stride,
            account & kBiased ? bias + 1ull * r * key_seq : nullptr,
            query + 1ull * r * kHeads * kHeadDim,
            weights + 1ull * r * kHeads,
            key + 1ull * b * key_seq * kHeadDim,
            key_words + 1ull * b * all_words,
            (account & ~kBiased) > top_k ? bounds[r] : RowBound{},
            key_seq,
            (key_seq + 31) / 32,
        };
        // f, and the strict keys of the band
        float* values = kRowInShared ? reinterpret_cast<float*>(shared_memory + sizeof(Smem)) : row.scores;
        unsigned int* strict_keys = reinterpret_cast<unsigned int*>(values);
        unsigned int ties = 0;
        bool has_scores = (account & ~kBiased) > top_k;
        for_each_own_word([&](unsigned int w) {
            const bool is_known = allowed != nullptr && w < row.n_words;
            smem.in[w] = is_known ? allowed[1ull * r * all_words + w] : 0;
            smem.band[w] = 0;
        });

        if (has_scores) {
            copy_row(smem, row, values);
            const RowBound& bound = row.bound;
            const bool is_exact = bound.flags & kExactRow;
            const float per_score = row.bias == nullptr || is_exact ? 0.0f : bias_error;
            KeyWord first_word = {0, 0.0f};  // of a thread that has no more; it is on its way early
            if (kThreadWords == 1 && threadIdx.x < row.n_words) first_word = row.key_words[threadIdx.x];
            if (threadIdx.x < kHeads) {
                smem.weights[threadIdx.x] = __fmul_rn(to_f32(row.weights[threadIdx.x]), weights_scale);
            }
            clear_histogram(smem);
            copy_async_wait<0>();
            __syncthreads();

            // f of every allowed key, and the least and the greatest.
            if (allowed != nullptr && row.bias != nullptr) add_bias(row, values);
            float greatest = -infinity();
            float least = infinity();
            float not_finite = 0.0f;  // a NaN once an infinity or a NaN was multiplied by zero
            for_each_group(row, values, [&](unsigned int w, const auto& f) {
                alignas(16) unsigned int group[kWords];
                if (allowed == nullptr) {
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        const bool is_there = (w + i) * 32 + lane < row.length;
                        group[i] = __ballot_sync(kFullWarp, is_there && __float_as_uint(f[i]) != kMaskedScore);
                    }
                    store_words(&smem.in[w], group);
                } else {
                    load_words(group, &smem.in[w]);
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
                        store_value(row, values, (w + i) * 32 + lane, known);
                        greatest = fmaxf(greatest, known);
                        least = fminf(least, is_allowed ? known : infinity());
                        not_finite = __fmaf_rn(is_allowed ? known : 0.0f, 0.0f, not_finite);
                    }
                }
            });
            __syncthreads();
            bool is_irregular = isnan(not_finite);
            unsigned int n_allowed = 0;
            for_each_own_word([&](unsigned int w) {
                const unsigned int in_word = smem.in[w];
                KeyWord own = first_word;
                if (kThreadWords > 1 && w < row.n_words) own = row.key_words[w];
                if constexpr (kRowInShared) smem.errors[w] = __fmaf_ru(bound.per_norm, own.norm, bound.floor);
                is_irregular = is_irregular || (own.irregular & in_word) != 0 ||
                               (in_word != 0 && !(own.norm < bound.max_norm));
                n_allowed += __popc(in_word);
            });
            unsigned int extremes[3] = {total_order_key(greatest), ~total_order_key(least), is_irregular};
            reduce_max(smem, extremes, turn);
            if (allowed == nullptr) {
                block_exclusive_scan<kThreads>(n_allowed, n_allowed, smem.scan);
                has_scores = n_allowed > top_k;
            }
            if (has_scores) {
                const float greatest_of_row = from_total_order_key(extremes[0]);
                const float least_of_row = from_total_order_key(~extremes[1]);
                const bool is_regular = (bound.flags & kRegularRow) && extremes[2] == 0 &&
                                        __fsub_rn(greatest_of_row, least_of_row) < infinity();
                Range between = {-infinity(), infinity()};
                if (is_regular) {
                    between = bracket_last_winner(
                        smem, row, per_score, values, least_of_row, greatest_of_row, top_k, turn);
                }
                for_each_key(smem.in, row, values, [&](unsigned int w, const auto& group, const auto& f) {
                    alignas(16) float errors[kWords];
                    load_errors(errors, smem, row, w);
                    unsigned int in[kWords];
                    unsigned int band[kWords];
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        const Range range = score_range(per_score, errors[i], f[i]);
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
                    block_exclusive_scan<kThreads>(count_own(smem.band), n_band, smem.scan);

                if (threadIdx.x == 0 && !is_exact) {
                    if (!is_regular) atomicAdd(&counters[0], 1ull);
                    atomicAdd(&counters[1], static_cast<unsigned long long>(n_band));
                }
                const bool fuses = bound.flags & kFusingRow;
                score_band(smem, row, fuses, is_exact && is_regular, scale, values, band_before, n_band);
                unsigned int n_in;
                block_exclusive_scan<kThreads>(count_own(smem.in), n_in, smem.scan);
                const unsigned int wanted = top_k - n_in;
                if (n_band <= kRanked) {
                    rank_band(smem, strict_keys, n_band, wanted);
                    for_each_own_word([&](unsigned int w) { smem.band[w] = 0; });
                } else {
                    const Winners winners = select_band(smem, strict_keys, wanted);
                    ties = winners.ties;
                    for_each_own_word([&](unsigned int w) {
                        unsigned int in_word = smem.in[w];
                        unsigned int equal_word = 0;
                        for (unsigned int rest = smem.band[w]; rest != 0; rest &= rest - 1) {
                            const unsigned int strict_key = strict_keys[w * 32 + __ffs(rest) - 1];
                            if (strict_key > winners.key) in_word |= rest & -rest;
                            if (strict_key == winners.key) equal_word |= rest & -rest;
                        }
                        smem.in[w] = in_word;
                        smem.band[w] = equal_word;
                    });
                }
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
        }

        // Positions, from counts of winners and of ties before each word.
        Counts all;
        Counts counts_before = scan_counts(smem, {count_own(smem.in), count_own(smem.band)}, all);
        for_each_own_word([&](unsigned int w) {
            const unsigned int in_word = smem.in[w];
            const unsigned int equal_word = smem.band[w];
            const unsigned int ties_before = min(counts_before.ties, ties);
            smem.positions[w] = counts_before.in + ties_before;
            smem.in[w] = in_word | lowest_bits(equal_word, ties - ties_before);
            counts_before.in += __popc(in_word);
            counts_before.ties += __popc(equal_word);
        });
        __syncthreads();
        long long* row_out = out + 1ull * r * top_k;
#pragma unroll 1
        for (unsigned int w = threadIdx.x / kWarpSize * 4; w < row.n_words; w += 4 * kWarps) {
            const uint4 group = *reinterpret_cast<const uint4*>(&smem.in[w]);
            const uint4 positions = *reinterpret_cast<const uint4*>(&smem.positions[w]);
            emit_word(row_out, group.x, positions.x, w * 32);
            emit_word(row_out, group.y, positions.y, w * 32 + 32);
            emit_word(row_out, group.z, positions.z, w * 32 + 64);
            emit_word(row_out, group.w, positions.w, w * 32 + 96);
        }
        const unsigned int kept = all.in + min(all.ties, ties);
        for (unsigned int slot = kept + threadIdx.x; slot < top_k; slot += kThreads) row_out[slot] = -1;
        __syncthreads();  // before the next row overwrites what others still read
    }
}
