// DsaIndexSelect, second launch: per query row, the indices of its top_k allowed keys by (score
// descending in IEEE total order, index ascending), emitted ascending and padded with -1.
//
//     scores [rows, T] f32, allowed [rows, T] u8   ->   out [rows, top_k] i64        T < 2^31
//
// One block a row. Three histogram passes over the scores' total order keys, 11, 11 and 10 bits from
// the top, find the key of the last winner; one more pass emits every key above it and the first of
// those equal to it. A row with no more than top_k allowed keys needs the first histogram only.
// Slots come from counting, never from the order in which threads arrive, so runs do not differ.
#include "common/block_scan.cuh"
#include "common/total_order.cuh"

constexpr int kThreads = THREADS;

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kBinsPerThread = kBins / kThreads;
static_assert(kBinsPerThread * kThreads == kBins, "threads share the bins evenly");

// A thread has kRun keys in flight; a block advances through its row by chunks.
constexpr int kRun = 4;
constexpr int kChunk = kThreads * kRun;
static_assert(kChunk < 1 << 16, "two counts within a chunk share one word");

struct Smem {
    unsigned int histogram[kBins];
    BlockScanScratch<kThreads> scan;
    unsigned int digit;
    unsigned int keys_above;
};

// One row of the score workspace.
struct Row {
    const float* scores;
    const unsigned char* allowed;
    unsigned int length;

    // The total order key at t; 0, which is below every score's, where masked or beyond the row.
    __device__ __forceinline__ unsigned int key(unsigned int t) const {
        if (t >= length) return 0;
        const float score = scores[t];
        const bool is_allowed = allowed[t];
        return is_allowed ? total_order_key(score) : 0;
    }
};

// The winners of a row: all keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
    unsigned int key;
    unsigned int ties;
};

// Count, by their digit of `bits` bits at `shift`, the allowed keys that agree with prefix above it.
__device__ __forceinline__ void build_histogram(Smem& smem, const Row& row, unsigned int prefix, int shift, int bits) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) smem.histogram[bin] = 0;
    __syncthreads();
    const int lane = threadIdx.x % kWarpSize;
    for (unsigned int chunk = 0; chunk < row.length; chunk += kChunk) {
        unsigned int keys[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) keys[i] = row.key(chunk + i * kThreads + threadIdx.x);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            // Shifted twice, because shift + bits may be 32.
            const bool is_counted = keys[i] != 0 && ((keys[i] ^ prefix) >> shift >> bits) == 0;
            const unsigned int digit = (keys[i] >> shift) & ((1u << bits) - 1);
            const unsigned int counted_lanes = __ballot_sync(kFullWarp, is_counted);
            if (is_counted) {
                // Scores crowd into few bins: one atomic for all lanes of a warp with one digit.
                const unsigned int peers = __match_any_sync(counted_lanes, digit);
                if (lane == __ffs(peers) - 1) atomicAdd(&smem.histogram[digit], __popc(peers));
            }
        }
    }
    __syncthreads();
}

// Publish the digit of the rank-th greatest counted key (rank from 1), and how many keys have a
// greater digit. Returns the number of counted keys; publishes nothing if there are fewer than rank.
__device__ __forceinline__ unsigned int find_digit(Smem& smem, unsigned int rank) {
    // Thread 0 owns the highest bins.
    const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
    unsigned int own = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) own += smem.histogram[highest - i];
    unsigned int counted;
    unsigned int above = block_exclusive_scan<kThreads>(own, counted, smem.scan);
    if (above < rank && rank <= above + own) {
        int digit = highest;
        while (above + smem.histogram[digit] < rank) above += smem.histogram[digit--];
        smem.digit = digit;
        smem.keys_above = above;
    }
    __syncthreads();
    return counted;
}

__device__ __forceinline__ Threshold find_threshold(Smem& smem, const Row& row, unsigned long long top_k) {
    constexpr Threshold kEveryAllowedKey = {0, 0};
    if (top_k >= row.length) return kEveryAllowedKey;
    unsigned int rank = static_cast<unsigned int>(top_k);
    unsigned int prefix = 0;
    for (int shift = 32; shift > 0;) {
        const int bits = min(kDigitBits, shift);
        shift -= bits;
        build_histogram(smem, row, prefix, shift, bits);
        if (find_digit(smem, rank) < rank) return kEveryAllowedKey;  // in the first pass only
        rank -= smem.keys_above;
        prefix |= smem.digit << shift;
    }
    return {prefix, rank};
}

// Write the winners' indices in ascending order and return how many there are.
__device__ __forceinline__ unsigned int emit(Smem& smem, const Row& row, Threshold threshold, long long* out) {
    unsigned int greater_before = 0;
    unsigned int equal_before = 0;
    for (unsigned int chunk = 0; chunk < row.length; chunk += kChunk) {
        const unsigned int first = chunk + threadIdx.x * kRun;
        unsigned int keys[kRun];
        unsigned int counts = 0;  // greater in the low half, equal in the high half
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            keys[i] = row.key(first + i);
            counts += keys[i] > threshold.key ? 1u : keys[i] == threshold.key ? 1u << 16 : 0;
        }
        unsigned int chunk_counts;
        const unsigned int counts_before = block_exclusive_scan<kThreads>(counts, chunk_counts, smem.scan);
        unsigned int greater = greater_before + (counts_before & 0xffff);
        unsigned int equal = equal_before + (counts_before >> 16);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            const bool is_greater = keys[i] > threshold.key;
            const bool is_equal = keys[i] == threshold.key;
            if (is_greater || (is_equal && equal < threshold.ties)) {
                out[greater + min(equal, threshold.ties)] = first + i;
            }
            greater += is_greater;
            equal += is_equal;
        }
        greater_before += chunk_counts & 0xffff;
        equal_before += chunk_counts >> 16;
    }
    return greater_before + min(equal_before, threshold.ties);
}

extern "C" __global__ void __launch_bounds__(kThreads) dsa_index_select_select(
    const float* scores, const unsigned char* allowed, long long* out, unsigned long long total_rows,
    unsigned long long key_seq, unsigned long long top_k) {
    __shared__ Smem smem;
    for (unsigned long long r = blockIdx.x; r < total_rows; r += gridDim.x) {
        const Row row = {scores + r * key_seq, allowed + r * key_seq, static_cast<unsigned int>(key_seq)};
        long long* row_out = out + r * top_k;
        const Threshold threshold = find_threshold(smem, row, top_k);
        const unsigned int kept = emit(smem, row, threshold, row_out);
        for (unsigned long long slot = kept + threadIdx.x; slot < top_k; slot += kThreads) row_out[slot] = -1;
    }
}
