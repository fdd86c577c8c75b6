// A barrier of blocks that run at the same time, which a cooperative launch promises; and the accesses to global memory
// that it is made of, one PTX instruction to a wrapper.
//
// Its word in global memory is zero before the first use, and counts the arrivals of one phase in its low bits. The
// phase over, those are zero again and the top bit has turned: any number of blocks may use it next, and nothing has to
// be reset. A launch that does not come to its end leaves it wrong, but such a one ends the context with its memory.
#pragma once

// red.release.gpu: add to a word once all that this thread did, or has seen, is visible to whoever acquires it.
__device__ __forceinline__ void red_add_release(unsigned int& word, unsigned int value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
}

// ld.acquire.gpu: what was visible to the writer of the value is visible to this thread.
__device__ __forceinline__ unsigned int load_acquire(const unsigned int& word) {
    unsigned int value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(&word) : "memory");
    return value;
}

// One thread's view of the barrier. Each block arrives by one thread, after a barrier of those that it arrives for.
class TeamBarrier {
public:
    static constexpr unsigned int kPhase = 1u << 31;

    // `before` is the word as it was before this block has arrived for the first time.
    __device__ __forceinline__ TeamBarrier(unsigned int& word, unsigned int before) : word_(word), phase_(before) {}

    __device__ __forceinline__ void arrive(unsigned int rank, unsigned int blocks) {
        red_add_release(word_, rank == 0 ? kPhase - (blocks - 1) : 1);
    }

    // Wait until all blocks have arrived.
    __device__ __forceinline__ void wait() const {
        while (((load_acquire(word_) ^ phase_) & kPhase) == 0) {
        }
    }

    // Go on to the next phase; every thread that waits for later ones, whether or not it has waited for this one.
    __device__ __forceinline__ void advance() { phase_ ^= kPhase; }

private:
    unsigned int& word_;
    unsigned int phase_;
};
