// Prefix sums over the threads of a block.
#pragma once

constexpr int kWarpSize = 32;
constexpr unsigned int kFullWarp = 0xffffffffu;

// Scratch of block_exclusive_scan: one partial sum a warp.
template <int kThreads>
struct BlockScanScratch {
    static_assert(kThreads % kWarpSize == 0 && kThreads <= kWarpSize * kWarpSize, "whole warps, one partial a lane");
    static constexpr int kWarps = kThreads / kWarpSize;
    unsigned int warp_sums[kWarps];
};

// The sum of value over the threads before this one; total becomes the sum over all of them.
// Called by every thread of a one-dimensional block. Scratch may be reused at once.
template <int kThreads>
__device__ __forceinline__ unsigned int block_exclusive_scan(
    unsigned int value, unsigned int& total, BlockScanScratch<kThreads>& scratch) {
    constexpr int kWarps = BlockScanScratch<kThreads>::kWarps;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;

    unsigned int inclusive = value;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const unsigned int below = __shfl_up_sync(kFullWarp, inclusive, step);
        if (lane >= step) inclusive += below;
    }
    if (lane == kWarpSize - 1) scratch.warp_sums[warp] = inclusive;
    __syncthreads();

    // Every warp adds up all partial sums for itself: no second barrier to publish them.
    const unsigned int partial = lane < kWarps ? scratch.warp_sums[lane] : 0;
    total = __reduce_add_sync(kFullWarp, partial);
    const unsigned int before = __reduce_add_sync(kFullWarp, lane < warp ? partial : 0);
    __syncthreads();
    return before + inclusive - value;
}
