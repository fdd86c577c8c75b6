// Attention of a single query row per (batch, head): a stream of keys and values, each read once.
//
//   q, output   [B, H, 1, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [1, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// Within a warp a row of D elements is spread over kRowLanes lanes, so that kRowsAtOnce rows move at once, and a run of
// keys is kRowLanes turns. Each lane copies what it will read itself, a run ahead, kBatch turns of keys or values at a
// time: nobody waits for another thread. Beyond the range there are zeros. A key that the mask hides is multiplied too,
// but what comes out is thrown away, and its value is not multiplied by zero.
#include "common/async_copy.cuh"
#include "common/attention_decode.cuh"

constexpr int kPacks = kHeadDim / kLoadWidth;

__host__ __device__ constexpr int row_lanes(int packs) {
    int lanes = 1;
    while (lanes < packs && lanes < 32) lanes *= 2;
    return lanes;
}

constexpr int kRowLanes = row_lanes(kPacks);
constexpr int kRowsAtOnce = 32 / kRowLanes;
constexpr int kAccesses = (kPacks + kRowLanes - 1) / kRowLanes;  // of a lane to one row
constexpr int kBatch = kRowLanes < 4 ? kRowLanes : 4;            // turns that are copied and summed together
constexpr int kBatches = kRowLanes / kBatch;                     // of a run

using AccessPack = Pack<Element, kLoadWidth>;

struct Batch {
    AccessPack packs[kBatch][kAccesses][32];
};

struct Run {
    Batch keys[kBatches];
    Batch values[kBatches];
};

struct Smem {
    union {
        Run run;
        States states;
    } warps[kWarps];
    States block;
};

static_assert(sizeof(Smem) == SHARED_BYTES, "the host gives a block this much");

__device__ __forceinline__ float max_over_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
    return value;
}

__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    return value;
}

// A lane's part of a row, with zeros where its accesses lie beyond it.
using RowPart = float[kAccesses][kLoadWidth];

// Sum each of the kBatch dots over the kRowLanes lanes of a row. Each step leaves a lane half of the dots until it has
// one: that of turn lane % kRowLanes / kBatches of the batch, the same in kBatches lanes.
__device__ __forceinline__ float sum_over_row(float (&dots)[kBatch]) {
    int left = kBatch;
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = threadIdx.x & step;
#pragma unroll
            for (int i = 0; i < left; ++i) {
                const float away = upper ? dots[i] : dots[i + left];
                dots[i] = (upper ? dots[i + left] : dots[i]) + __shfl_xor_sync(kFullWarp, away, step);
            }
        } else {
            dots[0] += __shfl_xor_sync(kFullWarp, dots[0], step);
        }
    }
    return dots[0];
}

// Start copying this lane's part of a batch of the run that begins with key `run`, as one group. plane is where this
// lane's part of the plane begins.
__device__ __forceinline__ void copy_batch(
    Batch& target, const Element* plane, unsigned int run, int batch, unsigned int end) {
    const unsigned int lane = threadIdx.x % 32;
    const unsigned int first = run + batch * (kBatch * kRowsAtOnce);
    const Element* source = plane + 1ull * first * kHeadDim;
#pragma unroll
    for (int turn = 0; turn < kBatch; ++turn) {
        const bool is_there = first + turn * kRowsAtOnce + lane / kRowLanes < end;
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
            copy_async<sizeof(AccessPack)>(
                shared_address(&target.packs[turn][a][lane]),
                source + turn * kRowsAtOnce * kHeadDim + a * kRowLanes * kLoadWidth,
                is_there && a * kRowLanes + lane % kRowLanes < kPacks);
        }
    }
    copy_async_commit();
}

// Wait for the batch whose copy started first of those that have not been read. A run's batches are on their way.
__device__ __forceinline__ void await_batch() { copy_async_wait<2 * kBatches - 1>(); }

