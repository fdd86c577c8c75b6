// How blocks meet that run at the same time, which a cooperative launch promises; and the accesses to global memory
// that this is made of, one PTX instruction to a wrapper.
//
// A block that meets the others writes a slot of its own: what it tells them, and which meeting it is, in one access of
// 16 bytes, which is seen whole or not at all. The others read it until it is that meeting's. To count arrivals, wait
// for their number and only then read what has been told would take two more ways to the level-2 cache and back.
//
// Meetings are numbered from 1 on, in 64 bits and so without an end: nothing has to be reset, and no slot has the
// number of a meeting to come, in whichever launch it was written. At its start a launch learns how many were held
// before it; once all of its blocks have done so, one of them leaves the number for the next launch. A launch that does
// not come to its end leaves it wrong, but such a one ends the context with its memory.
//
// Two slots a block, by turns, are enough: who writes one again has met all others since, and they had read it by then.
//
// Fences beside accesses that do not say so themselves are no way to do it: with them the compiler turns every addition
// to global memory into one that returns, and is waited for.
#pragma once

struct alignas(16) TeamSlot {
    unsigned long long told, meeting;
};

// st.release.gpu.b128: what this thread did before, or has seen, is published to who reads the slot.
__device__ __forceinline__ void store_slot_release(
    TeamSlot& slot, unsigned long long told, unsigned long long meeting) {
    asm volatile(
        "{\n"
        ".reg .b128 slot;\n"
        "mov.b128 slot, {%1, %2};\n"
        "st.release.gpu.global.b128 [%0], slot;\n"
        "}" ::"l"(&slot),
        "l"(told), "l"(meeting)
        : "memory");
}

// st.relaxed.gpu.b128: the slot alone.
__device__ __forceinline__ void store_slot_relaxed(
    TeamSlot& slot, unsigned long long told, unsigned long long meeting) {
    asm volatile(
        "{\n"
        ".reg .b128 slot;\n"
        "mov.b128 slot, {%1, %2};\n"
        "st.relaxed.gpu.global.b128 [%0], slot;\n"
        "}" ::"l"(&slot),
        "l"(told), "l"(meeting)
        : "memory");
}

// ld.acquire.gpu.b128: what the slot's writer has published is seen.
__device__ __forceinline__ TeamSlot load_slot_acquire(const TeamSlot& slot) {
    TeamSlot loaded;
    asm volatile(
        "{\n"
        ".reg .b128 slot;\n"
        "ld.acquire.gpu.global.b128 slot, [%2];\n"
        "mov.b128 {%0, %1}, slot;\n"
        "}"
        : "=l"(loaded.told), "=l"(loaded.meeting)
        : "l"(&slot)
        : "memory");
    return loaded;
}

// ld.relaxed.gpu.b128: the slot alone.
__device__ __forceinline__ TeamSlot load_slot_relaxed(const TeamSlot& slot) {
    TeamSlot loaded;
    asm volatile(
        "{\n"
        ".reg .b128 slot;\n"
        "ld.relaxed.gpu.global.b128 slot, [%2];\n"
        "mov.b128 {%0, %1}, slot;\n"
        "}"
        : "=l"(loaded.told), "=l"(loaded.meeting)
        : "l"(&slot)
        : "memory");
    return loaded;
}

// st.relaxed.gpu, ld.relaxed.gpu: of a word that is seen whole, and says by itself that it is there.
__device__ __forceinline__ void store_relaxed(unsigned long long& word, unsigned long long value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}

__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long& word) {
    unsigned long long value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
    return value;
}
