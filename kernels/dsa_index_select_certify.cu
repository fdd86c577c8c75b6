// DsaIndexSelect, certified: from approximate scores to the exact selection.
//
//     scores [rows, row_stride] f32; bias [rows, T] f32; allowed, accounts, key_words, bounds: see
//     dsa_index_select_prepare.cu and dsa_index_select_score_sm90.cu   ->   out [rows, top_k] i64
//
// allowed and accounts may be null: then every score is there, with the bias, or kMaskedScore.
//
// A row with more than top_k allowed keys is decided so, f, e and the band being what common/dsa_select.cuh says:
//
//   1. A histogram finds a bin that holds the k-th greatest f. How far its bins reach is a guess from a sample.
//   2. The k-th greatest strict score is expected not far from the edges of that bin. With the greatest e of the row,
//      two thresholds say of each f whether its key is then in, or out, whatever e. What is left is the band, a dozen
//      or two of keys; a large one is narrowed by each key's own e.
//   3. The band is scored in strict order, and the best of it complete the selection: a small band is ranked key
//      by key, a large one goes through a radix select.
//   4. If the last of them is not where it was expected, 2 and 3 are done again with what e and the edges allow, for a
//      band of twice as many keys.
//   5. Winners are emitted in ascending order.
//
// A cluster of kCluster blocks takes a row, each block a part of its keys that fits its shared memory.
#include "common/async_copy.cuh"
#include "common/block_scan.cuh"
#include "common/cluster.cuh"
#include "common/dsa_repair.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"

constexpr int kCluster = CLUSTER;
// From sm_100 on the compiler needs more registers for what is in flight.
constexpr int kBlocksPerSm = kThreads > 256 ? 1 : sizeof(Element) == 4 || __CUDA_ARCH__ >= 1000 ? 2 : 3;

// Where the last winner is.
struct Guess {
    Range edges;      // its f, if that is the top_k-th greatest,
    Range expected;   // and its strict score, as a guess
    float error;      // of any key of the row, at most, but for
    float per_score;  // of |f|
};

struct Smem {
    alignas(16) Element query[kHeads][kQueryPitch];
    union {
        alignas(16) unsigned int histogram[kBins];
        alignas(16) float staged[kWarps][kStaged];
    };
    float weights[kHeads];
    unsigned int groups[kCluster][kGroups];
    alignas(16) unsigned int in[kThreads];    // a word of 32 keys a thread: those surely selected,
    alignas(16) unsigned int band[kThreads];  // and those to be scored
    unsigned int allowed[kThreads];           // what both were made from
    alignas(16) float errors[kThreads];       // bound of e, but for its share of |f|
    alignas(16) unsigned int ranked[kRanked];  // strict keys of the cluster's band, by position
    unsigned short listed[kListed];
    Barrier loaded;
    BlockScanScratch<kThreads> scan;
    unsigned int warp_values[2][4][kWarps];  // of reductions, by turns
    unsigned int block_values[2][4][kCluster];
    unsigned int bin[3];
    Counts counts;
    unsigned int row_flags;
    unsigned int last_winner;
    Guess guess;

    __device__ __forceinline__ const Element* query_at(int head, int d) const { return &query[head][d]; }
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much, and room for scores behind it");

struct Row {
    const float* scores;
    const float* bias;     // null where all allowed biases are zero
    const Element* keys;   // of the row's batch, from this block's first key on
    unsigned int length;   // of this block's part
    unsigned int n_words;
};

// Tell all blocks what the threads of this one know; a barrier of the cluster belongs between it and reduce_cluster().
template <int kCount>
__device__ __forceinline__ void share_values(Smem& smem, const unsigned int (&values)[kCount], unsigned int turn) {
    if (kCluster > 1 && threadIdx.x < kCluster) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            cluster_store<kCluster>(smem.block_values[turn][i][cluster_rank<kCluster>()], threadIdx.x, values[i]);
        }
    }
}