__device__ __forceinline__ void read_row(RowPart& values, const Batch& batch, int turn) {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) load_f32(batch.packs[turn][a][threadIdx.x % 32].values, values[a]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) CLUSTER_ROW(kCluster) ENTRY(
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
    // Where there are fewer heads than HEADS, the last one stands in.
    const auto own_head = [&](int h) { return min(h, unit.n_heads - 1); };

    const unsigned long long lane_plane =
        (1ull * unit.kv_head * kv_capacity + lane / kRowLanes) * kHeadDim + lane % kRowLanes * kLoadWidth;
    const Element* const key_plane = key + lane_plane;
    const Element* const value_plane = value + lane_plane;
    Run& buffer = smem.warps[warp].run;
#pragma unroll 1
    for (int i = 0; i < kBatches; ++i) copy_batch(buffer.keys[i], key_plane, first, i, range.end);
#pragma unroll 1
    for (int i = 0; i < kBatches; ++i) copy_batch(buffer.values[i], value_plane, first, i, range.end);

    RowPart query[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const Element* row = q + 1ull * (unit.plane + own_head(h)) * kHeadDim;
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
            const unsigned int pack = a * kRowLanes + lane % kRowLanes;
            if (pack < kPacks) {
                load_f32(row + pack * kLoadWidth, query[h][a]);
            } else {
#pragma unroll
                for (int i = 0; i < kLoadWidth; ++i) query[h][a][i] = 0.0f;
            }
        }
    }

    RowPart sums[kHeads] = {};
    float row_max[kHeads];
    float row_sum[kHeads] = {};  // of this lane's keys
    bool has_key[kHeads] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) row_max[h] = negative_infinity();

    // The key of a run whose dots end up in this lane.
    const unsigned int own_turn = lane % kBatches * kBatch + lane % kRowLanes / kBatches;
    const unsigned int own_key = own_turn * kRowsAtOnce + lane / kRowLanes;
#pragma unroll 1
    for (unsigned int run = first; run < range.end; run += kRunStep) {
        const bool is_in_range = run + own_key < range.end;
        float bias[kHeads];
        bool is_allowed[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            bias[h] = 0.0f;
            is_allowed[h] = is_in_range;
            if (kHasMask && is_in_range) {
                bias[h] = to_f32(mask[unit.b * mask_batch_stride + (unit.h + own_head(h)) * mask_head_stride + run + own_key]);
                is_allowed[h] = bias[h] != negative_infinity();
            }
        }

        float weights[kHeads];  // dots, until they become weights
#pragma unroll 1
        for (int batch = 0; batch < kBatches; ++batch) {
            await_batch();
            float dots[kHeads][kBatch];
#pragma unroll
            for (int turn = 0; turn < kBatch; ++turn) {
                RowPart row;
                read_row(row, buffer.keys[batch], turn);
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    float dot = 0.0f;
#pragma unroll
                    for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
                        for (int i = 0; i < kLoadWidth; ++i) dot = fmaf(query[h][a][i], row[a][i], dot);
                    }
                    dots[h][turn] = dot;
                }
            }
            copy_batch(buffer.keys[batch], key_plane, run + kRunStep, batch, range.end);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const float dot = sum_over_row(dots[h]);
                if (lane % kBatches == batch) weights[h] = dot;
            }
        }

#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            has_key[h] |= __any_sync(kFullWarp, is_allowed[h]);
            const float score =
                is_allowed[h] ? attention_score(weights[h], scale, softcap, bias[h]) : negative_infinity();
            const float new_max = fmaxf(row_max[h], max_over_warp(score));
            const float origin = softmax_origin(new_max);
            const float rescale = expf(row_max[h] - origin);
            weights[h] = is_allowed[h] ? expf(score - origin) : kExcluded;
            row_max[h] = new_max;
            row_sum[h] = fmaf(row_sum[h], rescale, weights[h]);
#pragma unroll
            for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
                for (int i = 0; i < kLoadWidth; ++i) sums[h][a][i] *= rescale;
            }
        }

#pragma unroll 1
        for (int batch = 0; batch < kBatches; ++batch) {
            await_batch();
#pragma unroll
            for (int turn = 0; turn < kBatch; ++turn) {
                RowPart row;
                read_row(row, buffer.values[batch], turn);
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float weight =
                        __shfl_sync(kFullWarp, weights[h], lane / kRowLanes * kRowLanes + turn * kBatches + batch);
                    if (kHasMask && is_excluded(weight)) continue;
#pragma unroll
                    for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
                        for (int i = 0; i < kLoadWidth; ++i) sums[h][a][i] = fmaf(weight, row[a][i], sums[h][a][i]);
                    }
                }
            }
            copy_batch(buffer.values[batch], value_plane, run + kRunStep, batch, range.end);
        }
    }

    // The warp's states take the place of what all of its lanes have read.
    copy_async_wait<0>();
    __syncwarp();
    States& own = smem.warps[warp].states;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const float denominator = sum_over_warp(row_sum[h]);
        if (lane == 0) {
            own.maxima[h] = row_max[h];
            own.denominators[h] = denominator;
            own.has_key[h] = has_key[h];
        }
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
            const unsigned int pack = a * kRowLanes + lane;
#pragma unroll
            for (int i = 0; i < kLoadWidth; ++i) {
                float sum = sums[h][a][i];
#pragma unroll
                for (int step = kRowLanes; step < 32; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
                if (lane < kRowLanes && pack < kPacks) own.numerators[h][pack * kLoadWidth + i] = sum;
            }
        }
    }
    finish(smem.block, unit, output, [&](int w) -> const States& { return smem.warps[w].states; });
}
