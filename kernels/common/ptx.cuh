// PTX instructions that several kernels need, one to a wrapper. What each does, and on which devices,
// is in the PTX ISA reference under the instruction's name.
#pragma once

// The address of an object in shared memory, in the 32-bit shared window that PTX operands take.
__device__ __forceinline__ unsigned int shared_address(const void* object) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(object));
}

// threadIdx.x, read anew: what is computed from it takes no registers in between.
__device__ __forceinline__ unsigned int fresh_thread() {
    unsigned int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ex2.approx.ftz.f32: 2^x with a relative error of 2^-22, subnormal results flushed to zero.
__device__ __forceinline__ float ex2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// rcp.approx.ftz.f32: 1 / x to one unit in the last place.
__device__ __forceinline__ float rcp(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// max.NaN.f32 (sm_80): the greater, or NaN where one is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// bar.sync (sm_70): wait until `threads` threads have arrived at named barrier `id`.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive (sm_70): count as arrived at named barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// setmaxnreg.inc (sm_90a): raise this warpgroup's registers a thread; waits until the pool has them.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256, "a multiple of 8 in [24, 256]");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec (sm_90a): give registers of this warpgroup back to the pool.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256, "a multiple of 8 in [24, 256]");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// fence.proxy.async (sm_90): order this thread's ordinary accesses to shared memory before what the
// matrix units and the tensor memory accelerator do to it afterwards.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// stmatrix.x4 (sm_90): store four 8 x 8 matrices of 16-bit elements; lane l holds the address of row
// l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(
    unsigned int address, unsigned int m0, unsigned int m1, unsigned int m2, unsigned int m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}