// The cluster's, known to all of its threads; and in before, the sums over the blocks before this one.
template <int kMaxima, int kCount>
__device__ __forceinline__ void reduce_cluster(
    Smem& smem, unsigned int (&values)[kCount], unsigned int (&before)[kCount], unsigned int turn) {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned int rank = cluster_rank<kCluster>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        before[i] = 0;
        if constexpr (kCluster > 1) {
            const unsigned int value = lane < kCluster ? smem.block_values[turn][i][lane] : 0;
            if (i < kMaxima) {
                values[i] = __reduce_max_sync(kFullWarp, value);
            } else {
                before[i] = __reduce_add_sync(kFullWarp, lane < rank ? value : 0);
                values[i] = __reduce_add_sync(kFullWarp, value);
            }
        }
    }
}

// Begin to bring the row's scores of this block, and its query, to shared memory.
__device__ __forceinline__ void load_row(Smem& smem, const Row& row, const Element* query, float* values) {
    const unsigned int score_bytes = (row.length + 3) / 4 * 16;
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(smem.loaded, score_bytes);
        if (score_bytes != 0) bulk_load(values, row.scores, score_bytes, smem.loaded);
    }
    // A bulk copy a head, as each has a place of its own, would take longer to be issued than to arrive.
#pragma unroll 1
    for (int i = fresh_thread() * kAccess; i < kHeads * kHeadDim; i += kAccess * kThreads) {
        copy_async<16>(shared_address(&smem.query[i / kHeadDim][i % kHeadDim]), query + i, true);
    }
    copy_async_commit();
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

// Tell all blocks what locate_bin() reads beside the bins, after a barrier of the cluster.
__device__ __forceinline__ void sum_groups(Smem& smem) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
#pragma unroll 2
    for (int first = 0; first < kGroups; first += kWarps) {
        const int group = first + warp;
        const uint4 bins = *reinterpret_cast<const uint4*>(&smem.histogram[group * kGroupBins + lane * kLaneBins]);
        const unsigned int sum = __reduce_add_sync(kFullWarp, bins.x + bins.y + bins.z + bins.w);
        if (lane < kCluster) cluster_store<kCluster>(smem.groups[cluster_rank<kCluster>()][group], lane, sum);
    }
}

// The bin of the rank-th greatest counted key (rank from 1) of the cluster; there must be as many.
__device__ __forceinline__ Bin locate_bin(Smem& smem, unsigned int rank) {
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < kWarpSize) {
        unsigned int own = 0;
#pragma unroll
        for (int i = 0; i < kCluster; ++i) own += smem.groups[i][lane];
        unsigned int above;
        const int group = find_lane(own, rank, above);
        const unsigned int& bins = smem.histogram[group * kGroupBins + lane * kLaneBins];
        unsigned int counts[kLaneBins] = {};
#pragma unroll
        for (int i = 0; i < kCluster; ++i) {
            const uint4 others = cluster_load<kCluster>(reinterpret_cast<const uint4&>(bins), i);
            counts[0] += others.x;
            counts[1] += others.y;
            counts[2] += others.z;
            counts[3] += others.w;
        }
        search_group(smem, group, counts, rank, above);
    }
    __syncthreads();
    return {smem.bin[0], smem.bin[1], smem.bin[2]};
}

// The blocks of a cluster, as common/dsa_repair.cuh has them.
struct Team {
    Smem& smem;
    unsigned int& turn;

    template <int kCount>
    __device__ __forceinline__ void reduce_max(unsigned int (&values)[kCount]) {
        unsigned int before[kCount];
        reduce_warp<kCount>(smem, values, turn);
        __syncthreads();
        reduce_block<kCount>(smem, values, turn);
        share_values(smem, values, turn);
        cluster_sync<kCluster>();
        reduce_cluster<kCount>(smem, values, before, turn);
    }

    template <int kCount>
    __device__ __forceinline__ void sum_blocks(unsigned int (&values)[kCount], unsigned int (&before)[kCount]) {
        if constexpr (kCluster > 1) {
            turn ^= 1;
            share_values(smem, values, turn);
            cluster_sync<kCluster>();
        }
        reduce_cluster<0>(smem, values, before, turn);
    }

    __device__ __forceinline__ void renew_bins() { renew_histogram<kCluster>(smem); }

    __device__ __forceinline__ void count(unsigned int bin) { atomicAdd(&smem.histogram[bin], 1); }

