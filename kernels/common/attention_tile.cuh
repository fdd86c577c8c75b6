// What attention kernels share whose warps own query rows and whose blocks of keys lie in shared memory.
#pragma once

#include "common/async_copy.cuh"
#include "common/attention.cuh"
#include "common/ptx.cuh"

// Which tile this block computes, as an index for QueryTile. Of causal tiles, which differ in weight, the heaviest of
// all planes should start first, or the last one is waited for; but then all planes' keys and values are in use at
// once. So planes go in sections that fit in a level-2 cache of today.
template <unsigned int kBlockQueries>
__device__ __forceinline__ unsigned int tile_index(int sq, int sk, int group) {
    if (!kCausal) return blockIdx.x;
    constexpr unsigned int kSectionBytes = 16u << 20;
    const unsigned int tiles = (sq + kBlockQueries - 1) / kBlockQueries;
    const unsigned int planes = gridDim.x / tiles;
    const unsigned long long plane_bytes = max(2ull * sk * kHeadDim * sizeof(Element), 1ull);
    const unsigned long long section_heads = max(kSectionBytes / plane_bytes, 1ull);
    const unsigned int section_planes = min(section_heads * group, static_cast<unsigned long long>(planes));
    const unsigned int first_plane = blockIdx.x / (tiles * section_planes) * section_planes;
    const unsigned int in_section = blockIdx.x - first_plane * tiles;
    const unsigned int width = min(section_planes, planes - first_plane);
    return (first_plane + in_section % width) * tiles + in_section / width;
}

// The blocks of keys of a tile of query rows: first <= block < end, of which those in [full_begin, full_end) are
// seen whole by all rows. `seen` are the keys that some row sees.
struct KeyBlocks {
    KeyRange seen;
    int first;
    int end;
    int full_begin;
    int full_end;

    // Ranges move right with the row: the first row begins and the last row ends what the tile sees.
    __device__ __forceinline__ KeyBlocks(const KeyRange& first_row, const KeyRange& last_row, int block_keys)
        : seen{first_row.begin, last_row.end} {
        first = seen.begin / block_keys;
        end = seen.begin < seen.end ? (seen.end + block_keys - 1) / block_keys : first;
        full_begin = (last_row.begin + block_keys - 1) / block_keys;
        full_end = first_row.end / block_keys;
    }

    // Whether some row may not see all of a block; with a mask, that may be any.
    __device__ __forceinline__ bool is_partial(int block) const {
        return kHasMask || block >= full_end || (kHasWindow && block < full_begin);
    }

    __device__ __forceinline__ bool has_partial() const {
        return kHasMask || end > full_end || (kHasWindow && first < full_begin);
    }
};

// The rows of a tile, kWarpRows to a warp: what they may see, and where they find their mask. It lies in shared
// memory, since it is seldom needed and registers are short. A lane has the rows 8 i from its first.
template <int kWarpRows>
struct TileRows {
    Lengths lengths;
    const Element* masks;  // of the plane
    unsigned int plane;    // b * q_heads + h
    unsigned int first;    // query
    int local_window;
    int sq;
    int sk;

    __device__ __forceinline__ unsigned int query(int i) const {
        const unsigned int thread = fresh_thread();
        return first + thread / 32 * kWarpRows + thread % 32 / 4 + i * 8;
    }
    __device__ __forceinline__ KeyRange range(int i) const { return lengths.range(query(i), local_window); }
    __device__ __forceinline__ const Element* mask(int i) const {
        return masks + min(query(i), static_cast<unsigned int>(sq) - 1) * static_cast<long long>(sk);
    }
};

// Start copying rows first, first + 1, ... of source that lie within `rows` to shared memory at `tile`, and zeros for
// others and for columns beyond the head. Layout says how many columns there are and where an element lies.
template <typename Layout, int kTileRows, bool kWhole>
__device__ __forceinline__ void copy_rows(
    unsigned int tile, const Element* source, unsigned int first, KeyRange rows) {
    constexpr int kAccesses = Layout::kColumns / kLoadWidth;
    constexpr bool kEven = kThreads % kAccesses == 0;  // then a thread stays in its columns
    constexpr int kUnroll = kLoadWidth * sizeof(Element) == 16 ? 8 : 2;
    const unsigned int thread = fresh_thread();
#pragma unroll kUnroll
    for (int i = 0; i < kTileRows * kAccesses; i += kThreads) {
        const int place = thread + i;
        if (kTileRows * kAccesses % kThreads != 0 && place >= kTileRows * kAccesses) break;
        const int row = kEven ? thread / kAccesses + i / kAccesses : place / kAccesses;
        const int column = (kEven ? thread % kAccesses : place % kAccesses) * kLoadWidth;
        const bool is_column = kHeadDim == Layout::kColumns || column < kHeadDim;
        const bool is_there = is_column && (kWhole || rows.contains(first + row));
        const long long offset = static_cast<long long>(first + row) * kHeadDim + column;
        copy_async<kLoadWidth * sizeof(Element)>(
            tile + Layout::offset(row, column), source + (is_there ? offset : 0), is_there);
    }
}

template <typename Layout, int kTileRows>
__device__ __forceinline__ void load_tile(unsigned int tile, const Element* source, unsigned int first, KeyRange rows) {
    if (rows.begin <= first && first + kTileRows <= rows.end) {
        copy_rows<Layout, kTileRows, true>(tile, source, first, rows);
    } else {
        copy_rows<Layout, kTileRows, false>(tile, source, first, rows);
    }
}
