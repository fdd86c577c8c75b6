// Thread block clusters (sm_90): one PTX instruction to a wrapper. A cluster of one block needs none of
// them, and compiles for every architecture.
#pragma once

#include "common/ptx.cuh"

// In a kernel's declaration: so many blocks form a cluster. Before sm_90 the compiler does not know the attribute.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_ROW(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_ROW(blocks)
#endif

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

// mapa and ld.shared::cluster: 16 bytes of what block `rank` of the cluster has where this block has `object`.
template <int kBlocks>
__device__ __forceinline__ uint4 cluster_load(const uint4& object, unsigned int rank) {
    if constexpr (kBlocks == 1) {
        return object;
    } else {
        uint4 value;
        asm volatile(
            "{\n"
            ".reg .b32 address;\n"
            "mapa.shared::cluster.u32 address, %4, %5;\n"
            "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [address];\n"
            "}"
            : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
            : "r"(shared_address(&object)), "r"(rank)
            : "memory");
        return value;
    }
}

// mapa of a generic address: what block `rank` of the cluster has where this block has `*object`.
template <int kBlocks, typename T>
__device__ __forceinline__ const T* cluster_map(const T* object, unsigned int rank) {
    if constexpr (kBlocks == 1) {
        return object;
    } else {
        const T* mapped;
        asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(object), "r"(rank));
        return mapped;
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