    __device__ __forceinline__ Bin find_bin(unsigned int rank) {
        __syncthreads();
        sum_groups(smem);
        cluster_sync<kCluster>();
        return locate_bin(smem, rank);
    }
};

// Add the `wanted` best of the cluster's n_total band keys to smem.in: each key counts those better than it. The
// block's n_band keys are still listed; `before` lie in the blocks before it. Returns how many of those are among the
// best, the last of which goes to smem.last_winner.
__device__ __forceinline__ unsigned int rank_band(
    Smem& smem, const unsigned int* strict_keys, unsigned int n_band, unsigned int before, unsigned int n_total,
    unsigned int wanted) {
    const unsigned int own = threadIdx.x;
    if (own < n_band) {
        const unsigned int key = strict_keys[smem.listed[own]];
#pragma unroll
        for (int i = 0; i < kCluster; ++i) cluster_store<kCluster>(smem.ranked[before + own], i, key);
    }
    if (own >= n_total && own < (n_total + 3) / 4 * 4) smem.ranked[own] = 0;  // better than none
    cluster_sync<kCluster>();
    bool wins = false;
    if (own < n_total) {
        const unsigned int key = smem.ranked[own];
        unsigned int better = 0;
#pragma unroll 2
        for (unsigned int i = 0; i < n_total; i += 4) {
            const uint4 others = *reinterpret_cast<const uint4*>(&smem.ranked[i]);
            better += others.x > key || (others.x == key && i < own);
            better += others.y > key || (others.y == key && i + 1 < own);
            better += others.z > key || (others.z == key && i + 2 < own);
            better += others.w > key || (others.w == key && i + 3 < own);
        }
        wins = better < wanted;
        if (better + 1 == wanted) smem.last_winner = key;
        if (wins && own - before < n_band) {
            const unsigned int t = smem.listed[own - before];
            atomicOr(&smem.in[t / 32], 1u << t % 32);
        }
    }
    return __syncthreads_count(wins && own < before);
}

