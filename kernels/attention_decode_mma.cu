// Attention of a single query row per (batch, head) on tensor cores, for f16 and bf16: the rows of up to 8 query heads
// that read the same keys are the N side of products whose M side are keys, or columns of values.
//
//   q, output   [B, H, 1, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//
// The parameters are those of attention_decode.cu; there is no mask. A warp copies its runs of keys and values to shared
// memory of its own, a run ahead, and waits for nobody. Beyond the range there are zeros, and weights of zero.
#include "common/async_copy.cuh"
#include "common/attention_decode.cuh"
#include "common/half_element.cuh"
#include "common/mma.cuh"

static_assert(kHeads == 8 && !kHasMask && kHeadDim % 16 == 0 && kLoadWidth == 8, "what a product takes");

constexpr int kTiles = kRunKeys / 16;
constexpr int kSteps = kHeadDim / 16;
constexpr float kLog2E = 1.4426950408889634f;

// Rows lie an odd number of 16-byte accesses apart: eight of them begin in eight different groups of banks.
using Rows = Element[kRunKeys][kHeadDim + 8];

struct alignas(16) Run {
    Rows keys;
    Rows values;
};

struct Smem {
    union {
        Run run;
        States states;
    } warps[kWarps];
    States block;
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much");

// Start copying a run's rows of a plane, which are neighbours in memory, as one group; a warp's work.
__device__ __forceinline__ void copy_rows(Rows& target, const Element* plane, unsigned int run, unsigned int end) {
    const unsigned int n_rows = run < end ? min(end - run, kRunKeys) : 0;
    const unsigned int own = threadIdx.x % 32 * 8;
    const Element* source = plane + 1ull * run * kHeadDim + own;
#pragma unroll
    for (int i = 0; i < kRunKeys * kHeadDim; i += 32 * 8) {
        const unsigned int element = i + own;
        copy_async<16>(shared_address(&target[element / kHeadDim][element % kHeadDim]), source + i,
                       element < n_rows * kHeadDim);
    }
    copy_async_commit();
}

// Wait, in all lanes, until no more than the latest group of copies is on its way.
__device__ __forceinline__ void await_rows() {
    copy_async_wait<1>();
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) CLUSTER_ROW(kCluster) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(16) char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);

    const Unit unit(q_heads, group);
    const Lengths lengths(total_lengths, past_lengths, unit.b, sq, sk, capture_error);
    const KeyRange range = lengths.range(0, local_window);
    const unsigned int lane = threadIdx.x % 32;
    const unsigned int warp = uniform_warp();
    const unsigned int first = first_run(range, warp);

    const unsigned long long kv_plane = 1ull * unit.kv_head * kv_capacity * kHeadDim;
    Run& buffer = smem.warps[warp].run;
    copy_rows(buffer.keys, key + kv_plane, first, range.end);
    copy_rows(buffer.values, value + kv_plane, first, range.end);

    // A lane has pairs of columns of the query head of its row in the grid of lanes, and zeros where there is none.
    unsigned int query[kSteps][2];
    const auto* const query_row = reinterpret_cast<const unsigned int*>(q + 1ull * (unit.plane + lane / 4) * kHeadDim);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            query[step][i] = lane / 4 < unit.n_heads ? query_row[step * 8 + i * 4 + lane % 4] : 0;
        }
    }

    // Element [n][i] is of column 16 n + lane / 4 + i / 2 * 8, and as all of a lane's of heads 2 (lane % 4) + i % 2.
    float sums[kSteps][4] = {};
    float row_max[2] = {negative_infinity(), negative_infinity()};
    float row_sum[2] = {};  // of this lane's keys
#pragma unroll 1
    for (unsigned int run = first; run < range.end; run += kRunStep) {
        // Element [m][i] is of key 16 m + lane / 4 + i / 2 * 8 of the run.
        float scores[kTiles][4] = {};
        await_rows();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                unsigned int keys[4];
                ldmatrix_x4(keys, shared_address(&buffer.keys[m * 16 + lane % 16][step * 16 + lane / 16 * 8]));
                mma_m16n8k16<Element>(scores[m], keys, query[step][0], query[step][1]);
            }
        }
        __syncwarp();
        copy_rows(buffer.keys, key + kv_plane, run + kRunStep, range.end);

        const auto is_in_range = [&](int m, int i) { return run + m * 16 + lane / 4 + i / 2 * 8 < range.end; };
        float rescale[2];
        float origin[2];
        float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[m][i] = attention_score(scores[m][i], scale, softcap, 0.0f);
                if (is_in_range(m, i)) new_max[i % 2] = fmaxf(new_max[i % 2], scores[m][i]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                new_max[j] = fmaxf(new_max[j], __shfl_xor_sync(kFullWarp, new_max[j], step));
            }
            origin[j] = softmax_origin(new_max[j]);
            rescale[j] = ex2((row_max[j] - origin[j]) * kLog2E);
            row_max[j] = new_max[j];
            row_sum[j] *= rescale[j];
        }
        unsigned int weights[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float weight = ex2(fmaf(scores[m][i] - origin[i % 2], kLog2E, Traits::kWeightExponent));
                scores[m][i] = is_in_range(m, i) ? weight : 0.0f;
                row_sum[i % 2] += scores[m][i];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                weights[m][i] = movmatrix_trans(Traits::pack(scores[m][2 * i], scores[m][2 * i + 1]));
            }
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] *= rescale[i % 2];
        }

        await_rows();
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                unsigned int values[4];
                ldmatrix_x4_trans(
                    values, shared_address(&buffer.values[m * 16 + lane / 16 * 8 + lane % 8][n * 16 + (lane & 8)]));
                mma_m16n8k16<Element>(sums[n], values, weights[m][0], weights[m][1]);
            }
        }
        __syncwarp();
        copy_rows(buffer.values, value + kv_plane, run + kRunStep, range.end);
    }

    // The warp's states take the place of what all of its lanes have read.
    copy_async_wait<0>();
    __syncwarp();
    States& own = smem.warps[warp].states;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const unsigned int head = lane % 4 * 2 + j;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) row_sum[j] += __shfl_xor_sync(kFullWarp, row_sum[j], step);
        if (lane < 4) {
            own.maxima[head] = row_max[j];
            own.denominators[head] = row_sum[j];
            own.has_key[head] = first < range.end;
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
            own.numerators[head][n * 16 + lane / 4] = sums[n][j];
            own.numerators[head][n * 16 + lane / 4 + 8] = sums[n][2 + j];
        }
    }
    finish(smem.block, unit, output, [&](int w) -> const States& { return smem.warps[w].states; });
}
