// The tensor memory accelerator (sm_90): copies of boxes between a tensor in global memory, described by
// a tensor map, and shared memory. One PTX instruction to a wrapper.
#pragma once

#include "common/mbarrier.cuh"

// CUtensorMap: encoded by the host, passed as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    char opaque[128];
};

// Which lines the level-2 cache keeps longest (the encodings of createpolicy for whole accesses).
enum class CacheHint : unsigned long long { kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000 };

// prefetch.tensormap: have the map at hand before the first copy.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor.3d to shared memory: the box at (x, y, z); what lies outside the tensor reads as
// zero. The whole box counts towards the barrier's bytes.
__device__ __forceinline__ void tma_load_3d(
    void* target, const TensorMap& map, Barrier& barrier, int x, int y, int z, CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(target)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "l"(hint)
        : "memory");
}

// cp.async.bulk.tensor.3d to global memory: the box at (x, y, z), clipped to the tensor.
__device__ __forceinline__ void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(source)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// cp.async.bulk to shared memory: `bytes` contiguous bytes, a multiple of 16 at aligned addresses.
__device__ __forceinline__ void bulk_load(void* target, const void* source, unsigned int bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

// cp.async.bulk.commit_group: the stores of this thread since the last one form a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read 0: the stores of this thread have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