// f of an allowed key, of another part of the row for each thread of a block and the same in all blocks of the cluster;
// or a NaN. row_bias is null where nothing is to be added, and row_allowed where what is masked has been made a NaN.
__device__ __forceinline__ float sample_score(
    const float* row_scores, const float* row_bias, const unsigned int* row_allowed, unsigned int key_seq) {
    const unsigned int words = (key_seq + 31) / 32;
    const unsigned int w = threadIdx.x * ((words + kThreads - 1) / kThreads);
    const float none = __uint_as_float(kMaskedScore);
    if (w >= words) return none;
    const unsigned int word = row_allowed == nullptr ? 1 : row_allowed[w];
    if (word == 0) return none;
    const unsigned int t = w * 32 + __ffs(word) - 1;
    return row_bias == nullptr ? row_scores[t] : __fadd_rn(row_scores[t], row_bias[t]);
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
    Team team = {smem, turn};
    unsigned int loads = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(smem.loaded, 1);
        fence_mbarrier_init();
    }
    cluster_sync<kCluster>();  // only then may a block write to another's memory

    for (unsigned int r = blockIdx.x / kCluster; r < total_rows; r += gridDim.x / kCluster) {
        const unsigned int b = r / q_seq;
        const unsigned int account = accounts == nullptr ? kBiased | key_seq : accounts[r];
        const unsigned int length = min(key_seq - first_key, block_keys);
        const Row row = {
            scores + 1ull * r * row_stride + first_key,
            account & kBiased ? bias + 1ull * r * key_seq + first_key : nullptr,
            key + (1ull * b * key_seq + first_key) * kHeadDim,
            length,
            (length + 31) / 32,
        };
        const unsigned int own_word = first_key / 32 + fresh_thread();  // this thread's, of the row's words
        unsigned int in_word = 0;
        unsigned int equal_word = 0;
        unsigned int ties = 0;
        bool is_ranked = false;
        unsigned int winners_before = 0;  // in the blocks before, if it is
        bool has_scores = (account & ~kBiased) > top_k;
        smem.in[threadIdx.x] = 0;
        smem.band[threadIdx.x] = 0;
        const unsigned int* row_allowed =
            allowed == nullptr ? nullptr : allowed + 1ull * r * key_blocks * kBlockWords;
        if (allowed != nullptr && threadIdx.x < row.n_words) {
            in_word = row_allowed[own_word];
            smem.in[threadIdx.x] = in_word;
        }

        if (has_scores) {
            load_row(smem, row, query + 1ull * r * kHeads * kHeadDim, values);
            const RowBound bound = bounds[r];
            const bool is_exact = bound.flags & kExactRow;
            if (threadIdx.x == 0) smem.row_flags = bound.flags;
            const float per_score = row.bias == nullptr || is_exact ? 0.0f : bias_error;
            KeyWord key_word = {0, 0.0f};
            if (threadIdx.x < row.n_words) {
                key_word = key_words[1ull * b * key_blocks * kBlockWords + own_word];
            }
            const unsigned int irregular = key_word.norm < bound.max_norm ? key_word.irregular : ~0u;
            smem.errors[threadIdx.x] = __fmaf_ru(bound.per_norm, key_word.norm, bound.floor);
            if (threadIdx.x < kHeads) {
                smem.weights[threadIdx.x] = __fmul_rn(to_f32(weights[1ull * r * kHeads + threadIdx.x]), weights_scale);
            }
            clear_histogram(smem);
            const float* added_bias = allowed == nullptr ? nullptr : row.bias;
            const float sample = sample_score(
                row.scores - first_key, added_bias == nullptr ? nullptr : added_bias - first_key, row_allowed, key_seq);
            unsigned int reach[2] = {
                ~total_order_key(fminf(sample, infinity())), total_order_key(fmaxf(sample, -infinity()))};
            reduce_warp<2>(smem, reach, turn);
            __syncthreads();
            reduce_block<2>(smem, reach, turn);
            const float low = from_total_order_key(~reach[0]);
            const float high = from_total_order_key(reach[1]);
            const Bins bins = Bins::beyond(low, high);
            mbarrier_wait(smem.loaded, loads & 1);
            ++loads;

            // Count f of every allowed key.
            if (added_bias != nullptr) add_bias(row, values);
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
                if ((group[0] & group[1] & group[2] & group[3]) == kFullWarp) {
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        not_finite = __fmaf_rn(f[i], 0.0f, not_finite);
                        atomicAdd(&smem.histogram[bins.bin(f[i])], 1);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < kWords; ++i) {
                        if ((group[i] >> lane & 1) != 0) {
                            not_finite = __fmaf_rn(f[i], 0.0f, not_finite);
                            atomicAdd(&smem.histogram[bins.bin(f[i])], 1);
                        }
                    }
                }
            }
            copy_async_wait<0>();  // the query
            __syncthreads();
            in_word = smem.in[threadIdx.x];
            unsigned int summary[3] = {
                in_word != 0 ? __float_as_uint(smem.errors[threadIdx.x]) : 0,
                isnan(not_finite) || (irregular & in_word) != 0, unsigned(__popc(in_word))};
            unsigned int before[3];
            reduce_warp<2>(smem, summary, turn);
            sum_groups(smem);
            __syncthreads();
            reduce_block<2>(smem, summary, turn);
            share_values(smem, summary, turn);
            cluster_sync<kCluster>();
            reduce_cluster<2>(smem, summary, before, turn);
            if (allowed == nullptr) has_scores = summary[2] > top_k;
            if (has_scores) {
                const bool is_regular = (smem.row_flags & kRegularRow) && summary[1] == 0;
                smem.allowed[threadIdx.x] = in_word;
                unsigned int guessed_word = 0;
                Range decided = {-infinity(), infinity()};
                if (is_regular) {
                    const Bin bin = locate_bin(smem, top_k);
                    const Range edges = bracket_last_winner(team, smem, bins, bin, values, row.n_words, top_k);
                    const float error = __uint_as_float(summary[0]);
                    const float margin = error * kExpectedError;
                    const Range expected = {edges.lower - margin, edges.upper + margin};
                    decided = beyond(expected, per_score, error);
                    if (threadIdx.x == 0) smem.guess = {edges, expected, error, per_score};
                }
                for (bool is_guess = is_regular;; is_guess = false) {
                    classify(smem, decided, values, row.n_words);
                    smem.band[threadIdx.x] |= guessed_word;
                    BlockCounts block = count_keys(team, smem);
                    if (is_guess && smem.counts.band > kWideBand) {
                        narrow_band(team, smem, smem.guess.edges, smem.guess.per_score, values, row.n_words);
                        block = count_keys(team, smem);
                    }
                    const bool fuses = smem.row_flags & kFusingRow;
                    score_band(smem, row, fuses, is_exact && is_regular, scale, values, block.band_before, block.band);
                    const Counts counts = smem.counts;
                    const unsigned int wanted = top_k - counts.in;
                    unsigned int last_winner;
                    is_ranked = counts.band <= kRanked;
                    if (is_ranked) {
                        winners_before = counts.in_before + rank_band(smem, strict_keys, block.band, counts.band_before,
                                                                      counts.band, wanted);
                        last_winner = smem.last_winner;
                        in_word = smem.in[threadIdx.x];
                    } else {
                        const Winners winners = select_band(team, smem, strict_keys, wanted);
                        last_winner = winners.key;
                        ties = winners.ties;
                        in_word = smem.in[threadIdx.x];
                        equal_word = add_winners(in_word, smem, strict_keys, winners);
                    }
                    const float last = from_total_order_key(last_winner);
                    const Range expected = smem.guess.expected;
                    if (!is_guess || (expected.lower <= last && last <= expected.upper)) break;
                    // A key beside the band may have its place. The next band takes this one in, whose f have made room
                    // for strict scores.
                    guessed_word = smem.band[threadIdx.x];
                    smem.band[threadIdx.x] = 0;
                    smem.in[threadIdx.x] = smem.allowed[threadIdx.x] & ~guessed_word;
                    equal_word = 0;
                    ties = 0;
                    decided = thresholds(smem.guess.edges, smem.guess.per_score, smem.guess.error);
                    __syncthreads();
                }
                if (threadIdx.x == 0 && rank == 0 && !is_exact) {
                    if (!is_regular) atomicAdd(&counters[0], 1ull);
                    atomicAdd(&counters[1], static_cast<unsigned long long>(smem.counts.band));
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
            in_word = smem.in[threadIdx.x];
        }

        // Positions, from counts of winners and of ties before each word.
        unsigned int block_counts;
        const unsigned int counts_before = block_exclusive_scan<kThreads>(
            __popc(in_word) | __popc(equal_word) << 16, block_counts, smem.scan);
        const unsigned int block_in = block_counts & 0xffff;
        const unsigned int block_equal = block_counts >> 16;
        unsigned int totals[2] = {block_in, block_equal};
        unsigned int before[2] = {winners_before, 0};
        if (!is_ranked) team.sum_blocks(totals, before);
        const unsigned int ties_before = min(before[1], ties);  // in the blocks before
        const unsigned int equal_before = before[1] + (counts_before >> 16);
        unsigned int place = (counts_before & 0xffff) + min(equal_before, ties) - ties_before;
        in_word |= lowest_bits(equal_word, ties - min(equal_before, ties));
        // Nobody looks at scores any longer: they make room for the positions, which go out side by side.
        unsigned int* positions = reinterpret_cast<unsigned int*>(values);
        for (unsigned int rest = in_word; rest != 0; rest &= rest - 1, ++place) {
            positions[place] = first_key + threadIdx.x * 32 + __ffs(rest) - 1;
        }
        __syncthreads();
        long long* row_out = out + 1ull * r * top_k;
        const unsigned int n_winners = block_in + min(before[1] + block_equal, ties) - ties_before;
        const unsigned int first = before[0] + ties_before;
#pragma unroll 4
        for (unsigned int i = threadIdx.x; i < n_winners; i += kThreads) row_out[first + i] = positions[i];
        const unsigned int kept = is_ranked ? top_k : totals[0] + min(totals[1], ties);
        for (unsigned int slot = kept + rank * kThreads + threadIdx.x; slot < top_k; slot += kCluster * kThreads) {
            row_out[slot] = -1;
        }
        fence_proxy_async();  // the next load overwrites what this thread has written
        if (is_ranked) {
            __syncthreads();  // no block has looked at another since the ranks were shared
        } else {
            cluster_sync<kCluster>();
        }
    }
}
