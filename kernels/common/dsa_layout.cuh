// What the launches of the certified DsaIndexSelect agree on.
#pragma once

// Scores are computed for blocks of kBlockKeys keys; masks and norms are kept a word of 32 keys at a time.
constexpr int kBlockKeys = BLOCK_KEYS;
constexpr int kBlockWords = kBlockKeys / 32;
constexpr int kMaxKeyBlocks = 131072 / kBlockKeys;
static_assert(kBlockWords % 4 == 0, "words are read four at a time");

// In the account of a row: some allowed key has a bias other than zero.
constexpr unsigned int kBiased = 1u << 31;

// The bits of a masked key's score, where scores include the bias: no sum is this NaN.
constexpr unsigned int kMaskedScore = 0xffffffff;

// What is known of 32 consecutive keys of a batch.
struct KeyWord {
    unsigned int irregular;  // bit i: the norm of key i is not finite
    float norm;              // no regular key has a greater one
};

// What bounds the error of a row's scores, besides the norms of its keys: docs/dsa_exactness.md.
struct alignas(16) RowBound {
    float per_norm;  // e = per_norm * norm of the key + floor + a share of |f|
    float floor;
    float max_norm;  // with a greater norm a strict sum might overflow
    unsigned int flags;
};

constexpr unsigned int kRegularRow = 1;  // all of its numbers are finite
constexpr unsigned int kExactRow = 2;    // f is the strict score: every term is zero
constexpr unsigned int kFusingRow = 4;   // no query element is outside ExactRange
