// Thread block clusters (sm_90): one PTX instruction to a wrapper. A cluster of one block needs none of
// them, and compiles for every architecture.
#pragma once

#include "common/ptx.cuh"

// %cluster_ctarank: this block's place in its cluster.
template <int kBlocks>
__device__ __forceinline__ unsigned int cluster_rank() {
    if constexpr (kBlocks == 1) {
        return 0;
    } else {
        unsigned int rank;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        return rank;
    }
}

// barrier.cluster: a barrier over all threads of the cluster, which publishes their shared memory.
template <int kBlocks>
__device__ __forceinline__ void cluster_sync() {
    if constexpr (kBlocks == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

// mapa and ld.shared::cluster: what block `rank` of the cluster has where this block has `object`.
template <int kBlocks>
__device__ __forceinline__ unsigned int cluster_load(const unsigned int& object, unsigned int rank) {
    if constexpr (kBlocks == 1) {
        return object;
    } else {
        unsigned int value;
        asm volatile(
            "{\n"
            ".reg .b32 address;\n"
            "mapa.shared::cluster.u32 address, %1, %2;\n"
            "ld.shared::cluster.u32 %0, [address];\n"
            "}"
            : "=r"(value)
            : "r"(shared_address(&object)), "r"(rank)
            : "memory");
        return value;
    }
}

// mapa and st.shared::cluster: write where block `rank` of the cluster has what this block has as `object`.
template <int kBlocks>
__device__ __forceinline__ void cluster_store(unsigned int& object, unsigned int rank, unsigned int value) {
    if constexpr (kBlocks == 1) {
        object = value;
    } else {
        asm volatile(
            "{\n"
            ".reg .b32 address;\n"
            "mapa.shared::cluster.u32 address, %0, %1;\n"
            "st.shared::cluster.u32 [address], %2;\n"
            "}" ::"r"(shared_address(&object)),
            "r"(rank), "r"(value)
            : "memory");
    }
}
