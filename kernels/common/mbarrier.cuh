// Barriers in shared memory (mbarrier: from sm_80 on, and from sm_90 on with transactions): one PTX instruction to a
// wrapper, and the place of a ring of stages that they guard.
//
// A phase of a barrier completes when its expected arrivals and bytes have all come in. A waiter names
// the parity of the phase that it waits for; a fresh barrier is in phase 0, so a wait for parity 1
// passes at once.
#pragma once

#include "common/ptx.cuh"

using Barrier = unsigned long long;

// mbarrier.init: expect `arrivals` in every phase.
__device__ __forceinline__ void mbarrier_init(Barrier& barrier, unsigned int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: make initialised barriers visible to the tensor memory accelerator.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: what this thread did before is visible to whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// mbarrier.arrive.expect_tx: arrive, and let the phase also wait for `bytes` that the accelerator writes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Barrier& barrier, unsigned int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

#if __CUDA_ARCH__ >= 900
#define MBARRIER_WAIT "try_wait"
#else
#define MBARRIER_WAIT "test_wait"
#endif

// mbarrier.try_wait.parity: whether the phase is complete, after a wait of limited time. Before sm_90 there is only
// mbarrier.test_wait.parity, which does not wait.
__device__ __forceinline__ bool mbarrier_try_wait(const Barrier& barrier, unsigned int parity) {
    unsigned int done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier." MBARRIER_WAIT ".parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(const Barrier& barrier, unsigned int parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// Where one party stands in a ring of kStages buffers: the consumer of a stage waits for its full barrier
// with `parity`, the producer for its empty barrier with `parity ^ 1`.
template <int kStages>
struct RingPlace {
    unsigned int stage = 0;
    unsigned int parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};
