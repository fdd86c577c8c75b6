// Copies from global to shared memory that pass by the registers (cp.async, sm_80 and later).
#pragma once

// cp.async of kBytes: what is there is copied, otherwise zeros are written and nothing is read. Two bytes are
// fewer than the instruction moves, and go through a register.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned int target, const void* source, bool is_there) {
    static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "an access");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(is_there ? 16 : 0)
                     : "memory");
    } else if constexpr (kBytes > 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes),
                     "r"(is_there ? kBytes : 0)
                     : "memory");
    } else {
        const unsigned short bits = is_there ? *static_cast<const unsigned short*>(source) : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(bits) : "memory");
    }
}

// cp.async.commit_group: this thread's copies since the last one form a group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: at most kPending of this thread's latest groups are still on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrive at a barrier once this thread's copies so far have landed.
__device__ __forceinline__ void copy_async_arrive(unsigned int barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
