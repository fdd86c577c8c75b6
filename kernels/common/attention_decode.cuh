// What the kernels for a single query row share: who reads which keys, and how their parts of a softmax are merged.
//
// A cluster of CLUSTER blocks owns one plane of keys and values, and HEADS of the query heads that read it. Its warps
// take turns at runs of 32 keys and keep softmax states of their own, which are merged at the end in the order of warps
// and then of blocks. Which keys a warp takes depends on the row's own range alone.
#pragma once

#include "common/attention.cuh"
#include "common/cluster.cuh"

constexpr int kHeads = HEADS;
constexpr int kCluster = CLUSTER;
constexpr int kWarps = kThreads / 32;
constexpr int kRunKeys = 32;
constexpr unsigned int kRunStep = kCluster * kWarps * kRunKeys;  // from one run of a warp to the next
static_assert(kCluster == 1 || __CUDA_ARCH__ >= 900, "there are no clusters before Hopper");

// What a cluster works on.
struct Unit {
    unsigned int kv_head;  // of all batch elements: the plane of keys and values
    unsigned int b;
    unsigned int h;        // the first query head of the batch element,
    unsigned int plane;    // and of all
    unsigned int n_heads;  // at most kHeads

    __device__ Unit(unsigned int q_heads, unsigned int group) {
        const unsigned int kv_heads = q_heads / group;
        const unsigned int head_blocks = (group + kHeads - 1) / kHeads;
        const unsigned int index = blockIdx.x / kCluster;
        kv_head = index / head_blocks;
        b = kv_head / kv_heads;
        const unsigned int first_head = index % head_blocks * kHeads;
        h = kv_head % kv_heads * group + first_head;
        plane = b * q_heads + h;
        n_heads = min(group - first_head, kHeads);
    }
};

// This warp's number, which the compiler then knows to be the same in all lanes.
__device__ __forceinline__ unsigned int uniform_warp() { return __shfl_sync(kFullWarp, threadIdx.x / 32, 0); }

__device__ __forceinline__ unsigned int first_run(const KeyRange& range, unsigned int warp) {
    return range.begin + (cluster_rank<kCluster>() * kWarps + warp) * kRunKeys;
}

constexpr int kColumns = 4;  // that a thread merges at a time
constexpr int kColumnGroups = (kHeadDim + kColumns - 1) / kColumns;

// Softmax states of kHeads rows: the sums of weights times values, those of weights, and what weights are relative to.
struct States {
    alignas(16) float numerators[kHeads][kColumnGroups * kColumns];
    alignas(16) float maxima[kHeads];
    alignas(16) float denominators[kHeads];
    alignas(16) unsigned int has_key[kHeads];
};

struct Merged {
    float numerators[kColumns];
    float denominator;
    float row_max;
    bool has_key;
};

// Merge columns of kCount states of a row, in their order; states_of(i) is one of them.
template <int kCount, typename StatesOf>
__device__ __forceinline__ Merged merge(int head, int column, StatesOf states_of) {
    Merged merged = {};
    merged.row_max = negative_infinity();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        merged.row_max = fmaxf(merged.row_max, states_of(i).maxima[head]);
        merged.has_key |= states_of(i).has_key[head];
    }
    const float origin = softmax_origin(merged.row_max);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const States& states = states_of(i);
        const float rescale = expf(states.maxima[head] - origin);
        const float4 numerators = *reinterpret_cast<const float4*>(&states.numerators[head][column]);
        merged.denominator = fmaf(states.denominators[head], rescale, merged.denominator);
        merged.numerators[0] = fmaf(numerators.x, rescale, merged.numerators[0]);
        merged.numerators[1] = fmaf(numerators.y, rescale, merged.numerators[1]);
        merged.numerators[2] = fmaf(numerators.z, rescale, merged.numerators[2]);
        merged.numerators[3] = fmaf(numerators.w, rescale, merged.numerators[3]);
    }
    return merged;
}

// Merge the states of the block's warps, which states_of(w) tells, into those of the block, these with the other
// blocks', and write the result.
template <typename StatesOf>
__device__ __forceinline__ void finish(States& block, const Unit& unit, Element* output, StatesOf states_of) {
    __syncthreads();
    for (int i = threadIdx.x; i < kHeads * kColumnGroups; i += kThreads) {
        const int head = i / kColumnGroups;
        const int column = i % kColumnGroups * kColumns;
        const Merged merged = merge<kWarps>(head, column, states_of);
        *reinterpret_cast<float4*>(&block.numerators[head][column]) =
            make_float4(merged.numerators[0], merged.numerators[1], merged.numerators[2], merged.numerators[3]);
        if (column == 0) {
            block.maxima[head] = merged.row_max;
            block.denominators[head] = merged.denominator;
            block.has_key[head] = merged.has_key;
        }
    }
    cluster_sync<kCluster>();
    const int first = cluster_rank<kCluster>() * kThreads + threadIdx.x;
    for (int i = first; i < static_cast<int>(unit.n_heads) * kColumnGroups; i += kCluster * kThreads) {
        const int head = i / kColumnGroups;
        const int column = i % kColumnGroups * kColumns;
        const Merged merged = merge<kCluster>(
            head, column, [&](int rank) -> const States& { return *cluster_map<kCluster>(&block, rank); });
        Element* row = output + 1ull * (unit.plane + head) * kHeadDim + column;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            if (column + j < kHeadDim) {
                row[j] = from_f32<Element>(normalise(merged.numerators[j], merged.denominator, merged.has_key));
            }
        }
    }
    cluster_sync<kCluster>();  // the others have read this block's shared memory
}
